"""The planner's own prediction of a case: the same provider, memory and schedule as in a search."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_memx.cost.efficiency import Efficiency
from megatron_memx.cost.memory import chunk_units
from megatron_memx.cost.pipeline import extrapolate, full_moments, simulate
from megatron_memx.cost.prior import CatalogueProvider
from megatron_memx.cost.units import UnitKey
from megatron_memx.evaluation.cases import Case
from megatron_memx.search.evaluate import Evaluator, StageOption
from megatron_memx.search.given import Given


@dataclass(frozen=True)
class MemoryParts:
    """Bytes of one rank, by what a calibration does to them.

    Args:
        static_bytes: Parameters, gradients, optimizer and buffers.
        gathered_bytes: One gathered input of every layer in flight; 0 where nothing is gathered.
        hidden_bytes: One hidden state of every layer in flight.
        ffn_bytes: One tensor as wide as the MLP of every layer in flight.
        logits_bytes: Logits in single precision, on the last stage.
    """

    static_bytes: float
    activation_bytes: float
    gathered_bytes: float
    hidden_bytes: float
    ffn_bytes: float
    logits_bytes: float
    num_parameters: float

    def peak_bytes(self, value: Efficiency) -> float:
        """Return the peak under a calibration."""
        return (
            self.static_bytes
            + value.activations * self.activation_bytes
            + value.kept_gathered * self.gathered_bytes
            + value.kept_hidden * self.hidden_bytes
            + value.kept_ffn * self.ffn_bytes
            + value.kept_logits * self.logits_bytes
            + value.kept_parameter_bytes * self.num_parameters
            + value.reserved_bytes
        )


# From this share of the device's memory on, the allocator gives cached blocks back and asks the
# driver for others, at every iteration: steps take several times as long, as H100 runs of the
# Ultra-Scale Playbook show. No plan with a margin comes near. What is said to need far more than
# there is, and ran, needed less than said.
_CROWDED, _CROWDED_WIDTH, _CROWDED_SLOWDOWN = 0.96, 0.01, 4.5
_DISPROVED = 1.15


class Engine:
    """Predicts one case under any efficiency.

    Args:
        memory: Calibrated terms of its memory, where there are any: a device that is nearly full
            is slow.
    """

    def __init__(self, case: Case, memory: Efficiency | None = None) -> None:
        self.case = case
        self.memory = memory

    def time_s(self, efficiency: Efficiency, *, quick: bool = False) -> float:
        """Return the seconds of an iteration; ``quick`` for fits (see ``extrapolate``)."""
        evaluator = self._evaluator(efficiency)
        unit = evaluator.provider.unit
        # Bytes do not depend on efficiencies: only the seconds of each unit are asked for again.
        stages = [
            replace(
                stage,
                costs=tuple(
                    replace(
                        cost,
                        forward_s=sum(n * unit(key).forward_s for key, n in units.items()),
                        backward_s=sum(n * unit(key).backward_s for key, n in units.items()),
                    )
                    for cost, units in zip(stage.costs, chunks, strict=True)
                ),
            )
            for stage, chunks in self._counted
        ]
        schedule = extrapolate if quick else simulate
        return evaluator.evaluate(stages, schedule).time_s * self._slowdown

    @cached_property
    def _slowdown(self) -> float:
        """By how much a nearly full device slows the iteration."""
        if self.memory is None:
            return 1.0
        share = self.memory_bytes(self.memory) / self.case.memory_bytes
        if share > _DISPROVED:
            return 1.0
        crowded = 1 / (1 + math.exp((_CROWDED - share) / _CROWDED_WIDTH))
        return 1 + (_CROWDED_SLOWDOWN - 1) * crowded

    @cached_property
    def _counted(self) -> list[tuple[StageOption, list[dict[UnitKey, int]]]]:
        """Each stage with the units of its chunks."""
        evaluator = self._evaluator(Efficiency())
        case = self.case
        slots = tuple(each[v] for v in range(len(case.layers[0])) for each in case.layers)
        given = Given(outer=case.outer, slots=slots, policy=case.policy)
        return [
            (
                stage,
                [
                    chunk_units(
                        case.job,
                        case.outer.sizes,
                        case.kind,
                        chunk,
                        across_nodes=evaluator.across_nodes,
                    )
                    for chunk in stage.chunks
                ],
            )
            for stage in given.stages(evaluator)
        ]

    @cached_property
    def memory_parts(self) -> tuple[MemoryParts, ...]:
        """Bytes of each pipeline rank."""
        case, sizes = self.case, self.case.outer.sizes
        model, train = case.job.model, case.job.train
        tp, pp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
        tokens = sizes.micro_batch_size * model.seq_length // sizes.context_parallel_size
        whole = float(tokens * model.hidden_size * train.parameter_bytes)
        spread = tp if sizes.sequence_parallel else 1
        ffn = tokens * model.ffn_hidden_size / tp * train.parameter_bytes
        logits = 4.0 * tokens * model.padded_vocab_size(tp) / tp
        made = []
        for rank, (stage, _) in enumerate(self._counted):
            memory = stage.memory.breakdown_bytes
            varying = memory["activations"] + memory["working"]
            kept = sum(
                max(
                    moment.held[v]
                    for moment in full_moments(
                        pp,
                        sizes.virtual_pipeline_model_parallel_size,
                        sizes.num_microbatches,
                        rank,
                    )
                )
                * chunk.recompute.layer_classes(chunk.num_layers).count("none")
                for v, chunk in enumerate(stage.chunks)
            )
            made.append(
                MemoryParts(
                    static_bytes=float(sum(memory.values()) - varying),
                    activation_bytes=float(varying),
                    gathered_bytes=kept * whole * (spread > 1),
                    hidden_bytes=kept * whole / spread,
                    ffn_bytes=kept * ffn,
                    logits_bytes=logits * stage.chunks[-1].loss,
                    num_parameters=memory["parameters"] / train.parameter_bytes,
                )
            )
        return tuple(made)

    def memory_bytes(self, efficiency: Efficiency) -> float:
        """Return the peak of the fullest rank, or of the one whose peak the source prints."""
        parts = self.memory_parts
        if self.case.memory_of == "last":
            parts = parts[-1:]
        return max(part.peak_bytes(efficiency) for part in parts)

    def _evaluator(self, efficiency: Efficiency) -> Evaluator:
        case = self.case
        provider = CatalogueProvider(case.job, case.cluster, {case.kind: efficiency})
        return Evaluator(case.job, case.cluster, provider, case.outer, margin=0.0, absolute=True)
