"""Real training runs for tests: a fixed plan under MemX, or stock Megatron with the same split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import TINY_MODEL, TINY_TRAINING, Finished, memx_torchrun, read_steps
from plans import make_plan

from megatron_memx.job import parse_job
from megatron_memx.parallel import Recompute
from megatron_memx.plan import Plan
from megatron_memx.platforms import default_words
from megatron_memx.versions import megatron_version

SCRIPT = str(Path(__file__).with_name("recorded.py"))
NONE = Recompute()
SELECTIVE = Recompute.selective("core_attn")


def block(count: int) -> Recompute:
    return Recompute.full("block", count)


def uniform(count: int) -> Recompute:
    return Recompute.full("uniform", count)


@dataclass(frozen=True)
class Run:
    """A finished run with the raw results of each Megatron rank."""

    finished: Finished
    ranks: dict[int, dict[str, Any]]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Losses of the rank that has them, gradient norm of each step."""
        last = next(
            record for _, record in sorted(self.ranks.items()) if record["steps"][0]["losses"]
        )
        return last["steps"]


def plan_for(layers: list[list[int]], words: list[str], **more: Any) -> Plan:
    """Return a plan whose model is the one that the words describe."""
    job = parse_job([*words, *default_words("cpu", words)])
    plan = make_plan(
        layers,
        global_batch_size=job.train.global_batch_size,
        versions={"megatron_core": megatron_version() or ""},
        **more,
    )
    data = plan.to_dict()
    data["model"] = job.model.to_dict()
    return Plan.from_dict(data)


def run_plan(
    plan: Plan,
    folder: Path,
    *words: str,
    model: list[str] | None = None,
    timeout_s: float = 180,
    env: dict[str, str] | None = None,
    expect: int = 0,
) -> Run:
    """Train under a plan with MemX."""
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan.json")
    return _run(
        plan.parallel.world_size,
        folder,
        [*(model or [*TINY_MODEL, *TINY_TRAINING]), *words],
        ["--memx-platform", "cpu", "--memx-plan", str(folder / "plan.json")],
        timeout_s,
        env,
        expect,
    )


def run_stock(
    world: int,
    folder: Path,
    *words: str,
    model: list[str] | None = None,
    timeout_s: float = 180,
    env: dict[str, str] | None = None,
    expect: int = 0,
) -> Run:
    """Train stock Megatron: the CPU shim, no plan, the split in Megatron's own words."""
    folder.mkdir(parents=True, exist_ok=True)
    return _run(
        world,
        folder,
        [*(model or [*TINY_MODEL, *TINY_TRAINING]), *words],
        ["--memx-platform", "cpu"],
        timeout_s,
        env,
        expect,
    )


def _run(
    world: int,
    folder: Path,
    script_words: list[str],
    memx_words: list[str],
    timeout_s: float,
    env: dict[str, str] | None,
    expect: int,
) -> Run:
    finished = memx_torchrun(
        *("--nproc-per-node", str(world), SCRIPT),
        *script_words,
        *memx_words,
        timeout_s=timeout_s,
        env={"TEST_RECORD_DIR": str(folder), **(env or {})},
    )
    assert finished.code == expect, finished.text[-4000:]
    return Run(finished, read_steps(folder))
