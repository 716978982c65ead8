"""The whole search: outer choices, splits and policies, the winner and why the others lost."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_memx.cluster import Cluster
from megatron_memx.cost.units import UnitProvider
from megatron_memx.errors import InfeasibleError
from megatron_memx.job import Job
from megatron_memx.legality import Facts
from megatron_memx.objective import TIME_ONLY, Reference, Weights, auto_weights, phi_of
from megatron_memx.parallel import Recompute
from megatron_memx.pins import Constraints
from megatron_memx.search.choices import policies
from megatron_memx.search.evaluate import Evaluated, Evaluator, StageOption
from megatron_memx.search.partition import QUICK, THOROUGH, Partitioner
from megatron_memx.search.space import Outer, Rejection, outer_space
from megatron_memx.search.table import Rows, Tables
from megatron_memx.units import format_bytes, format_seconds

# Outer choices that are looked at thoroughly, best first after the quick look.
_THOROUGH_OUTERS = 8


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """Everything that the search reads.

    Args:
        weights: Weights of Phi, or None: chosen by ``auto_weights``.
        margin: Share of each device's memory to keep free.
        absolute: Balance bytes in place of utilisation.
    """

    job: Job
    cluster: Cluster
    provider: UnitProvider
    pins: Constraints
    facts: Facts
    weights: Weights | None
    margin: float
    absolute: bool = False


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The winner, its rivals and how they were judged."""

    best: Evaluated
    phi: float
    weights: Weights
    reference: Reference
    runners_up: tuple[Mapping[str, Any], ...]
    rejected: tuple[Mapping[str, Any], ...]
    count: int
    exhaustive: bool


def search(request: SearchRequest) -> SearchResult:
    """Return the plan of least Phi.

    Raises:
        InfeasibleError: No configuration fits; the nearest miss is named with its shortage.
    """
    outers, rejections = _outers(request)
    if not outers:
        raise _nothing_legal(request, rejections)
    tables = _tables(request)
    reference = _reference(request, outers, tables)
    weights = request.weights
    if weights is None:
        fastest = _search_with(request, outers, rejections, tables, TIME_ONLY, reference)
        rates = [
            request.cluster.kind_of(rank).flops(request.job.train.precision)
            for rank in range(request.cluster.num_devices)
        ]
        margin = 1.0 - max(
            stage.memory.peak_bytes / request.cluster.kinds[kind].capacity_bytes
            for stage, kind in zip(fastest.best.stages, fastest.best.outer.kinds, strict=True)
        )
        weights = auto_weights(least_margin=margin, compute_rates=rates)
        weights = replace(weights, name=f"auto: {weights.name}")
    return _search_with(request, outers, rejections, tables, weights, reference)


def _tables(request: SearchRequest) -> Tables:
    pairs = [
        (layers, policy)
        for layers in range(1, request.job.model.num_layers + 1)
        for policy in policies(request.job, request.pins, request.facts, layers)
    ]
    return Tables(
        request.job,
        request.cluster,
        request.provider,
        Rows.of(pairs),
        margin=request.margin,
        absolute=request.absolute,
    )


def _outers(request: SearchRequest) -> tuple[list[Outer], list[Rejection]]:
    outers: list[Outer] = []
    rejections: list[Rejection] = []
    for item in outer_space(request.job, request.cluster, request.pins, request.facts):
        if isinstance(item, Outer):
            outers.append(item)
        else:
            rejections.append(item)
    return outers, rejections


def _evaluator(request: SearchRequest, outer: Outer) -> Evaluator:
    return Evaluator(
        request.job,
        request.cluster,
        request.provider,
        outer,
        margin=request.margin,
        absolute=request.absolute,
    )


def _reference(request: SearchRequest, outers: list[Outer], tables: Tables) -> Reference:
    """Return the fastest feasible even-split plan with one recompute setting for all stages.

    Without one that fits, the even split that is least short of memory stands in; where no even
    split exists (the layers divide by no pipeline size), the most even one of the first sizes.
    """
    offered = [Recompute(), Recompute.full("uniform", 1)]
    if not request.job.model.flash_attention:
        offered.insert(1, Recompute.selective("core_attn"))
    free = replace(request.pins, split=None, recompute=None)

    def partitioner(outer: Outer) -> Partitioner:
        evaluator = _evaluator(request, outer)
        return Partitioner(evaluator, tables, free, request.facts, lambda t, _p, _v: t)

    best: tuple[bool, float, Evaluated] | None = None
    for outer in outers:
        for policy in offered:
            item = partitioner(outer).even(policy)
            if item is None:
                continue
            misfit = any(not stage.fits for stage in item.stages)
            rank = max(s.shortage_bytes for s in item.stages) if misfit else item.time_s
            if best is None or (misfit, rank) < best[:2]:
                best = (misfit, rank, item)
    item = best[2] if best else partitioner(outers[0]).nearly_even(offered[0])
    unit = max(item.loads) / max(
        stage_utilisation(request, item, index) for index in range(len(item.stages))
    )
    return Reference(
        time_s=item.time_s,
        peak=max(item.loads),
        variance=statistics.pvariance(item.loads),
        label=f"{item.outer.label}, even, {item.stages[0].chunks[0].recompute.label}",
        unit=unit if request.absolute else 1.0,
    )


def stage_utilisation(request: SearchRequest, item: Evaluated, index: int) -> float:
    """Return predicted peak over capacity of one stage."""
    capacity = request.cluster.kinds[item.outer.kinds[index]].capacity_bytes
    return item.stages[index].memory.peak_bytes / capacity


def _search_with(
    request: SearchRequest,
    outers: list[Outer],
    rejections: list[Rejection],
    tables: Tables,
    weights: Weights,
    reference: Reference,
) -> SearchResult:
    """Look at every outer choice quickly, then thoroughly at those that came out best."""

    def score(time_s: Any, peak: Any, variance: Any) -> Any:
        return phi_of(time_s, peak, variance, weights, reference)

    def partitioner(outer: Outer) -> Partitioner:
        evaluator = _evaluator(request, outer)
        return Partitioner(evaluator, tables, request.pins, request.facts, score)

    found: list[tuple[float, str, Evaluated, bool]] = []
    misses: list[tuple[int, Outer, tuple[StageOption, ...]]] = []
    count = 0
    for outer in outers:
        searcher = partitioner(outer)
        result = searcher.run(QUICK)
        count += result.count
        if result.best is not None:
            value = searcher.value(result.best)
            found.append((value, outer.label, result.best, result.exhaustive))
            continue
        shortage = max((option.shortage_bytes for option in result.nearest), default=0)
        misses.append((shortage, outer, result.nearest))
    if not found:
        raise _infeasible(request, [miss for miss in misses if miss[0]])
    # Ties are broken by the configuration's name, so that the same job gives the same plan.
    found.sort(key=lambda entry: entry[:2])
    exhaustive = all(entry[3] for entry in found)
    for index, (value, label, item, whole) in enumerate(found[:_THOROUGH_OUTERS]):
        if whole:
            continue
        searcher = partitioner(item.outer)
        result = searcher.run(THOROUGH)
        count += result.count
        if result.best is not None and searcher.value(result.best) < value:
            found[index] = (searcher.value(result.best), label, result.best, whole)
    found.sort(key=lambda entry: entry[:2])
    value, _, winner, _ = found[0]
    lost = [
        {"family": outer.label, "reason": _shortage_text(nearest, shortage)}
        for shortage, outer, nearest in misses
        if shortage
    ]
    return SearchResult(
        best=winner,
        phi=value,
        weights=weights,
        reference=reference,
        runners_up=tuple(_runner(winner, item, other) for other, _, item, _ in found[1:6]),
        rejected=(
            *lost[:8],
            *({"family": r.family, "reason": r.reason} for r in _distinct(rejections)),
        ),
        count=count,
        exhaustive=exhaustive,
    )


def _shortage_text(nearest: tuple[StageOption, ...], shortage: int) -> str:
    worst = max(nearest, key=lambda option: option.shortage_bytes)
    return (
        f"stage {nearest.index(worst)} is short of memory by {format_bytes(shortage)} although it "
        "recomputes all it can"
    )


def _runner(winner: Evaluated, item: Evaluated, value: float) -> dict[str, Any]:
    return {
        "label": item.outer.label,
        "layers": [[c.num_layers for c in stage.chunks] for stage in item.stages],
        "recompute": [[c.recompute.label for c in stage.chunks] for stage in item.stages],
        "iteration_time_s": item.time_s,
        "peak_load": max(item.loads),
        "phi": value,
        "reason": _why(winner, item),
    }


def _why(winner: Evaluated, item: Evaluated) -> str:
    reasons = []
    if item.time_s > winner.time_s * 1.005:
        reasons.append(f"{item.time_s / winner.time_s - 1:.0%} slower")
    if max(item.loads) > max(winner.loads) * 1.005:
        reasons.append(f"{max(item.loads) / max(winner.loads) - 1:.0%} higher peak")
    ours = statistics.pstdev(winner.loads)
    theirs = statistics.pstdev(item.loads)
    if theirs > ours * 1.005:
        reasons.append("memory less even")
    return ", ".join(reasons) or f"as good, {format_seconds(item.time_s)}"


def _distinct(rejections: list[Rejection]) -> list[Rejection]:
    """Return one rejection for each reason, with the number of families that it took."""
    by_reason: dict[str, list[Rejection]] = {}
    for item in rejections:
        by_reason.setdefault(item.reason, []).append(item)
    return [
        items[0]
        if len(items) == 1
        else Rejection(family=f"{items[0].family} and {len(items) - 1} more", reason=reason)
        for reason, items in by_reason.items()
    ][:12]


def _nothing_legal(request: SearchRequest, rejections: list[Rejection]) -> InfeasibleError:
    """Say why no sizes are legal, and which batch or number of ranks would be."""
    counts: dict[str, list[Rejection]] = {}
    for item in rejections:
        counts.setdefault(item.reason, []).append(item)
    ranked = sorted(counts.values(), key=len, reverse=True)
    reasons = "; ".join(f"{items[0].family}: {items[0].reason}" for items in ranked[:3])
    first = ranked[0][0] if ranked else None
    by_batch = [items[0] for items in ranked if items[0].flag == "--global-batch-size"]
    fix, flag = (first.fix, first.flag) if first else (None, None)
    if by_batch:
        world, batch = request.cluster.num_devices, request.job.train.global_batch_size
        size = request.pins.micro_batch_size or 1
        low = batch // (size * world) * size * world
        near = " or ".join(str(value) for value in (low, low + size * world) if value)
        fewer = next((w for w in range(world - 1, 0, -1) if batch % (size * w) == 0), None)
        fix, flag = f"--global-batch-size {near}", "--global-batch-size"
        if fewer:
            fix += f", or {fewer} rank(s)"
    return InfeasibleError(
        f"no parallel sizes are legal for {request.cluster.num_devices} ranks, this model, batch "
        f"and pins; {reasons}",
        fix=fix or "another number of ranks, or fewer pins",
        flag=flag,
    )


def _infeasible(
    request: SearchRequest, misses: list[tuple[int, Outer, tuple[StageOption, ...]]]
) -> InfeasibleError:
    if not misses:
        return InfeasibleError(
            "no plan keeps the pins",
            fix="fewer pins: " + ", ".join("--" + n.replace("_", "-") for n in request.job.pins),
        )
    shortage, outer, options = min(misses, key=lambda miss: (miss[0], miss[1].label))
    worst = max(options, key=lambda option: option.shortage_bytes)
    rank = options.index(worst)
    kind = request.cluster.kinds[outer.kinds[rank]]
    limit = int(kind.capacity_bytes * (1 - request.margin))
    parts = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in worst.memory.breakdown_bytes.items()
        if size
    )
    return InfeasibleError(
        f"no plan fits in memory. Nearest: {outer.label}, stage {rank} on {kind.name} needs "
        f"{format_bytes(worst.memory.high_bytes)} of {format_bytes(limit)} "
        f"({format_bytes(kind.capacity_bytes)} less a margin of {request.margin:.0%}): short by "
        f"{format_bytes(shortage)} ({parts})",
        fix=f"devices with {format_bytes(kind.capacity_bytes + shortage)}, more devices, a smaller "
        "--seq-length or --micro-batch-size, or --use-distributed-optimizer",
        flag="--memx-memory-margin",
    )
