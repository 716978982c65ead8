"""Peak memory of one rank, by component."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import sub

from megatron_memx.cost.activations import (
    angles_bytes,
    buffer_bytes,
    mask_units,
    tied_gradient_bytes,
)
from megatron_memx.cost.compute import layer_unit
from megatron_memx.cost.layer import Layer
from megatron_memx.cost.pipeline import full_moments
from megatron_memx.cost.units import (
    CHUNK,
    EMBEDDING,
    HEAD,
    LAYER,
    MASK,
    MOE_LAYER,
    MTP,
    StepCost,
    UnitKey,
    UnitProvider,
)
from megatron_memx.job import Job
from megatron_memx.model import LayerParameters, ModelShape
from megatron_memx.parallel import ParallelSizes, Recompute
from megatron_memx.plan import Chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkCost:
    """Cost of one chunk for one micro-batch (see :class:`~megatron_memx.cost.units.UnitCost`).

    Args:
        forward_bytes: Working memory of its forward pass, when all it saves is counted already.
        backward_bytes: Working memory of its backward pass.
    """

    forward_s: float
    backward_s: float
    saved_bytes: float
    forward_bytes: float
    backward_bytes: float
    log_sigma: float
    memory_log_sigma: float

    def working_bytes(self, forward: bool) -> float:
        """Return the working memory of a moment (:class:`~megatron_memx.cost.pipeline.Moment`)."""
        return self.forward_bytes if forward else self.backward_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Peak bytes of a rank and what they are made of."""

    peak_bytes: int
    high_bytes: int
    breakdown_bytes: Mapping[str, int]


def oom_probability(memory: RankMemory, capacity_bytes: int) -> float:
    """Return the probability that the peak exceeds the capacity: normal about the prediction."""
    sigma_bytes = (memory.high_bytes - memory.peak_bytes) / 2
    room_bytes = capacity_bytes - memory.peak_bytes
    if sigma_bytes <= 0:
        return float(room_bytes < 0)
    return math.erfc(room_bytes / sigma_bytes / math.sqrt(2)) / 2


def stage_parameters(job: Job, sizes: ParallelSizes, chunks: Sequence[Chunk]) -> tuple[int, int]:
    """Return (dense, expert) parameters that one rank of the stage holds."""
    model, tp = job.model, sizes.tensor_model_parallel_size
    ep, etp = sizes.expert_model_parallel_size, sizes.expert_tensor_parallel_size
    dense = expert = 0
    for chunk in chunks:
        layers = range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
        mixtures = sum(map(model.is_moe_layer, layers)) if model.moe else 0
        for count, is_moe in ((mixtures, True), (len(layers) - mixtures, False)):
            if count:
                each = layer_parameters_of(model, is_moe, sizes)
                dense, expert = dense + count * each.dense, expert + count * each.expert
        if chunk.mtp_num_layers:
            each = model.mtp_parameters(tp=tp, ep=ep, etp=etp)
            dense += each.dense * chunk.mtp_num_layers
            expert += each.expert * chunk.mtp_num_layers
    first = any(chunk.embedding for chunk in chunks)
    last = any(chunk.loss for chunk in chunks)
    if first:
        dense += model.embedding_parameters(tp)
    if last:
        dense += model.norm_parameters
        # A tied output layer on another stage than the embedding holds a copy of its matrix.
        if model.untie_embeddings_and_output_weights or not first:
            dense += model.output_parameters(tp)
    if any(chunk.mtp_num_layers for chunk in chunks) and not first:
        learned = model.position_embedding_type == "learned_absolute"
        copies = model.embedding_parameters(tp) if learned else model.output_parameters(tp)
        dense += (
            copies
            if model.untie_embeddings_and_output_weights
            else (copies - model.output_parameters(tp))
        )
    return dense, expert


def layer_parameters_of(model: ModelShape, is_moe: bool, sizes: ParallelSizes) -> LayerParameters:
    """Return a rank's parameters of one dense layer, or of one mixture of experts."""
    return _layer(
        model,
        is_moe,
        sizes.tensor_model_parallel_size,
        sizes.expert_model_parallel_size,
        sizes.expert_tensor_parallel_size,
    )


@lru_cache(maxsize=1024)
def _layer(model: ModelShape, is_moe: bool, tp: int, ep: int, etp: int) -> LayerParameters:
    layer = next(i for i in range(model.num_layers) if model.is_moe_layer(i) == is_moe)
    return model.layer_parameters(layer, tp=tp, ep=ep, etp=etp)


def data_parallel_sizes(sizes: ParallelSizes) -> tuple[int, int]:
    """Return over how many ranks optimizer states of dense and of expert parameters shard."""
    expert_model = (
        sizes.pipeline_model_parallel_size
        * sizes.expert_model_parallel_size
        * sizes.expert_tensor_parallel_size
    )
    dense = sizes.data_parallel_size * sizes.context_parallel_size
    return dense, max(1, sizes.world_size // expert_model)


def _key_of(
    sizes: ParallelSizes, kind: str, seq_length: int, across_nodes: bool
) -> Callable[..., UnitKey]:
    return partial(
        UnitKey,
        kind=kind,
        tp=sizes.tensor_model_parallel_size,
        cp=sizes.context_parallel_size,
        ep=sizes.expert_model_parallel_size,
        etp=sizes.expert_tensor_parallel_size,
        micro_batch_size=sizes.micro_batch_size,
        seq_length=seq_length // sizes.context_parallel_size,
        sequence_parallel=sizes.sequence_parallel,
        across_nodes=across_nodes,
    )


def chunk_units(
    job: Job, sizes: ParallelSizes, kind: str, chunk: Chunk, *, across_nodes: bool = False
) -> dict[UnitKey, int]:
    """Return the units of a chunk and how many of each: layers, embedding, head, MTP, masks."""
    key = _key_of(sizes, kind, job.model.seq_length, across_nodes)
    policy = chunk.recompute
    classes = policy.layer_classes(chunk.num_layers)
    counts: dict[UnitKey, int] = {}
    for index, recompute in enumerate(classes):
        unit = layer_unit(job.model, chunk.first_layer + index)
        modules = policy.modules if recompute == "selective" else ()
        one = key(unit=unit, recompute=recompute, modules=modules)
        counts[one] = counts.get(one, 0) + 1
    batch = chunk.embedding or chunk.loss
    for name, count in mask_units(job.model, counts, batch=batch).items():
        counts[key(unit=MASK, recompute=name)] = count
    counts[key(unit=CHUNK)] = 1
    if chunk.embedding:
        counts[key(unit=EMBEDDING)] = 1
    if chunk.loss:
        counts[key(unit=HEAD)] = 1
    if chunk.mtp_num_layers:
        counts[key(unit=MTP)] = chunk.mtp_num_layers
    return counts


def chunk_cost(
    job: Job,
    sizes: ParallelSizes,
    kind: str,
    chunk: Chunk,
    provider: UnitProvider,
    *,
    across_nodes: bool = False,
) -> ChunkCost:
    """Return the cost of a chunk: its layers under its policy, embedding, head and MTP."""
    counts = chunk_units(job, sizes, kind, chunk, across_nodes=across_nodes)
    forward = backward = sigma = memory_sigma = standing = 0.0
    group = _group(chunk.recompute, chunk.num_layers)
    saved, ahead, behind = ([0.0] * NUM_PLACES for _ in range(3))
    for one, count in counts.items():
        cost = provider.unit(one)
        forward += count * cost.forward_s
        backward += count * cost.backward_s
        kept, extra = float(count), cost.backward_bytes
        if one.recompute == "full" and one.unit in (LAYER, MOE_LAYER):
            # A group keeps one input and, in its backward pass, rebuilds all its layers at once.
            kept = math.ceil(count / group)
            extra += (group - 1) * provider.unit(replace(one, recompute="none")).saved_bytes
        place = place_of(one)
        saved[place] += kept * cost.saved_bytes
        behind[place] = max(behind[place], extra)
        if stands(one):
            standing += cost.forward_bytes
        else:
            ahead[place] = max(ahead[place], cost.forward_bytes)
        sigma = max(sigma, cost.log_sigma)
        memory_sigma = max(memory_sigma, cost.memory_log_sigma)
    if any(saved[RECOMPUTED_PLACE + 1 : HEAD_PLACE]):
        # What a checkpoint gave to those behind stands beside its own backward pass.
        behind[RECOMPUTED_PLACE] += border_bytes(job, sizes)
    if chunk.embedding and chunk.loss:
        tied = tied_gradient_bytes(
            job.model, sizes.tensor_model_parallel_size, job.train.parameter_bytes
        )
        waiting = waiting_gradients(tied)
        behind = [value + more for value, more in zip(behind, waiting, strict=True)]
    later = [sum(saved[place + 1 :]) for place in range(NUM_PLACES)]
    return ChunkCost(
        forward_s=forward,
        backward_s=backward,
        saved_bytes=sum(saved),
        forward_bytes=standing + max(map(sub, ahead, later)),
        backward_bytes=max(map(sub, behind, later)),
        log_sigma=sigma,
        memory_log_sigma=memory_sigma,
    )


# Where a unit stands in the forward pass. While it works, the activations of those behind it are
# not there yet, or are given back already, so that its working memory does not add to theirs.
_PLACES = ("embedding", "recomputed layers", "other layers", "mtp", "head")
NUM_PLACES = len(_PLACES)
RECOMPUTED_PLACE = _PLACES.index("recomputed layers")
HEAD_PLACE = NUM_PLACES - 1


def _layer_key(job: Job, sizes: ParallelSizes) -> UnitKey:
    return _key_of(sizes, "", job.model.seq_length, False)(unit=LAYER)


def buffers(job: Job, sizes: ParallelSizes) -> int:
    """Return bytes that a rank allocates once: Megatron's buffer and each chunk's angles."""
    key = _layer_key(job, sizes)
    angles = angles_bytes(job.model) * sizes.virtual_pipeline_model_parallel_size
    return int(buffer_bytes(job.model, key, job.train.parameter_bytes) + angles)


def border_bytes(job: Job, sizes: ParallelSizes) -> float:
    """Return the bytes of an activation, or its gradient, at a stage's border."""
    return Layer(job.model, _layer_key(job, sizes), job.train.parameter_bytes).hidden


def waiting_gradients(tied_bytes: float) -> tuple[float, ...]:
    """Return, by place, what tied weights' gradients add where one stage has both of them.

    The output layer's waits through all layers; at the embedding its own and the sum stand by it.
    """
    return (2 * tied_bytes, *[tied_bytes] * (NUM_PLACES - 2), 0.0)


def place_of(key: UnitKey) -> int:
    """Return a unit's place in the order of the forward pass, from 0."""
    if key.unit == MASK:
        return 2 if key.recompute == "selective" else 0
    if key.unit in (CHUNK, EMBEDDING):
        return 0
    if key.unit in (MTP, HEAD):
        return 3 if key.unit == MTP else HEAD_PLACE
    return 1 if key.recompute == "full" else 2


def stands(key: UnitKey) -> bool:
    """Whether a unit's forward bytes stand beside all others' until the forward pass has ended."""
    return key.unit == MASK and key.recompute == "none"


def _group(policy: Recompute, num_layers: int) -> int:
    if policy.method == "uniform" and policy.num_layers:
        return min(policy.num_layers, max(num_layers, 1))
    return 1


def rank_memory(
    job: Job,
    sizes: ParallelSizes,
    chunks: Sequence[Chunk],
    costs: Sequence[ChunkCost],
    *,
    pipeline_rank: int,
    step: StepCost,
) -> RankMemory:
    """Return the peak of one rank of a stage.

    The peak is the larger of two moments: the fullest moment of the schedule with its working
    memory, and the optimizer's step, when no activation is left. The high quantile widens the
    predicted (not the exactly counted) parts by two standard deviations.
    """
    train = job.train
    dense, expert = stage_parameters(job, sizes, chunks)
    total = dense + expert
    dp, expert_dp = data_parallel_sizes(sizes)
    if sizes.use_distributed_optimizer:
        updated = dense / dp + expert / expert_dp
    else:
        updated = float(total)
    parameters = total * train.parameter_bytes
    gradients = total * train.gradient_bytes
    optimizer = int(updated * train.optimizer_bytes)
    once = buffers(job, sizes)
    reserve = int(step.reserved_bytes)
    static = parameters + gradients + optimizer + once + reserve
    moments = full_moments(
        sizes.pipeline_model_parallel_size,
        sizes.virtual_pipeline_model_parallel_size,
        sizes.num_microbatches,
        pipeline_rank,
    )
    border = border_bytes(job, sizes)
    activations, transient = max(
        (
            (
                sum(
                    count * cost.saved_bytes for count, cost in zip(moment.held, costs, strict=True)
                ),
                costs[moment.chunk].working_bytes(moment.forward) + moment.borders * border,
            )
            for moment in moments
        ),
        key=sum,
    )
    stepping = step.optimizer_bytes + updated * step.optimizer_bytes_per_parameter
    uncertain = activations + transient
    peak = static + max(uncertain, stepping)
    sigma = max(cost.memory_log_sigma for cost in costs)
    high = static + max(uncertain * (1 + 2 * sigma), stepping * (1 + 2 * sigma))
    breakdown = {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer,
        "buffers": once,
        **({"reserve": reserve} if reserve else {}),
        "activations": int(activations),
        "working": int(max(transient, stepping - activations)),
    }
    return RankMemory(peak_bytes=int(peak), high_bytes=int(high), breakdown_bytes=breakdown)
