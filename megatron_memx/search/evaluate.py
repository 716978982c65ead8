"""The exact cost of a configuration: every stage, then the schedule's event order over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_memx.cluster import Cluster
from megatron_memx.cost.communication import all_reduce_s, boundary_s, reduce_scatter_s
from megatron_memx.cost.memory import (
    ChunkCost,
    RankMemory,
    chunk_cost,
    chunk_units,
    rank_memory,
    stage_parameters,
)
from megatron_memx.cost.pipeline import PipelineTime, simulate
from megatron_memx.cost.units import UnitKey, UnitProvider
from megatron_memx.job import Job
from megatron_memx.parallel import Recompute
from megatron_memx.plan import Chunk
from megatron_memx.search.space import Outer


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOption:
    """One way to fill a stage: its chunks and what they cost.

    Args:
        busy_s: Forward and backward seconds of one micro-batch over all chunks.
        load: What balance compares: utilisation, or bytes.
        fits: Whether the high quantile stays below capacity less the margin.
    """

    chunks: tuple[Chunk, ...]
    costs: tuple[ChunkCost, ...]
    memory: RankMemory
    busy_s: float
    load: float
    fits: bool
    shortage_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """A whole configuration with its time."""

    outer: Outer
    stages: tuple[StageOption, ...]
    time_s: float
    log_sigma: float

    @property
    def loads(self) -> tuple[float, ...]:
        """Load of each stage; all ranks of a stage are alike."""
        return tuple(stage.load for stage in self.stages)


class Evaluator:
    """Costs of stages and configurations under one outer choice.

    Args:
        margin: Share of each device's memory to keep free.
        absolute: Balance bytes in place of utilisation.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        provider: UnitProvider,
        outer: Outer,
        *,
        margin: float,
        absolute: bool,
    ) -> None:
        self.job, self.cluster, self.provider, self.outer = job, cluster, provider, outer
        self._margin, self._absolute = margin, absolute
        self._reached = provider.cluster
        self._p2p_s = self._boundaries()
        self.across_nodes = outer.across_nodes(cluster)
        self.option = lru_cache(maxsize=None)(self._option)
        self._chunk = lru_cache(maxsize=None)(self._chunk_cost)
        uniform = job.model.moe is None or len(set(job.model.moe.layer_pattern)) <= 1
        self._uniform = uniform
        self._parameters = lru_cache(maxsize=None)(self._count)
        self._after = lru_cache(maxsize=None)(self._after_schedule)

    def chunks(
        self, rank: int, firsts: Sequence[int], layers: Sequence[int], policy: Recompute
    ) -> tuple[Chunk, ...]:
        """Return the chunks of a pipeline rank."""
        pp = self.outer.sizes.pipeline_model_parallel_size
        vpp = len(layers)
        made = []
        for v, (first, count) in enumerate(zip(firsts, layers, strict=True)):
            last = rank == pp - 1 and v == vpp - 1
            made.append(
                Chunk(
                    virtual_stage=v,
                    first_layer=first,
                    num_layers=count,
                    embedding=rank == 0 and v == 0,
                    loss=last,
                    mtp_num_layers=self.job.model.mtp_num_layers if last else 0,
                    recompute=_clamped(policy, count),
                )
            )
        return tuple(made)

    def _option(
        self, rank: int, firsts: tuple[int, ...], layers: tuple[int, ...], policy: Recompute
    ) -> StageOption:
        """Return one filling of a stage."""
        sizes = self.outer.sizes
        kind = self.outer.kinds[rank]
        chunks = self.chunks(rank, firsts, layers, policy)
        costs = tuple(
            self._chunk(
                kind,
                chunk.first_layer if not self._uniform else 0,
                chunk.num_layers,
                chunk.recompute,
                chunk.embedding,
                chunk.loss,
            )
            for chunk in chunks
        )
        memory = rank_memory(
            self.job,
            sizes,
            chunks,
            costs,
            pipeline_rank=rank,
            step=self.provider.step(kind),
        )
        capacity = self.cluster.kinds[kind].capacity_bytes
        limit = int(capacity * (1 - self._margin))
        return StageOption(
            chunks=chunks,
            costs=costs,
            memory=memory,
            busy_s=sum(cost.forward_s + cost.backward_s for cost in costs),
            load=float(memory.peak_bytes) if self._absolute else memory.peak_bytes / capacity,
            fits=memory.high_bytes <= limit,
            shortage_bytes=max(0, memory.high_bytes - limit),
        )

    def units(self, stages: Sequence[StageOption]) -> Iterator[UnitKey]:
        """Yield the units that stages are made of."""
        for kind, stage in zip(self.outer.kinds, stages, strict=True):
            for chunk in stage.chunks:
                yield from chunk_units(
                    self.job, self.outer.sizes, kind, chunk, across_nodes=self.across_nodes
                )

    def _chunk_cost(
        self,
        kind: str,
        first: int,
        layers: int,
        policy: Recompute,
        embedding: bool,
        loss: bool,
    ) -> ChunkCost:
        chunk = Chunk(
            virtual_stage=0,
            first_layer=first,
            num_layers=layers,
            embedding=embedding,
            loss=loss,
            mtp_num_layers=self.job.model.mtp_num_layers if loss else 0,
            recompute=policy,
        )
        return chunk_cost(
            self.job,
            self.outer.sizes,
            kind,
            chunk,
            self.provider,
            across_nodes=self.across_nodes,
        )

    def evaluate(
        self, stages: Sequence[StageOption], schedule: Callable[..., PipelineTime] = simulate
    ) -> Evaluated:
        """Return the configuration's time: the schedule, then reduction, optimizer and the rest."""
        pipeline = schedule(
            [[cost.forward_s for cost in stage.costs] for stage in stages],
            [[cost.backward_s for cost in stage.costs] for stage in stages],
            self._p2p_s,
            self.outer.sizes.num_microbatches,
        )
        ends = []
        updates = []
        for rank, stage in enumerate(stages):
            reduce_s, update_s = self._after(rank, stage.chunks)
            if self.job.train.overlap_grad_reduce:
                exposed_s = reduce_s * self.provider.step(self.outer.kinds[rank]).exposed
                reduce_s = max(exposed_s, reduce_s - stage.costs[0].backward_s)
            ends.append(pipeline.finish_s[rank] + reduce_s)
            updates.append(update_s)
        fixed = max(self.provider.step(kind).fixed_s for kind in self.outer.kinds)
        total = max(ends) + self._tied_s() + max(updates) + fixed
        return Evaluated(
            outer=self.outer,
            stages=tuple(stages),
            time_s=total,
            log_sigma=max(cost.log_sigma for stage in stages for cost in stage.costs),
        )

    def _after_schedule(self, rank: int, chunks: tuple[Chunk, ...]) -> tuple[float, float]:
        """Return (gradient reduction, optimizer) seconds of a stage."""
        sizes, train = self.outer.sizes, self.job.train
        parameters = self._parameters(chunks)
        dp = sizes.data_parallel_size * sizes.context_parallel_size
        ranks = self.outer.ranks[rank]
        tp = sizes.tensor_model_parallel_size
        link = self._reached.group_link(ranks[::tp])
        size = parameters * train.gradient_bytes
        step = self.provider.step(self.outer.kinds[rank])
        if sizes.use_distributed_optimizer:
            reduce_s = reduce_scatter_s(size, dp, link)
            gather = reduce_scatter_s(parameters * train.parameter_bytes, dp, link)
            updated = parameters / dp
        else:
            reduce_s, gather, updated = all_reduce_s(size, dp, link), 0.0, float(parameters)
        update_s = step.optimizer_s + updated * step.optimizer_s_per_parameter
        return reduce_s, update_s + gather

    def _count(self, chunks: tuple[Chunk, ...]) -> int:
        return sum(stage_parameters(self.job, self.outer.sizes, chunks))

    def _tied_s(self) -> float:
        """Return the seconds in which first and last stage add their shares of tied weights."""
        model, sizes = self.job.model, self.outer.sizes
        tied = not model.untie_embeddings_and_output_weights
        if sizes.pipeline_model_parallel_size == 1 or not tied:
            return 0.0
        size = (
            model.output_parameters(sizes.tensor_model_parallel_size)
            * self.job.train.gradient_bytes
        )
        link = self._reached.link(self.outer.ranks[0][0], self.outer.ranks[-1][0])
        return all_reduce_s(size, 2, link)

    def _boundaries(self) -> list[float]:
        sizes, model = self.outer.sizes, self.job.model
        size = (
            sizes.micro_batch_size
            * model.seq_length
            // sizes.context_parallel_size
            * model.hidden_size
            * self.job.train.parameter_bytes
            / (sizes.tensor_model_parallel_size if sizes.sequence_parallel else 1)
        )
        ranks = self.outer.ranks
        count = len(ranks)
        if count == 1:
            return [0.0]
        return [self._boundary_s(i, (i + 1) % count, size) for i in range(count)]

    def _boundary_s(self, sender: int, receiver: int, size_bytes: float) -> float:
        outer = self.outer
        a, b = outer.ranks[sender], outer.ranks[receiver]
        seconds = boundary_s(self._reached, a, b, size_bytes)
        if self.cluster.devices[a[0]][0] != self.cluster.devices[b[0]][0]:
            seconds += max(
                self.provider.step(outer.kinds[rank]).transfer_s for rank in (sender, receiver)
            )
        return seconds


def _clamped(policy: Recompute, layers: int) -> Recompute:
    """Return the policy with its number of layers cut to the chunk's (block: more means all)."""
    if policy.granularity != "full" or policy.num_layers is None or layers == 0:
        return policy
    if policy.num_layers <= layers:
        return policy
    return Recompute.full(str(policy.method), layers)
