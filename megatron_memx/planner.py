"""From a job and a cluster to a plan: signature, look-up, search, and the plan as frozen data."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_memx.cache.signature import PLANNER_VERSION, signature
from megatron_memx.cluster import Cluster, Link
from megatron_memx.errors import BadInputError
from megatron_memx.job import Job
from megatron_memx.legality import Facts, check_chunks
from megatron_memx.objective import PROFILES, Weights
from megatron_memx.options import MemXOptions
from megatron_memx.pins import Constraints, constraints
from megatron_memx.plan import Plan, Prediction, Stage, StagePrediction
from megatron_memx.profile.design import LINK
from megatron_memx.profile.store import OK, ProfileRow, digest

if TYPE_CHECKING:
    from megatron_memx.cost.calibration import Calibration
    from megatron_memx.cost.units import UnitProvider

DEFAULT_MARGIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Request:
    """A planning request, checked: what the signature is made of and what the search reads."""

    job: Job
    cluster: Cluster
    facts: Facts
    options: MemXOptions
    pins: Constraints
    weights: Weights | None
    margin: float
    versions: Mapping[str, str] = field(default_factory=dict)
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)

    @property
    def absolute(self) -> bool:
        """Whether balance compares bytes."""
        return self.options.memx_balance == "absolute"

    def fields(self, rows: Mapping[str, Sequence[ProfileRow]]) -> dict[str, Any]:
        """Return everything that determines the plan, as plain JSON types."""
        return {
            "model": self.job.model.to_dict(),
            "global_batch_size": self.job.train.global_batch_size,
            "precision": self.job.train.precision,
            "checkpoints": bool(self.job.train.save or self.job.train.load),
            "options": dict(self.job.relevant),
            "pins": dict(self.job.pins),
            "world_size": self.cluster.num_devices,
            "cluster": self.cluster.signature_fields(),
            "environment": asdict(self.facts),
            "versions": {**self.versions, "planner": PLANNER_VERSION},
            "objective": self.weights.to_dict() if self.weights else "auto",
            "balance": self.options.memx_balance or "utilisation",
            "memory_margin": self.margin,
            "profile": {kind: digest(rows.get(kind, ())) for kind in self.cluster.used_kinds},
            "calibration": {kind: item.to_dict() for kind, item in self.calibrations.items()},
        }


def make_request(
    job: Job,
    cluster: Cluster,
    options: MemXOptions,
    *,
    facts: Facts,
    versions: Mapping[str, str],
    calibrations: Mapping[str, Calibration] | None = None,
) -> Request:
    """Check the options and pins and return the request.

    Args:
        calibrations: Device kind -> its terms, in place of those assumed.

    Raises:
        BadInputError: Options that contradict each other, or a margin outside 0 to 1.
        LegalityError: Pins that cannot be kept.
    """
    margin = DEFAULT_MARGIN if options.memx_memory_margin is None else options.memx_memory_margin
    if not 0 <= margin < 1:
        raise BadInputError(
            f"--memx-memory-margin {margin}: a share of 0 or more and less than 1",
            fix=str(DEFAULT_MARGIN),
            flag="--memx-memory-margin",
        )
    return Request(
        job=job,
        cluster=cluster,
        facts=facts,
        options=options,
        pins=constraints(job, cluster.num_devices, facts),
        weights=weights_of(options),
        margin=margin,
        versions=versions,
        calibrations=calibrations or {},
    )


def weights_of(options: MemXOptions) -> Weights | None:
    """Return the weights that the options name; None for ``auto``.

    Raises:
        BadInputError: Both a profile and single weights, or some weights only.
    """
    by_hand = {
        "alpha": options.memx_alpha,
        "beta": options.memx_beta,
        "gamma": options.memx_gamma,
    }
    given = {name: value for name, value in by_hand.items() if value is not None}
    if given and options.memx_objective:
        raise BadInputError(
            f"--memx-objective {options.memx_objective} and --memx-{next(iter(given))} both set "
            "the weights",
            fix="one of the two",
            flag="--memx-objective",
        )
    if given and len(given) < 3:
        missing = [f"--memx-{name}" for name in by_hand if name not in given]
        raise BadInputError(
            f"weights need all three of alpha, beta and gamma; missing: {', '.join(missing)}",
            fix="--memx-alpha 0.4 --memx-beta 0.2 --memx-gamma 0.4",
            flag=missing[0],
        )
    if given:
        return Weights(alpha=given["alpha"], beta=given["beta"], gamma=given["gamma"])
    if options.memx_objective == "auto":
        return None
    return PROFILES[options.memx_objective or "default"]


def make_plan(request: Request, rows: Mapping[str, Sequence[ProfileRow]]) -> Plan:
    """Search and return the plan.

    Args:
        rows: Device kind -> measurements; kinds without any are predicted from the catalogue.

    Raises:
        InfeasibleError: Nothing fits.
    """
    from megatron_memx.cost.coverage import gaps
    from megatron_memx.search.evaluate import Evaluator
    from megatron_memx.search.search import SearchRequest, search

    cluster = with_measured_links(request.cluster, rows)
    provider = provider_for(request.job, cluster, rows, request.calibrations)
    result = search(
        SearchRequest(
            job=request.job,
            cluster=cluster,
            provider=provider,
            pins=request.pins,
            facts=request.facts,
            weights=request.weights,
            margin=request.margin,
            absolute=request.absolute,
        )
    )
    best = result.best
    stages = tuple(
        Stage(
            pipeline_rank=rank,
            device_kind=best.outer.kinds[rank],
            ranks=best.outer.ranks[rank],
            chunks=option.chunks,
            prediction=StagePrediction(
                forward_s=sum(cost.forward_s for cost in option.costs),
                backward_s=sum(cost.backward_s for cost in option.costs),
                peak_memory_bytes=option.memory.peak_bytes,
                peak_memory_high_bytes=option.memory.high_bytes,
                capacity_bytes=request.cluster.kinds[best.outer.kinds[rank]].capacity_bytes,
                memory_breakdown_bytes=dict(option.memory.breakdown_bytes),
            ),
        )
        for rank, option in enumerate(best.stages)
    )
    broken = check_chunks(request.job, [stage.chunks for stage in stages], request.facts)
    if broken:
        raise broken[0].error()
    used = [stage.prediction.utilisation for stage in stages if stage.prediction]
    spread = math.exp(2 * best.log_sigma)
    evaluator = Evaluator(
        *(request.job, cluster, provider, best.outer),
        margin=request.margin,
        absolute=request.absolute,
    )
    basis = "; ".join([provider.basis, *gaps(evaluator.units(best.stages), provider)])
    return Plan(
        signature=signature(request.fields(rows)),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        parallel=best.outer.sizes,
        stages=stages,
        model=request.job.model.to_dict(),
        cluster=cluster.to_dict(),
        versions=dict(request.versions),
        origin={
            "basis": basis,
            "profile": {kind: digest(rows.get(kind, ())) for kind in request.cluster.used_kinds},
            "configurations": result.count,
            "exhaustive": result.exhaustive,
            "notes": [*request.job.notes, *request.pins.warnings],
        },
        objective={
            "profile": result.weights.name,
            "weights": {name: getattr(result.weights, name) for name in ("alpha", "beta", "gamma")},
            "balance": request.options.memx_balance or "utilisation",
            "memory_margin": request.margin,
            "reference": asdict(result.reference),
        },
        pins=dict(request.job.pins),
        prediction=Prediction(
            iteration_time_s=best.time_s,
            iteration_time_low_s=best.time_s / spread,
            iteration_time_high_s=best.time_s * spread,
            peak_utilisation=max(used),
            utilisation_variance=statistics.pvariance(used),
            phi=result.phi,
            basis=basis,
        ),
        runners_up=result.runners_up,
        rejected=result.rejected,
    )


def provider_for(
    job: Job,
    cluster: Cluster,
    rows: Mapping[str, Sequence[ProfileRow]],
    calibrations: Mapping[str, Calibration],
) -> UnitProvider:
    """Return what predicts units: fitted to measurements, calibrated, or the catalogue alone."""
    if any(rows.values()):
        from megatron_memx.predictor.model import FittedProvider

        return FittedProvider(job, cluster, rows, calibrations)
    from megatron_memx.cost.prior import CatalogueProvider

    return CatalogueProvider(job, cluster, calibrations=calibrations)


def with_measured_links(cluster: Cluster, rows: Mapping[str, Sequence[ProfileRow]]) -> Cluster:
    """Return the cluster with each link that was measured: two sizes give start-up and rate."""
    by_link: dict[tuple[str, str], list[ProfileRow]] = {}
    for row in (row for each in rows.values() for row in each):
        if row.part == LINK and row.status == OK:
            pair = "|".join(sorted((row.device_kind, row.peer_kind)))
            by_link.setdefault((row.where, pair), []).append(row)
    intra: dict[str, Link] = {}
    inter: dict[str, Link] = {}
    for (where, pair), found in by_link.items():
        small = min(found, key=lambda row: row.size_bytes)
        large = max(found, key=lambda row: row.size_bytes)
        extra_s = large.forward_s - small.forward_s
        if large.size_bytes == small.size_bytes or extra_s <= 0:
            continue
        rate = (large.size_bytes - small.size_bytes) / extra_s
        link = Link(
            bandwidth_bytes_per_s=rate,
            latency_s=max(0.0, small.forward_s - small.size_bytes / rate),
            source="measured",
        )
        if where == "intra-node":
            intra[pair.split("|")[0]] = link
        else:
            inter[pair] = link
    return cluster.with_links(intra, inter)


def check_plan_fits(plan: Plan, *, world_size: int, job: Job | None = None) -> None:
    """Refuse a plan that was made for another number of ranks or another model.

    Raises:
        BadInputError: Names both values and the option to change.
    """
    if plan.parallel.world_size != world_size:
        raise BadInputError(
            f"the plan is for {plan.parallel.world_size} ranks ({plan.parallel.label}), "
            f"{world_size} are launched",
            fix=f"{plan.parallel.world_size} ranks, or plan again",
            flag="--memx-replan",
        )
    if job is None:
        return
    ours = job.model.to_dict()
    differing = [
        name
        for name, value in plan.model.items()
        if name in ours and _plain(ours[name]) != _plain(value)
    ]
    if differing:
        name = differing[0]
        raise BadInputError(
            f"the plan is for {name} {plan.model[name]}, the job has {ours[name]}",
            fix="the model that the plan was made for, or plan again",
            flag="--memx-replan",
        )
    if plan.parallel.global_batch_size != job.train.global_batch_size:
        raise BadInputError(
            f"the plan is for a global batch of {plan.parallel.global_batch_size}, the job has "
            f"{job.train.global_batch_size}",
            flag="--global-batch-size",
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
