"""The one configuration that a user wrote out: Megatron's defaults where a size is not written."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_memx.cluster import Cluster
from megatron_memx.errors import LegalityError
from megatron_memx.job import Job
from megatron_memx.legality import Facts
from megatron_memx.parallel import Recompute
from megatron_memx.pins import Constraints
from megatron_memx.search.evaluate import Evaluator, StageOption
from megatron_memx.search.space import Outer, Rejection, outer_space


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """A whole configuration.

    Args:
        slots: Decoder layers of each slot (slot k: chunk ``k // pp`` of rank ``k % pp``).
    """

    outer: Outer
    slots: tuple[int, ...]
    policy: Recompute

    def stages(self, evaluator: Evaluator) -> list[StageOption]:
        """Return every pipeline rank's stage with its costs."""
        pp = self.outer.sizes.pipeline_model_parallel_size
        firsts = [sum(self.slots[:slot]) for slot in range(len(self.slots))]
        return [
            evaluator.option(rank, tuple(firsts[rank::pp]), self.slots[rank::pp], self.policy)
            for rank in range(pp)
        ]


def given(job: Job, cluster: Cluster, pins: Constraints, facts: Facts) -> Given:
    """Return the configuration that Megatron would run with the options as written.

    On clusters of several kinds the launcher's order of ranks is taken where stages of one kind
    follow from it.

    Raises:
        LegalityError: Megatron would refuse it, or stages would mix device kinds.
    """
    tp = pins.tp or 1
    full = replace(
        pins,
        tp=tp,
        pp=pins.pp or 1,
        cp=pins.cp or 1,
        ep=pins.ep or 1,
        etp=pins.etp or tp,
        vpp=pins.vpp or 1,
        # Megatron does not default it; one that is not written is refused there, and here is 1.
        micro_batch_size=pins.micro_batch_size or 1,
        sequence_parallel=bool(pins.sequence_parallel),
    )
    found: list[Outer] = []
    for item in outer_space(job, cluster, full, facts):
        if isinstance(item, Rejection):
            raise LegalityError(f"{item.family}: {item.reason}", fix=item.fix, flag=item.flag)
        found.append(item)
    if not found:
        raise LegalityError(
            f"tp {tp} x cp {full.cp} x pp {full.pp} does not divide {cluster.num_devices} devices",
            fix="sizes whose product divides the devices",
            flag="--pipeline-model-parallel-size",
        )
    order = tuple(range(cluster.num_devices))
    outer = next((o for o in found if sum(o.ranks, ()) == order), found[0])
    return Given(outer=outer, slots=full.split or _even(job, full), policy=pins.recompute or _NONE)


_NONE = Recompute()


def _even(job: Job, pins: Constraints) -> tuple[int, ...]:
    slots = (pins.pp or 1) * (pins.vpp or 1)
    layers = job.model.num_layers
    if layers % slots:
        raise LegalityError(
            f"{layers} layers do not divide into {slots} equal pipeline chunks",
            fix=f"{layers // slots * slots or slots} or {(layers // slots + 1) * slots} layers, "
            "or a layout",
            flag="--pipeline-model-parallel-layout",
        )
    return (layers // slots,) * slots
