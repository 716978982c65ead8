"""The planner's provider: measured where there are rows, the catalogue where there are none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_memx.cluster import Cluster
from megatron_memx.cost.calibration import Calibration
from megatron_memx.cost.prior import CatalogueProvider
from megatron_memx.cost.units import (
    CHUNK,
    EMBEDDING,
    HEAD,
    LAYER,
    MASK,
    MOE_LAYER,
    MTP,
    StepCost,
    UnitCost,
    UnitKey,
)
from megatron_memx.job import Job
from megatron_memx.predictor.core import Core, Observation, UnitClass, fit_core, observe
from megatron_memx.predictor.residual import FEATURES, Residual
from megatron_memx.profile.augment import Sample, augment
from megatron_memx.profile.design import OPTIMIZER
from megatron_memx.profile.store import OK, ProfileRow

_UNIT_CODES = {LAYER: 0.0, MOE_LAYER: 1.0, EMBEDDING: 2.0, HEAD: 3.0, MTP: 4.0, CHUNK: 5.0}
_RECOMPUTE_CODES = {"none": 0.0, "selective": 1.0, "full": 2.0}
# No repeat tells more about a run on another day than this.
LEAST_LOG_SIGMA = 0.03
LEAST_MEMORY_LOG_SIGMA = 0.01
OUT_OF_RANGE_LOG_SIGMA = 0.15
OUT_OF_RANGE_MEMORY_LOG_SIGMA = 0.05


class FittedProvider:
    """A :class:`~megatron_memx.cost.units.UnitProvider` fitted on profile rows.

    Args:
        rows: Device kind -> its rows. Kinds without rows are answered by the catalogue.
        calibrations: Of kinds without rows; they answer in the catalogue's place.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        rows: Mapping[str, Sequence[ProfileRow]],
        calibrations: Mapping[str, Calibration] | None = None,
    ) -> None:
        self._job = job
        known = calibrations or {}
        self._prior = CatalogueProvider(job, cluster, calibrations=known)
        self.cluster = self._prior.cluster
        self._cores: dict[str, Core] = {}
        self._residuals: dict[str, Residual] = {}
        self._sigmas: dict[str, float] = {}
        self._steps: dict[str, StepCost] = {}
        counts = []
        for kind in cluster.used_kinds:
            observations = observe(rows.get(kind, ()))
            if not observations:
                told = f"calibrated on {known[kind].basis}" if kind in known else "catalogue"
                counts.append(f"{kind}: {told}")
                continue
            core = fit_core(observations)
            self._cores[kind] = core
            self._fit_residual(kind, core, observations)
            self._steps[kind] = _step_cost(rows[kind], self._prior.step(kind))
            counts.append(f"{kind}: {len(observations)} measured units")
        self.basis = "; ".join(counts) if self._cores else self._prior.basis
        self.unit = lru_cache(maxsize=None)(self._unit)

    def step(self, kind: str) -> StepCost:
        """Return the per-iteration cost on a device kind."""
        return self._steps.get(kind) or self._prior.step(kind)

    def _unit(self, key: UnitKey) -> UnitCost:
        prior = self._prior.unit(key)
        core = self._cores.get(key.kind)
        unit = _class_of(key)
        if core is not None and key.unit == MASK and key.recompute == "selective":
            # What a layer masks by was measured as part of it.
            return replace(prior, saved_bytes=0.0, forward_bytes=0.0, backward_bytes=0.0)
        if core is None or unit not in core.coefficients or key.cp > 1:
            return prior
        mbs, seq = key.micro_batch_size, key.seq_length
        inside = core.in_range(unit, mbs, seq)
        values = {
            name: core.value(unit, name, mbs, seq)
            for name in ("forward_s", "backward_s", "saved_bytes", "transient_bytes")
        }
        # Measured is the larger of both passes.
        transient = values.pop("transient_bytes")
        values |= {"forward_bytes": transient, "backward_bytes": transient}
        sigma, memory_sigma = self._sigmas[key.kind], LEAST_MEMORY_LOG_SIGMA
        if inside:
            features = self._features(key, values["saved_bytes"])[None, :]
            time_ratio, memory_ratio = np.exp(self._residuals[key.kind].predict(features)[0])
            values["forward_s"] *= float(time_ratio)
            values["backward_s"] *= float(time_ratio)
            values["saved_bytes"] *= float(memory_ratio)
        else:
            sigma = max(sigma, OUT_OF_RANGE_LOG_SIGMA)
            memory_sigma = OUT_OF_RANGE_MEMORY_LOG_SIGMA
        return UnitCost(
            **values,
            log_sigma=sigma,
            memory_log_sigma=memory_sigma,
            measured=True,
            in_range=inside,
        )

    def _fit_residual(self, kind: str, core: Core, observations: Sequence[Observation]) -> None:
        samples = []
        errors = []
        for index, seen in enumerate(observations):
            unit, mbs, seq = seen.unit_class, seen.micro_batch_size, seen.seq_length
            key = UnitKey(
                kind=kind,
                unit=unit.unit,
                tp=unit.tp,
                micro_batch_size=mbs,
                seq_length=seq,
                recompute=unit.recompute,
                modules=unit.modules,
                sequence_parallel=unit.sequence_parallel,
            )
            said = core.value(unit, "forward_s", mbs, seq) + core.value(
                unit, "backward_s", mbs, seq
            )
            saw = seen.values["forward_s"] + seen.values["backward_s"]
            said_bytes = core.value(unit, "saved_bytes", mbs, seq)
            targets = np.array(
                [_log_ratio(saw, said), _log_ratio(seen.values["saved_bytes"], said_bytes)]
            )
            errors.append((saw, seen.spread))
            samples.append(
                Sample(
                    features=self._features(key, said_bytes),
                    targets=targets,
                    group=repr(unit),
                    origin=(index,),
                )
            )
        residual = self._residuals[kind] = Residual.fit(augment(samples))
        said_ratios = residual.predict(np.stack([sample.features for sample in samples]))[:, 0]
        # Between what the core missed and what is left on the rows that the residual has seen.
        # Units count by their time: an error of a unit that takes none moves no prediction.
        weights = np.array([weight for weight, _ in errors])
        misses = np.array([sample.targets[0] for sample in samples]) - said_ratios / 2
        spreads = np.array([spread for _, spread in errors])
        mean = float(np.average(misses**2 + spreads**2, weights=np.maximum(weights, 1e-12)))
        self._sigmas[kind] = max(LEAST_LOG_SIGMA, math.sqrt(mean))

    def _features(self, key: UnitKey, saved_bytes: float) -> NDArray[np.float64]:
        work = self._prior.work(key)
        tokens = key.micro_batch_size * key.seq_length
        values = {
            "ln_flops": np.log1p(work.matmul_flops + work.recomputed_flops),
            "ln_moved_bytes": np.log1p(work.moved_bytes),
            "ln_saved_bytes": np.log1p(saved_bytes),
            "ln_tokens": np.log(tokens),
            "ln_seq_length": np.log(key.seq_length),
            "ln_tp": np.log(key.tp),
            "recompute": _RECOMPUTE_CODES[key.recompute],
            "unit": _UNIT_CODES[key.unit],
        }
        return np.array([values[name] for name in FEATURES], dtype=np.float64)


def _class_of(key: UnitKey) -> UnitClass:
    layer = key.unit in (LAYER, MOE_LAYER)
    return UnitClass(
        unit=key.unit,
        tp=key.tp,
        recompute=key.recompute if layer else "none",
        modules=key.modules if layer else (),
        sequence_parallel=key.sequence_parallel,
    )


def _log_ratio(seen: float, said: float) -> float:
    if seen <= 0 or said <= 0:
        return 0.0
    return float(np.clip(np.log(seen / said), -1.0, 1.0))


def _step_cost(rows: Sequence[ProfileRow], fallback: StepCost) -> StepCost:
    """Fit the optimizer's step on its rows: a start-up and a cost for each parameter."""
    seen = [row for row in rows if row.part == OPTIMIZER and row.status == OK]
    if not seen:
        return fallback
    counts = [row.num_parameters for row in seen]
    each_s, start_s = _line(counts, [row.forward_s for row in seen])
    each_bytes, start_bytes = _line(counts, [float(row.transient_bytes) for row in seen])
    return StepCost(
        optimizer_s_per_parameter=each_s,
        optimizer_s=start_s,
        optimizer_bytes_per_parameter=each_bytes,
        optimizer_bytes=start_bytes,
        fixed_s=fallback.fixed_s,
        exposed=fallback.exposed,
        transfer_s=fallback.transfer_s,
        reserved_bytes=fallback.reserved_bytes,
    )


def _line(counts: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """Return (slope, start) of the line through the smallest and the largest; both 0 or more."""
    low = min(range(len(counts)), key=lambda i: counts[i])
    high = max(range(len(counts)), key=lambda i: counts[i])
    if counts[low] == counts[high]:
        return values[high] / max(counts[high], 1), 0.0
    slope = max(0.0, values[high] - values[low]) / (counts[high] - counts[low])
    return slope, max(0.0, values[low] - slope * counts[low])
