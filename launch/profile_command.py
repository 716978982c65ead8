"""``memx profile --trace``: peak memory of real Megatron stages, without a GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from megatron_memx.cli.parsing import CommandParser, print_json
from megatron_memx.cli.reading import add_facts, read_job, split_words
from megatron_memx.errors import BadInputError, MemXError

_EXAMPLE = (
    "memx profile --trace --cluster cluster.yaml -- --pipeline-model-parallel-size 4 "
    "--num-layers 32 ..."
)


def run(arguments: Sequence[str]) -> int:
    """Run ``memx profile`` and return its exit code.

    Raises:
        BadInputError: Arguments that cannot be read, or that Megatron refuses.
        LegalityError: A configuration that Megatron would refuse.
    """
    from megatron_memx.cache.store import default_cache_dir
    from megatron_memx.cluster_file import load_cluster

    before, after = split_words(arguments, "profile", _EXAMPLE)
    parser = CommandParser(
        "profile",
        "Trace the configuration that Megatron's arguments behind -- write out: the real model, "
        "schedule and optimizer of every pipeline stage run under fake tensors, and every byte "
        "that a rank would hold is counted. Needs megatron-core, but no GPU.",
        _EXAMPLE,
    )
    parser.add_argument("--trace", action="store_true", help="trace memory (required)")
    parser.add_argument("--cluster", required=True, help="cluster.yaml")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="processes to trace in (one for each core)"
    )
    add_facts(parser)
    options = parser.parse_args(before)
    if not options.trace:
        raise BadInputError(
            "memx profile measures only as part of memx-torchrun --auto-parallel; here it traces",
            fix="memx profile --trace, or memx-torchrun ... --auto-parallel --memx-dry-run",
            flag="--trace",
        )
    processes = options.processes or os.cpu_count() or 1
    if processes < 1:
        raise BadInputError(
            f"--processes {processes}: must be 1 or more", fix="1", flag="--processes"
        )
    read = read_job(after, load_cluster(options.cluster), options, parser)
    folder = default_cache_dir(options.cache_dir or read.options.memx_cache_dir) / "traces"
    result = trace(read, after, folder=folder, processes=processes)
    if options.json:
        print_json(result)
    else:
        _show(result)
    return 0


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


def _show(result: dict[str, Any]) -> None:
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
