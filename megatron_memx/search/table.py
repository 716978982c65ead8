"""Every filling of a stage as arrays: what ``search/evaluate.py`` says of one, for all at once.

A row is a number of layers in each chunk and a policy. Costs of a chunk are sums of unit costs, so
that a handful of units and the counts of each row give all rows in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_memx.cluster import Cluster
from megatron_memx.cost.activations import masks_itself, tied_gradient_bytes
from megatron_memx.cost.layer import Layer
from megatron_memx.cost.memory import (
    HEAD_PLACE,
    NUM_PLACES,
    RECOMPUTED_PLACE,
    border_bytes,
    buffers,
    data_parallel_sizes,
    layer_parameters_of,
    place_of,
    stage_parameters,
    stands,
    waiting_gradients,
)
from megatron_memx.cost.pipeline import full_moments
from megatron_memx.cost.units import (
    CHUNK,
    EMBEDDING,
    HEAD,
    LAYER,
    MASK,
    MOE_LAYER,
    MTP,
    UnitKey,
    UnitProvider,
)
from megatron_memx.job import Job
from megatron_memx.parallel import ParallelSizes, Recompute
from megatron_memx.plan import Chunk

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Numbers of layers and policies: the same for every stage of a search.

    Args:
        classes: Distinct (class, modules) of layers.
        recomputed: First layers of the chunk that are recomputed in full, for block policies.
    """

    layers: Index
    policies: tuple[Recompute, ...]
    classes: tuple[tuple[str, tuple[str, ...]], ...]
    leading: Index
    trailing_class: Index
    group: Index

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, Recompute]]) -> Rows:
        """Return the rows of (layers, policy) pairs."""
        classes: dict[tuple[str, tuple[str, ...]], int] = {("none", ()): 0, ("full", ()): 1}
        leading, trailing, group = [], [], []
        for layers, policy in pairs:
            names = policy.layer_classes(layers)
            full = sum(name == "full" for name in names)
            leading.append(full)
            rest = ("selective", policy.modules) if policy.modules else ("none", ())
            trailing.append(classes.setdefault(rest, len(classes)))
            size = policy.num_layers if policy.method == "uniform" else 1
            group.append(min(size or 1, max(layers, 1)))
        return cls(
            layers=np.array([layers for layers, _ in pairs], dtype=np.int64),
            policies=tuple(policy for _, policy in pairs),
            classes=tuple(classes),
            leading=np.array(leading, dtype=np.int64),
            trailing_class=np.array(trailing, dtype=np.int64),
            group=np.array(group, dtype=np.int64),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkTable:
    """Costs of a chunk for each row; see :class:`~megatron_memx.cost.memory.ChunkCost`."""

    busy_s: Array
    saved_bytes: Array
    forward_bytes: Array
    backward_bytes: Array
    memory_log_sigma: Array

    def working_bytes(self, forward: bool) -> Array:
        """Return the working memory of a moment (:class:`~megatron_memx.cost.pipeline.Moment`)."""
        return self.forward_bytes if forward else self.backward_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTable:
    """The rows of one stage that fit and that no other beats in time and memory.

    Args:
        row: Index into :class:`Rows`.
        start: For each number of layers n, where its rows begin; ``start[n + 1]`` ends them.
    """

    row: Index
    layers: Index
    busy_s: Array
    load: Array
    start: Index


class Tables:
    """Tables of a whole search, shared between outer choices where nothing differs."""

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        provider: UnitProvider,
        rows: Rows,
        *,
        margin: float,
        absolute: bool,
    ) -> None:
        self._job, self._cluster, self._provider, self.rows = job, cluster, provider, rows
        self._margin, self._absolute = margin, absolute
        self._chunk = lru_cache(maxsize=None)(self._chunk_table)
        pattern = job.model.moe.layer_pattern if job.model.moe else ()
        self.uniform = len(set(pattern)) <= 1
        mixtures = np.array([job.model.is_moe_layer(i) for i in range(job.model.num_layers)])
        self._mixtures_before = np.concatenate([[0], np.cumsum(mixtures)])

    def stage(
        self, sizes: ParallelSizes, kind: str, rank: int, first: int, *, across_nodes: bool = False
    ) -> StageTable:
        """Return the table of pipeline rank ``rank``.

        Args:
            first: Layers before it in each round of chunks (0 will do for uniform models).
            across_nodes: Whether the pipeline has stages on several nodes.
        """
        job = self._job
        pp = sizes.pipeline_model_parallel_size
        vpp = sizes.virtual_pipeline_model_parallel_size
        each = job.model.num_layers // vpp
        shape = (
            sizes.tensor_model_parallel_size,
            sizes.context_parallel_size,
            sizes.expert_model_parallel_size,
            sizes.expert_tensor_parallel_size,
            sizes.micro_batch_size,
            sizes.sequence_parallel,
            across_nodes,
        )
        tables = []
        firsts = []
        for v in range(vpp):
            begins = 0 if self.uniform else v * each + first
            loss = rank == pp - 1 and v == vpp - 1
            tables.append(self._chunk(shape, kind, begins, rank == 0 and v == 0, loss))
            firsts.append(begins)
        dense, expert = self._parameters(sizes, rank, firsts)
        train = job.train
        dp, expert_dp = data_parallel_sizes(sizes)
        sharded = sizes.use_distributed_optimizer
        updated = dense / dp + expert / expert_dp if sharded else dense + expert
        static = (dense + expert) * (train.parameter_bytes + train.gradient_bytes)
        step = self._provider.step(kind)
        static = static + np.floor(updated * train.optimizer_bytes) + buffers(job, sizes)
        static = static + np.floor(step.reserved_bytes)
        saved = np.stack([table.saved_bytes for table in tables])
        moments = full_moments(pp, vpp, sizes.num_microbatches, rank)
        border = border_bytes(job, sizes)
        fullest = np.max(
            [
                np.array(moment.held, dtype=float) @ saved
                + tables[moment.chunk].working_bytes(moment.forward)
                + moment.borders * border
                for moment in moments
            ],
            axis=0,
        )
        sigma = np.max([table.memory_log_sigma for table in tables], axis=0)
        stepping = step.optimizer_bytes + updated * step.optimizer_bytes_per_parameter
        uncertain = np.maximum(fullest, stepping)
        peak = np.floor(static + uncertain)
        high = np.floor(static + uncertain * (1 + 2 * sigma))
        capacity = self._cluster.kinds[kind].capacity_bytes
        fits = high <= int(capacity * (1 - self._margin))
        busy = np.sum([table.busy_s for table in tables], axis=0)
        return self._pareto(busy, peak, fits, 1.0 if self._absolute else 1.0 / capacity)

    def _pareto(
        self, busy: Array, peak: Array, fits: NDArray[np.bool_], scale: float
    ) -> StageTable:
        layers = self.rows.layers
        order = np.lexsort((peak, busy, layers))
        kept: list[int] = []
        low, current = np.inf, -1
        for index in order.tolist():
            if not fits[index]:
                continue
            if layers[index] != current:
                current, low = int(layers[index]), np.inf
            if peak[index] < low:
                low = float(peak[index])
                kept.append(index)
        row = np.array(kept, dtype=np.int64)
        counts = np.arange(int(layers.max()) + 2)
        return StageTable(
            row=row,
            layers=layers[row],
            busy_s=busy[row],
            load=peak[row] * scale,
            start=np.searchsorted(layers[row], counts),
        )

    def _parameters(
        self, sizes: ParallelSizes, rank: int, firsts: Sequence[int]
    ) -> tuple[Array, Array]:
        """Return (dense, expert) parameters of each row."""
        pp = sizes.pipeline_model_parallel_size
        last = rank == pp - 1
        vpp = len(firsts)
        bare = [
            Chunk(
                virtual_stage=v,
                first_layer=0,
                num_layers=0,
                embedding=rank == 0 and v == 0,
                loss=last and v == vpp - 1,
                mtp_num_layers=self._job.model.mtp_num_layers if last and v == vpp - 1 else 0,
            )
            for v in range(vpp)
        ]
        dense0, expert0 = stage_parameters(self._job, sizes, bare)
        dense = np.full(len(self.rows.layers), float(dense0))
        expert = np.full(len(self.rows.layers), float(expert0))
        for first in firsts:
            mixtures = self._mixtures(first, self.rows.layers)
            for count, is_moe in ((mixtures, True), (self.rows.layers - mixtures, False)):
                if count.any():
                    one = layer_parameters_of(self._job.model, is_moe, sizes)
                    dense = dense + count * one.dense
                    expert = expert + count * one.expert
        return dense, expert

    def _mixtures(self, first: int, layers: Index) -> Index:
        """Return how many of ``layers`` layers from ``first`` on are mixtures of experts."""
        before = self._mixtures_before
        last = len(before) - 1
        found: Index = before[np.minimum(first + layers, last)] - before[min(first, last)]
        return found

    def _masks(
        self,
        key: Callable[..., UnitKey],
        batch: bool,
    ) -> dict[str, Array]:
        """Return the MASK units of each row by class; see ``activations.mask_units``."""
        rows = self.rows
        size = len(rows.layers)
        plain = np.zeros(size)
        checkpointed = rows.leading > 0
        for index, (name, modules) in enumerate(rows.classes):
            if name == "full":
                continue
            rest = (rows.layers - rows.leading) * (rows.trailing_class == index)
            if not rest.any():
                continue
            if masks_itself(self._job.model, key(LAYER, name, modules)):
                plain = plain + rest
            checkpointed = checkpointed | ((rest > 0) & ("core_attn" in modules))
        if not (batch and self._job.model.attention_mask_in_dataloader):
            return {"selective": plain}
        kept = (checkpointed | (plain > 0)).astype(float)
        return {"full": kept, "none": 1.0 - kept}

    def _chunk_table(
        self,
        shape: tuple[int, int, int, int, int, bool, bool],
        kind: str,
        first: int,
        embedding: bool,
        loss: bool,
    ) -> ChunkTable:
        tp, cp, ep, etp, mbs, sp, across_nodes = shape
        rows, model = self.rows, self._job.model

        def key(unit: str, name: str = "none", modules: tuple[str, ...] = ()) -> UnitKey:
            return UnitKey(
                kind=kind,
                unit=unit,
                tp=tp,
                cp=cp,
                ep=ep,
                etp=etp,
                micro_batch_size=mbs,
                seq_length=model.seq_length // cp,
                recompute=name,
                modules=modules,
                sequence_parallel=sp,
                across_nodes=across_nodes,
            )

        size = len(rows.layers)
        busy, sigma = np.zeros(size), np.zeros(size)
        saved, ahead, behind = np.zeros((3, NUM_PLACES, size))
        standing = np.zeros(size)
        leading_mixtures = self._mixtures(first, rows.leading)
        all_mixtures = self._mixtures(first, rows.layers)
        counted: list[tuple[UnitKey, Array]] = [(key(CHUNK), np.ones(size))]
        for unit in (LAYER, MOE_LAYER):
            mine = all_mixtures if unit == MOE_LAYER else rows.layers - all_mixtures
            lead = leading_mixtures if unit == MOE_LAYER else rows.leading - leading_mixtures
            for index, (name, modules) in enumerate(rows.classes):
                count = lead if name == "full" else (mine - lead) * (rows.trailing_class == index)
                counted.append((key(unit, name, modules), count.astype(float)))
        if embedding:
            counted.append((key(EMBEDDING), np.ones(size)))
        if loss:
            counted.append((key(HEAD), np.ones(size)))
        if loss and model.mtp_num_layers:
            counted.append((key(MTP), np.full(size, float(model.mtp_num_layers))))
        masks = self._masks(key, embedding or loss)
        counted += [(key(MASK, name), times) for name, times in masks.items()]
        for one, times in counted:
            if not times.any():
                continue
            cost = self._provider.unit(one)
            place, present = place_of(one), times > 0
            busy += times * (cost.forward_s + cost.backward_s)
            kept, extra = times, np.full(size, cost.backward_bytes)
            if one.recompute == "full" and one.unit in (LAYER, MOE_LAYER):
                kept = np.ceil(times / rows.group)
                extra += (rows.group - 1) * self._provider.unit(key(one.unit)).saved_bytes
            saved[place] += kept * cost.saved_bytes
            behind[place] = np.maximum(behind[place], np.where(present, extra, 0.0))
            if stands(one):
                standing += present * cost.forward_bytes
            else:
                ahead[place] = np.maximum(ahead[place], present * cost.forward_bytes)
            sigma = np.where(present, np.maximum(sigma, cost.memory_log_sigma), sigma)
        follows = saved[RECOMPUTED_PLACE + 1 : HEAD_PLACE].any(axis=0)
        output = Layer(model, key(LAYER), self._job.train.parameter_bytes).hidden
        behind[RECOMPUTED_PLACE] += output * follows
        if embedding and loss:
            tied = tied_gradient_bytes(model, tp, self._job.train.parameter_bytes)
            behind += np.array(waiting_gradients(tied))[:, None]
        later = np.cumsum(saved[::-1], axis=0)[::-1] - saved
        return ChunkTable(
            busy_s=busy,
            saved_bytes=saved.sum(axis=0),
            forward_bytes=standing + (ahead - later).max(axis=0),
            backward_bytes=(behind - later).max(axis=0),
            memory_log_sigma=sigma,
        )
