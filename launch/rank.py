"""What every rank runs: agree on the plan, take the rank's place in it, patch, run the script.

``python -m megatron_memx.launch.rank script|module NAME <arguments>``. Megatron rank i runs on the
launcher rank that the plan names; everything else of the environment stays torchrun's.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from megatron_memx.launch.supervisor import die_with_parent

from megatron_memx.errors import MemXError
from megatron_memx.plan import Plan

PLAN, PLATFORM, RUN_DIR = "MEMX_PLAN", "MEMX_PLATFORM", "MEMX_RUN_DIR"
ALLOW_UNKNOWN = "MEMX_ALLOW_UNKNOWN_MEGATRON"
ERROR_FILE = "error_rank_{rank}.txt"


def take_place(plan: Plan) -> None:
    """Put the Megatron rank of this launcher rank into RANK.

    Raises:
        BadInputError: The plan is for another number of ranks.
    """
    from megatron_memx.planner import check_plan_fits

    check_plan_fits(plan, world_size=int(os.environ["WORLD_SIZE"]))
    os.environ["RANK"] = str(plan.megatron_rank(int(os.environ["RANK"])))


def main(words: list[str]) -> int:
    """Run the rank and return its exit code."""
    die_with_parent()
    kind, target, arguments = words[0], words[1], words[2:]
    run_dir = os.environ.get(RUN_DIR)
    launcher_rank = int(os.environ["RANK"])
    try:
        return _run(kind, target, arguments, run_dir)
    except MemXError as error:
        text = f"memx-torchrun, rank {launcher_rank}: {error}"
        print(text, file=sys.stderr, flush=True)
        if run_dir:
            path = Path(run_dir) / ERROR_FILE.format(rank=launcher_rank)
            path.write_text(text, encoding="utf-8")
        # Other ranks wait for this one in collectives: leave at once, without their clean-up.
        sys.stdout.flush()
        os._exit(error.exit_code)


def _run(kind: str, target: str, arguments: list[str], run_dir: str | None) -> int:
    plan_file, platform = os.environ.get(PLAN), os.environ.get(PLATFORM)
    plan = Plan.load(plan_file) if plan_file else None
    release = None
    if plan is not None:
        from megatron_memx.launch import handshake

        store, release = handshake.open_store()
        handshake.check(
            plan.signature,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            store=store,
        )
        take_place(plan)
    sys.argv = [target, *arguments]
    if kind == "script":
        sys.path[0] = str(Path(target).resolve().parent)
    from megatron_memx.patches.registry import Context

    from megatron_memx import patches

    patches.apply(
        Context(
            plan=plan,
            platform=platform,
            run_dir=run_dir if plan is not None else None,
            allow_unknown=os.environ.get(ALLOW_UNKNOWN) == "1",
        )
    )
    if kind == "script":
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    if release is not None:
        release()
    if plan is not None:
        patches.verify()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
