"""Small valid plans for tests."""

from __future__ import annotations

from typing import Any

from megatron_memx.parallel import ParallelSizes, Recompute
from megatron_memx.plan import Chunk, Plan, Prediction, Stage, StagePrediction

MIB = 1024**2


def make_plan(
    layers: list[list[int]],
    *,
    recompute: list[list[Recompute]] | None = None,
    rank_order: list[int] | None = None,
    signature: str = "0" * 32,
    micro_batch_size: int = 1,
    global_batch_size: int = 8,
    tensor_model_parallel_size: int = 1,
    data_parallel_size: int = 1,
    use_distributed_optimizer: bool = False,
    **more: Any,
) -> Plan:
    """Return a plan with ``layers[pipeline rank][chunk]`` decoder layers."""
    pp, vpp = len(layers), len(layers[0])
    sizes = ParallelSizes(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pp,
        data_parallel_size=data_parallel_size,
        virtual_pipeline_model_parallel_size=vpp,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        use_distributed_optimizer=use_distributed_optimizer,
    )
    order = rank_order or list(range(sizes.world_size))
    first: dict[tuple[int, int], int] = {}
    total = 0
    for v in range(vpp):
        for p in range(pp):
            first[p, v] = total
            total += layers[p][v]
    each = sizes.ranks_per_stage
    stages = tuple(
        Stage(
            pipeline_rank=p,
            device_kind="cpu",
            ranks=tuple(order[p * each : (p + 1) * each]),
            chunks=tuple(
                Chunk(
                    virtual_stage=v,
                    first_layer=first[p, v],
                    num_layers=layers[p][v],
                    embedding=p == 0 and v == 0,
                    loss=p == pp - 1 and v == vpp - 1,
                    recompute=recompute[p][v] if recompute else Recompute(),
                )
                for v in range(vpp)
            ),
            prediction=StagePrediction(
                forward_s=0.01,
                backward_s=0.02,
                peak_memory_bytes=100 * MIB,
                peak_memory_high_bytes=110 * MIB,
                capacity_bytes=400 * MIB,
                memory_breakdown_bytes={"parameters": 60 * MIB, "activations": 40 * MIB},
            ),
        )
        for p in range(pp)
    )
    return Plan(
        signature=signature,
        parallel=sizes,
        stages=stages,
        model={"num_layers": total, "hidden_size": 64, "seq_length": 128},
        cluster={"nodes": [{"name": "n0", "device_kind": "cpu", "num_devices": len(order)}]},
        prediction=Prediction(
            iteration_time_s=0.5,
            iteration_time_low_s=0.4,
            iteration_time_high_s=0.6,
            peak_utilisation=0.25,
            utilisation_variance=0.0,
            phi=0.9,
            basis="test data",
        ),
        **more,
    )
