"""What the ranks of a run measured, read from the files that they leave in the run folder."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The first iterations hold imports, allocations and caches that no later one repeats.
WARMUP_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMeasured:
    """Medians over steps, the slowest (time) or largest (memory) rank of one stage.

    ``forward_s`` and ``backward_s`` are per micro-batch, ``p2p_s`` per iteration.
    """

    forward_s: float
    backward_s: float
    p2p_s: float
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One run: the iteration time and each stage, by pipeline rank."""

    iteration_time_s: float
    num_steps: int
    platform: str
    stages: Mapping[int, StageMeasured]


def read_measured(run_dir: str | os.PathLike[str], *, num_microbatches: int) -> Measured | None:
    """Return what the ranks measured, or None if no rank left a whole step behind.

    Args:
        run_dir: Folder with one ``rank_<r>.json`` a rank.
        num_microbatches: Micro-batches of an iteration, to bring times to one micro-batch.
    """
    by_stage: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(Path(run_dir).glob("rank_*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            by_stage.setdefault(int(data["pipeline_rank"]), []).append(data)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a rank that was killed while writing measured nothing
    steps: list[float] = []
    stages: dict[int, StageMeasured] = {}
    platform = "unknown"
    for stage, ranks in by_stage.items():
        platform = str(ranks[0].get("platform", platform))
        timed = [_timed_steps(rank) for rank in ranks]
        if not any(timed):
            continue
        steps.extend(_median(step["step_s"] for step in rank) for rank in timed if rank)
        peaks = [peak for rank in ranks if (peak := _peak(rank)) is not None]
        stages[stage] = StageMeasured(
            forward_s=_slowest(timed, "forward_s") / num_microbatches,
            backward_s=_slowest(timed, "backward_s") / num_microbatches,
            p2p_s=_slowest(timed, "p2p_s"),
            peak_bytes=max(peaks) if peaks else None,
        )
    if not steps:
        return None
    count = max(len(_timed_steps(rank)) for ranks in by_stage.values() for rank in ranks)
    return Measured(iteration_time_s=max(steps), num_steps=count, platform=platform, stages=stages)


def _timed_steps(rank: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the steps whose time counts: not warm-up, not slowed by memory tracking."""
    steps = [step for step in rank.get("steps", ()) if not step.get("memory_tracked")]
    return steps[WARMUP_STEPS:]


def _peak(rank: Mapping[str, Any]) -> int | None:
    peaks = [
        int(step["peak_allocated_bytes"])
        for step in rank.get("steps", ())
        if step.get("peak_allocated_bytes") is not None
    ]
    return max(peaks) if peaks else None


def _slowest(ranks: list[list[dict[str, Any]]], name: str) -> float:
    return max(_median(float(step[name]) for step in rank) for rank in ranks if rank)


def _median(values: Iterable[float]) -> float:
    return statistics.median(list(values))
