"""The outer space: parallel sizes and the order of device kinds over the pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from megatron_memx.cluster import Cluster
from megatron_memx.errors import LegalityError
from megatron_memx.job import Job
from megatron_memx.legality import Facts, check_sizes
from megatron_memx.parallel import ParallelSizes
from megatron_memx.pins import Constraints

# More virtual stages than this only add transfers.
MAX_VIRTUAL_STAGES = 4
MAX_MICRO_BATCH_SIZE = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """One outer choice: sizes and, for each pipeline rank, its device kind and launcher ranks."""

    sizes: ParallelSizes
    kinds: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]

    @property
    def label(self) -> str:
        """Sizes, and the order of kinds where there are several."""
        order = list(dict.fromkeys(self.kinds))
        return self.sizes.label + (f" {' > '.join(order)}" if len(order) > 1 else "")

    def across_nodes(self, cluster: Cluster) -> bool:
        """Return whether the pipeline has stages on several nodes."""
        nodes = [cluster.devices[ranks[0]][0] for ranks in self.ranks]
        return len(set(nodes)) > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """A family of configurations that was not searched, and why."""

    family: str
    reason: str
    fix: str | None = None
    flag: str | None = None


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def outer_space(
    job: Job, cluster: Cluster, pins: Constraints, facts: Facts
) -> Iterator[Outer | Rejection]:
    """Yield every legal outer choice under the pins, and the families that are not."""
    world = cluster.num_devices
    cp = pins.cp or 1
    for tp in [pins.tp] if pins.tp else divisors(world):
        if world % (tp * cp):
            continue
        uneven = [n for n in cluster.nodes if n.num_devices % (tp * cp)]
        if uneven and tp * cp > 1:
            yield Rejection(
                family=f"tp{tp} cp{cp}",
                reason=f"a group of {tp * cp} would straddle nodes: {uneven[0].name} has "
                f"{uneven[0].num_devices} devices",
            )
            continue
        rest = world // (tp * cp)
        for pp in [pins.pp] if pins.pp else divisors(rest):
            if rest % pp or pp > job.model.num_layers:
                continue
            yield from _with_pipeline(job, cluster, pins, facts, tp=tp, cp=cp, pp=pp)


def _with_pipeline(
    job: Job, cluster: Cluster, pins: Constraints, facts: Facts, *, tp: int, cp: int, pp: int
) -> Iterator[Outer | Rejection]:
    dp = cluster.num_devices // (tp * cp * pp)
    placements = list(_placements(cluster, pp, tp * cp * dp))
    if not placements:
        yield Rejection(
            family=f"tp{tp} pp{pp} dp{dp}",
            reason=f"stages of {tp * cp * dp} ranks would mix device kinds: "
            + ", ".join(f"{len(cluster.ranks_of_kind(k))} x {k}" for k in cluster.used_kinds),
        )
        return
    batch = job.train.global_batch_size
    for mbs in _micro_batch_sizes(job, pins, dp):
        for vpp in _virtual_sizes(job, pins, pp):
            for ep, etp in _expert_sizes(job, pins, tp, cp * dp):
                sequence_parallel = _sequence_parallel(job, pins, facts, tp)
                try:
                    sizes = ParallelSizes(
                        tensor_model_parallel_size=tp,
                        pipeline_model_parallel_size=pp,
                        data_parallel_size=dp,
                        context_parallel_size=cp,
                        expert_model_parallel_size=ep,
                        expert_tensor_parallel_size=etp,
                        virtual_pipeline_model_parallel_size=vpp,
                        micro_batch_size=mbs,
                        global_batch_size=batch,
                        sequence_parallel=sequence_parallel,
                        use_distributed_optimizer=bool(pins.use_distributed_optimizer),
                    )
                except LegalityError as error:
                    yield Rejection(
                        family=f"tp{tp} pp{pp} dp{dp} mbs{mbs}",
                        reason=error.message,
                        flag=error.flag,
                    )
                    continue
                broken = check_sizes(job, sizes, facts)
                if broken:
                    yield Rejection(
                        family=sizes.label,
                        reason=broken[0].message,
                        fix=broken[0].fix,
                        flag=broken[0].flag,
                    )
                    continue
                for kinds, ranks in placements:
                    yield Outer(sizes=sizes, kinds=kinds, ranks=ranks)


def _placements(
    cluster: Cluster, pp: int, per_stage: int
) -> Iterator[tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]:
    """Yield (kinds, ranks) of the stages for each order of device kinds.

    Every stage holds devices of one kind: tensor- and data-parallel groups stay on an island.
    """
    members = {kind: cluster.ranks_of_kind(kind) for kind in cluster.used_kinds}
    if any(len(ranks) % per_stage for ranks in members.values()):
        return
    for order in permutations(cluster.used_kinds):
        kinds: list[str] = []
        ranks: list[tuple[int, ...]] = []
        for kind in order:
            mine = members[kind]
            for start in range(0, len(mine), per_stage):
                kinds.append(kind)
                ranks.append(mine[start : start + per_stage])
        assert len(kinds) == pp
        yield tuple(kinds), tuple(ranks)


def _micro_batch_sizes(job: Job, pins: Constraints, dp: int) -> list[int]:
    if pins.micro_batch_size:
        return [pins.micro_batch_size]
    batch = job.train.global_batch_size
    if batch % dp:
        return [1]  # ParallelSizes refuses it and says why
    return [size for size in divisors(batch // dp) if size <= MAX_MICRO_BATCH_SIZE]


def _virtual_sizes(job: Job, pins: Constraints, pp: int) -> Sequence[int]:
    if pins.vpp:
        return [pins.vpp]
    if pp == 1 or pins.split is not None or job.model.hybrid:
        return [1]
    most = min(MAX_VIRTUAL_STAGES, job.model.num_layers // pp)
    return [v for v in range(1, most + 1) if job.model.num_layers % v == 0]


def _expert_sizes(job: Job, pins: Constraints, tp: int, data: int) -> list[tuple[int, int]]:
    if job.model.moe is None:
        return [(pins.ep or 1, pins.etp or tp)]
    sizes = []
    for ep in [pins.ep] if pins.ep else divisors(job.model.moe.num_experts):
        for etp in [pins.etp] if pins.etp else sorted({1, tp}):
            if (tp * data) % (ep * etp) == 0 or (pins.ep and pins.etp):
                sizes.append((ep, etp))
    return sizes


def _sequence_parallel(job: Job, pins: Constraints, facts: Facts, tp: int) -> bool:
    """Use it where it works (less memory at equal traffic), as pinned otherwise."""
    if tp == 1:
        return False
    if pins.sequence_parallel is not None:
        return pins.sequence_parallel
    return facts.fused_norms and job.model.seq_length % tp == 0
