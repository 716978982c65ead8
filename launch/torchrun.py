"""``memx-torchrun``: torchrun with a plan.

This process never imports torch: it plans, starts the agent, waits and reports.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_memx.errors import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TRAINING_FAILED,
    BadInputError,
    MemXError,
)
from megatron_memx.options import OPTIONS, MemXOptions, parse_options

_USAGE = """usage: memx-torchrun [torchrun options] [--] script.py [script arguments] [MemX options]

torchrun with a plan: with --auto-parallel, MemX finds the devices, measures what it does not know,
searches the parallel sizes, the layers of each stage and what each recomputes, and runs the script
on that plan. Every torchrun option passes through. Without MemX options this is torchrun.

MemX options (behind the script):
"""


def help_text() -> str:
    """Return the text of ``memx-torchrun --help``."""
    lines = []
    for option in OPTIONS:
        value = option.metavar or "|".join(option.choices) or ("" if option.type is None else "N")
        lines.append(f"  {option.flag} {value}".rstrip())
        lines.append(f"      {option.help}")
    tail = (
        "\nExit codes: 0 done, 2 bad input, 3 no feasible plan, 4 training failed (the first "
        "rank's code\nis printed), 130 interrupted.\n"
        "torchrun's own options: python -m torch.distributed.run --help\n"
    )
    return _USAGE + "\n".join(lines) + "\n" + tail


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``memx-torchrun`` and return its exit code."""
    started_s = time.perf_counter()
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(help_text())
        return EXIT_OK if words else EXIT_BAD_INPUT
    if words[0] == "--version":
        from megatron_memx import __version__

        print(f"memx-torchrun {__version__}")
        return EXIT_OK
    try:
        return _main(words, started_s)
    except MemXError as error:
        print(f"memx-torchrun: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _main(words: list[str], started_s: float) -> int:
    from megatron_memx.launch.torchrun_options import split

    invocation = split(words)
    if invocation.script is None:
        raise BadInputError("no script was given", fix="memx-torchrun [options] script.py ...")
    options = parse_options(list(invocation.arguments))
    if _plain(options):
        return _run_torchrun(words)
    from megatron_memx.launch import prelaunch

    is_module = invocation.on("module")
    if not is_module and not Path(invocation.script).is_file():
        raise BadInputError(
            f"{invocation.script}: there is no such script", fix="the path of pretrain_gpt.py"
        )
    prepared = prelaunch.prepare(invocation, options, started_s=started_s)
    plan = prepared.plan
    if plan is not None:
        from megatron_memx.report.terminal import make_console, show_plan

        console = make_console()
        show_plan(plan, reused=prepared.reused, took_s=prepared.took_s, console=console)
        if options.memx_save_plan:
            plan.save(options.memx_save_plan)
            console.print(f"  saved    {options.memx_save_plan}")
    for note in prepared.notes:
        print(f"  note     {note}")
    if options.memx_dry_run:
        _show_command(prepared, prelaunch.launcher_words(invocation), invocation.arguments)
        return EXIT_OK
    if plan is not None and prepared.job is not None:
        from megatron_memx.resume import check_resume

        check_resume(plan, prepared.job)
    sys.stdout.flush()
    from megatron_memx.launch.supervisor import agent_command, run

    command = agent_command(
        prelaunch.launcher_words(invocation),
        "megatron_memx.launch.rank",
        prelaunch.script_words(invocation),
        str(prepared.run_dir),
    )
    code = run(command, prelaunch.rank_environment(prepared, options))
    return _finish(code, prepared)


def _plain(options: MemXOptions) -> bool:
    return options == MemXOptions()


def _run_torchrun(words: list[str]) -> int:
    """Be torchrun: the same words, the same exit code, nothing left behind."""
    import os

    from megatron_memx.launch.supervisor import run
    from megatron_memx.launch.torchrun_options import split

    invocation = split(words)
    launcher = list(invocation.launcher)
    arguments = [str(invocation.script), *invocation.arguments]
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "--", *arguments]
    return run(command, os.environ)


def _show_command(prepared: Any, launcher: list[str], arguments: Sequence[str]) -> None:
    from megatron_memx.megatron_args import overrides_to_argv, plan_overrides

    if prepared.plan is None:
        print("  would run torchrun as given; no plan was asked for")
        return
    added = overrides_to_argv(plan_overrides(prepared.plan))
    print(f"  launcher {shlex.join(launcher)}")
    print(f"  script   {shlex.join(arguments)}")
    print(f"  plus     {shlex.join(added)}")
    order = prepared.plan.rank_order
    if list(order) != sorted(order):
        print(f"  ranks    Megatron's ranks 0.. run on launcher ranks {','.join(map(str, order))}")
    print("  dry run: no rank was started")


def _finish(code: int, prepared: Any) -> int:
    """Report how the run ended and return the exit code."""
    if code in (128 + 2,):
        return EXIT_INTERRUPTED
    if code >= 128:
        return code
    plan = prepared.plan
    if code == EXIT_OK:
        if plan is not None:
            _show_measured(prepared)
        return EXIT_OK
    refused = sorted(prepared.run_dir.glob("error_rank_*.txt"))
    if refused:
        # The rank has printed it; its kind of error is the run's.
        return EXIT_BAD_INPUT
    try:
        data = json.loads((prepared.run_dir / "failure.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        print(f"memx-torchrun: the launcher ended with code {code}", file=sys.stderr)
        return EXIT_TRAINING_FAILED
    rank, first = data["rank"], data["exit_code"]
    where = ""
    if plan is not None:
        megatron_rank = plan.megatron_rank(rank)
        stage = megatron_rank // plan.parallel.ranks_per_stage
        where = f" (Megatron rank {megatron_rank}, stage {stage})"
    how = f"was ended by signal {-first}" if first < 0 else f"ended with exit code {first}"
    print(f"memx-torchrun: training failed: rank {rank}{where} {how} first", file=sys.stderr)
    return EXIT_TRAINING_FAILED


def _show_measured(prepared: Any) -> None:
    from megatron_memx.report.measured import read_measured
    from megatron_memx.report.terminal import make_console, show_measured

    measured = read_measured(
        prepared.run_dir, num_microbatches=prepared.plan.parallel.num_microbatches
    )
    console = make_console()
    if measured is None:
        console.print(
            "MemX: too few steps to compare with the prediction (it takes four: the first two warm "
            "up, and one tracks memory)"
        )
        return
    show_measured(prepared.plan, measured, console)


if __name__ == "__main__":
    raise SystemExit(main())
