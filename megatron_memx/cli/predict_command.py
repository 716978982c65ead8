"""``memx predict``: time and memory of the one configuration that the arguments write out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_memx.cli.parsing import CommandParser, print_json
from megatron_memx.cli.reading import add_facts, read_job, split_words

if TYPE_CHECKING:
    from megatron_memx.cli.reading import Read

_EXAMPLE = (
    "memx predict --cluster cluster.yaml -- --tensor-model-parallel-size 2 --num-layers 32 ..."
)


def run(arguments: Sequence[str]) -> int:
    """Run ``memx predict`` and return its exit code.

    Raises:
        BadInputError: Arguments that cannot be read.
        LegalityError: Megatron would refuse the configuration.
    """
    from megatron_memx.cluster_file import load_cluster

    before, after = split_words(arguments, "predict", _EXAMPLE)
    parser = CommandParser(
        "predict",
        "Predict one configuration: parallel sizes, layout and recomputation as Megatron's "
        "arguments behind -- say, Megatron's defaults where they do not.",
        _EXAMPLE,
    )
    parser.add_argument("--cluster", required=True, help="cluster.yaml")
    add_facts(parser)
    options = parser.parse_args(before)
    result = predict(read_job(after, load_cluster(options.cluster), options, parser))
    if options.json:
        print_json(result)
    else:
        _show(result)
    return 0


def predict(read: Read) -> dict[str, Any]:
    """Return the prediction as plain JSON types; bytes, seconds, shares."""
    from megatron_memx.cost.coverage import gaps
    from megatron_memx.cost.memory import oom_probability
    from megatron_memx.planner import provider_for, with_measured_links
    from megatron_memx.search.evaluate import Evaluator
    from megatron_memx.search.given import given

    request = read.request
    chosen = given(request.job, request.cluster, request.pins, request.facts)
    cluster = with_measured_links(request.cluster, read.rows)
    provider = provider_for(request.job, cluster, read.rows, request.calibrations)
    evaluator = Evaluator(
        request.job, cluster, provider, chosen.outer, margin=request.margin, absolute=False
    )
    found = evaluator.evaluate(chosen.stages(evaluator))
    spread = math.exp(2 * found.log_sigma)
    stages = []
    for rank, stage in enumerate(found.stages):
        kind = chosen.outer.kinds[rank]
        capacity = cluster.kinds[kind].capacity_bytes
        stages.append(
            {
                "pipeline_rank": rank,
                "device_kind": kind,
                "ranks": list(chosen.outer.ranks[rank]),
                "layers": [chunk.num_layers for chunk in stage.chunks],
                "forward_s": sum(cost.forward_s for cost in stage.costs),
                "backward_s": sum(cost.backward_s for cost in stage.costs),
                "peak_memory_bytes": stage.memory.peak_bytes,
                "peak_memory_high_bytes": stage.memory.high_bytes,
                "memory_breakdown_bytes": dict(stage.memory.breakdown_bytes),
                "capacity_bytes": capacity,
                "oom_probability": oom_probability(stage.memory, capacity),
                "fits": stage.fits,
            }
        )
    return {
        "sizes": chosen.outer.sizes.label,
        "recompute": chosen.policy.label,
        "basis": "; ".join([provider.basis, *gaps(evaluator.units(found.stages), provider)]),
        "iteration_time_s": found.time_s,
        "iteration_time_low_s": found.time_s / spread,
        "iteration_time_high_s": found.time_s * spread,
        "memory_margin": request.margin,
        "fits": all(stage.fits for stage in found.stages),
        "stages": stages,
    }


def _show(result: dict[str, Any]) -> None:
    from megatron_memx.units import format_bytes, format_seconds

    print(f"{result['sizes']}, recompute {result['recompute']}")
    low, high = result["iteration_time_low_s"], result["iteration_time_high_s"]
    print(
        f"iteration {format_seconds(result['iteration_time_s'])} predicted "
        f"({format_seconds(low)} to {format_seconds(high)}), from {result['basis']}"
    )
    for stage in result["stages"]:
        layers = "+".join(map(str, stage["layers"]))
        print(
            f"stage {stage['pipeline_rank']} on {len(stage['ranks'])} x {stage['device_kind']}, "
            f"{layers} layers: forward {format_seconds(stage['forward_s'])}, "
            f"backward {format_seconds(stage['backward_s'])}"
        )
        print(
            f"  peak {format_bytes(stage['peak_memory_bytes'])} predicted (high "
            f"{format_bytes(stage['peak_memory_high_bytes'])}) of "
            f"{format_bytes(stage['capacity_bytes'])}; out of memory with probability "
            f"{stage['oom_probability']:.1%}"
        )
        parts = stage["memory_breakdown_bytes"].items()
        print("  " + ", ".join(f"{name} {format_bytes(size)}" for name, size in parts))
    if not result["fits"]:
        print(f"does not fit with a margin of {result['memory_margin']:.0%}")
