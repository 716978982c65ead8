"""``memx profile --trace``: peak memory of real Megatron stages, without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from megatron_memx.errors import MemXError


def trace(read: Any, words: Sequence[str], *, folder: Any, processes: int) -> dict[str, Any]:
    """Return traced and counted bytes of each pipeline rank, as plain JSON types.

    Raises:
        BadInputError: What Megatron says against the arguments.
    """
    from megatron_memx.launch.trace_job import counted, run_traces, task_of

    from megatron_memx.megatron_args import without_options
    from megatron_memx.options import OPTIONS

    request = read.request
    chosen, stages = counted(request)
    plain = without_options(words, {option.dest for option in OPTIONS})
    tasks = [task_of(request.job, plain, chosen.outer.sizes, rank) for rank in range(len(stages))]
    found = run_traces(
        tasks,
        folder=folder,
        versions=dict(request.versions),
        processes=processes,
        progress=lambda done, total: print(
            f"memx profile: traced {done} of {total} stages", file=sys.stderr
        ),
    )
    rows = []
    for rank, (stage, traced) in enumerate(zip(stages, found, strict=True)):
        if isinstance(traced, MemXError):
            raise traced
        peak_bytes = stage.memory.peak_bytes
        rows.append(
            {
                "pipeline_rank": rank,
                "layers": [chunk.num_layers for chunk in stage.chunks],
                "traced_peak_bytes": traced.peak_bytes,
                "traced_parameter_bytes": traced.parameter_bytes,
                "traced_gradient_bytes": traced.gradient_bytes,
                "traced_optimizer_bytes": traced.optimizer_bytes,
                "counted_peak_bytes": peak_bytes,
                "counted_error": peak_bytes / traced.peak_bytes - 1,
                "counted_breakdown_bytes": dict(stage.memory.breakdown_bytes),
            }
        )
    return {
        "sizes": chosen.outer.sizes.label,
        "recompute": chosen.policy.label,
        "versions": dict(request.versions),
        "stages": rows,
    }


def show_trace(result: dict[str, Any]) -> None:
    """Print what :func:`trace` returned."""
    from megatron_memx.units import format_bytes

    release = result["versions"]["megatron_core"]
    print(f"{result['sizes']}, recompute {result['recompute']}, megatron-core {release}")
    for row in result["stages"]:
        parts = ("parameter", "gradient", "optimizer")
        known = ", ".join(f"{name}s {format_bytes(row[f'traced_{name}_bytes'])}" for name in parts)
        print(
            f"stage {row['pipeline_rank']}, {'+'.join(map(str, row['layers']))} layers: peak "
            f"{format_bytes(row['traced_peak_bytes'])} traced ({known}); "
            f"{format_bytes(row['counted_peak_bytes'])} counted by the planner "
            f"({row['counted_error']:+.2%})"
        )
    print("allocated tensors; the allocator's reserve, the context and communicators come on top")
