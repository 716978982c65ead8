"""``memx evaluate``: calibrate on the minimal set among measured runs, score the other runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_memx.cost.calibration import Calibration
from megatron_memx.cost.efficiency import (
    MEMORY_TERMS,
    SPREAD,
    TIME_TERMS,
    Efficiency,
    assumed,
    moved,
)
from megatron_memx.evaluation.calibrate import Fit, Process, choose, fit
from megatron_memx.evaluation.cases import Case, Setting, UnusableError, make_case
from megatron_memx.evaluation.engine import Engine
from megatron_memx.evaluation.runs import Run
from megatron_memx.evaluation.scores import confusion, errors, ranking
from megatron_memx.units import GIB

Array = NDArray[np.float64]
# Rows among which the minimal set is looked for: the design's cost grows with the square.
_MOST_CANDIDATES = 300
_LAYER_FEATURES, _RUN_FEATURES = (0, 1, 2, 3, 4, 5), (4, 6, 7, 8, 9, 10)
_STEP = 1e-3


@dataclass(frozen=True)
class Quantity:
    """Time or memory: what is measured, what the engine says, which terms move it."""

    name: str
    terms: tuple[str, ...]
    process: Process
    measured: Callable[[Run], float | None]
    says: Callable[[Engine, Efficiency, bool], float]
    # Terms whose effect hides below others at their assumed value are also looked for from here.
    hidden: tuple[tuple[str, float], ...] = ()


TIME = Quantity(
    name="time",
    terms=TIME_TERMS,
    # A kernel's or collective's own ways reach one doubling of a size far; what the composition
    # of a run misses reaches further and is smaller.
    process=Process(blocks=((_LAYER_FEATURES, 0.10, 1.0), (_RUN_FEATURES, 0.04, 4.0)), noise=0.01),
    measured=lambda run: run.iter_time_s,
    says=lambda engine, value, quick: engine.time_s(value, quick=quick),
    hidden=(("collective_start_s", 2.0),),
)
MEMORY = Quantity(
    name="memory",
    terms=MEMORY_TERMS,
    process=Process(blocks=((_LAYER_FEATURES, 0.10, 2.0), (_RUN_FEATURES, 0.06, 4.0)), noise=0.03),
    measured=lambda run: run.peak_mem_gib * GIB if run.peak_mem_gib else None,
    says=lambda engine, value, _quick: engine.memory_bytes(value),
)
# Tried, one field after the other, where a source is silent.
_ALTERNATIVES: dict[str, tuple[tuple[str, Any], ...]] = {
    "recompute": (("recompute", "full"), ("recompute", "selective")),
    "flash": (("flash", False),),
    "precision": (("precision", "fp16"), ("precision", "fp32")),
    "dist_opt": (("sharded", True),),
    "memory_of": (("memory_of", "last"),),
}


@dataclass
class Calibrated:
    """A group's calibration: the efficiencies of each quantity and what they leave."""

    setting: Setting
    values: dict[str, Efficiency]
    fits: dict[str, Fit] = field(default_factory=dict)

    def to_share(self, kind: str) -> Calibration:
        """Return what the fit says of the device kind, for the planner."""
        times = self.fits.get("time")
        memory = self.values["memory"].reserved_bytes if "memory" in self.fits else 0.0
        return Calibration(
            device_kind=kind,
            efficiency=self.values["time"],
            log_sigma=times.left_out_sigma() if times else _prior_sigma(TIME),
            basis=f"{len(times.features) if times else 0} runs",
            reserved_bytes=memory,
        )


@dataclass
class Predicted:
    """One test row with its predictions; ln of seconds or bytes and their standard deviations."""

    run: Run
    kind_bytes: int
    said: dict[str, tuple[float, float]]


def features(case: Case) -> list[float]:
    """Return the shape of a run, in doublings, so that a distance of one is a factor of two."""
    model, sizes = case.job.model, case.outer.sizes
    sides = (
        model.hidden_size,
        model.ffn_hidden_size / model.hidden_size,
        sizes.micro_batch_size * model.seq_length,
        model.seq_length,
        sizes.tensor_model_parallel_size,
        model.num_attention_heads,
        sizes.pipeline_model_parallel_size,
        sizes.data_parallel_size,
        sizes.num_microbatches,
        model.num_layers,
    )
    return [*(float(np.log2(side)) for side in sides), 2.0 * sizes.use_distributed_optimizer]


def evaluate(
    runs: Sequence[Run],
    *,
    budget: int,
    fit_runs: Sequence[Run] | None = None,
    by: Sequence[str] = (),
    skipped: Counter[str] | None = None,
    calibrations: list[Calibration] | None = None,
) -> dict[str, Any]:
    """Calibrate and score; see the module.

    Args:
        budget: Rows to fit on in each group, chosen by the minimal-set rule.
        fit_runs: Rows to fit on in place of those.
        by: Columns that part the rows into groups, each calibrated by itself.
        skipped: Rows that were left out already, by reason; more are added.
        calibrations: Gets what the fit says of each device kind.
    """
    left_out = Counter(skipped or {})
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(str(getattr(run, name)) for name in by), []).append(run)
    predicted: list[Predicted] = []
    notes: list[str] = []
    assumptions: Counter[str] = Counter()
    fit_rows, per_group = 0, {}
    for name, members in groups.items():
        label = ", ".join(name) or "all rows"
        done, used = [], 0
        for kind, cases in cases_by_kind(members, left_out).items():
            own = None
            if fit_runs is not None:
                alike = [
                    run
                    for run in fit_runs
                    if not by or tuple(str(getattr(run, column)) for column in by) == name
                ]
                own = cases_by_kind(alike, Counter()).get(kind, [])
            share = min(budget, max(1, round(budget * len(cases) / max(1, len(members)))))
            if own is None and len([c for c in cases if not c.run.failed]) < budget:
                notes.append(
                    f"{label}: {kind} has fewer rows than the budget of {budget}: nothing was "
                    "fitted, the catalogue answers"
                )
                share = 0
            fitted, rest = part(cases, share, own)
            used += len(fitted)
            calibrated = calibrate(kind, fitted)
            done += predict(calibrated, rest)
            if fitted and calibrations is not None:
                calibrations.append(calibrated.to_share(kind))
            for case in rest:
                assumptions.update(case.assumed)
        per_group[label] = {"fit_rows": used, **score(done)}
        fit_rows += used
        predicted += done
    result: dict[str, Any] = {
        "fit_rows": fit_rows,
        "test_rows": len(predicted),
        "skipped": dict(left_out),
        "assumed": dict(assumptions),
        "notes": notes,
        **score(predicted),
    }
    if by:
        result["groups"] = per_group
    return result


def cases_by_kind(runs: Sequence[Run], left_out: Counter[str]) -> dict[str, list[Case]]:
    """Return runs in the planner's terms by device kind; reasons of the others are counted."""
    cases: dict[str, list[Case]] = {}
    for run in runs:
        try:
            case = make_case(run, Setting())
        except UnusableError as error:
            left_out[str(error)] += 1
            continue
        cases.setdefault(case.kind, []).append(case)
    return cases


def part(
    cases: Sequence[Case], budget: int, given: Sequence[Case] | None
) -> tuple[list[Case], list[Case]]:
    """Return (rows to fit on, rows to test on)."""
    if given is not None:
        return [case for case in given if not case.run.failed], list(cases)
    able = [index for index, case in enumerate(cases) if not case.run.failed]
    if budget == 0 or len(able) < 2:
        return [], list(cases)
    candidates = np.random.default_rng(0).permutation(able)[:_MOST_CANDIDATES].tolist()
    engines = [Engine(cases[index]) for index in candidates]
    table = np.array([features(cases[index]) for index in candidates])
    timed = [i for i in range(len(engines)) if engines[i].case.run.iter_time_s]
    quantity = TIME if len(timed) >= len(engines) / 2 else MEMORY
    base = assumed(engines[0].case.cluster.kinds[engines[0].case.kind])
    # What hides below other terms at its assumed value must be told apart where it does not.
    bases = [moved(base, {"transfer_s": 2.0, **steps}) for steps in ({}, dict(quantity.hidden))]
    parts = [_jacobian(engines, one, quantity) for one in bases]
    jacobian = np.concatenate(parts, axis=1) / len(parts) ** 0.5
    chosen = {candidates[i] for i in choose(jacobian, table, quantity.process, budget)}
    return (
        [case for index, case in enumerate(cases) if index in chosen],
        [case for index, case in enumerate(cases) if index not in chosen],
    )


def _jacobian(engines: Sequence[Engine], base: Efficiency, quantity: Quantity) -> Array:
    def says(value: Efficiency) -> Array:
        return np.log([quantity.says(engine, value, True) for engine in engines])

    at = says(base)
    columns = [(says(moved(base, {term: _STEP})) - at) / _STEP for term in quantity.terms]
    return np.stack(columns, axis=1)


def calibrate(kind: str, cases: Sequence[Case]) -> Calibrated:
    """Fit both quantities, and choose what is assumed where the source is silent."""
    from megatron_memx.cluster_file import catalogue

    base = assumed(catalogue()[kind])
    best = Calibrated(setting=Setting(), values={"time": base, "memory": base})
    if not cases:
        return best
    runs = [case.run for case in cases]
    silent = set().union(*(case.assumed for case in cases))
    best, least = _fit_all(runs, Setting(), base)
    for name, changes in _ALTERNATIVES.items():
        if name not in silent:
            continue
        for attribute, value in changes:
            setting = replace(best.setting, **{attribute: value})
            other, objective = _fit_all(runs, setting, base, best)
            if objective < least:
                best, least = other, objective
    return best


def _fit_all(
    runs: Sequence[Run], setting: Setting, base: Efficiency, near: Calibrated | None = None
) -> tuple[Calibrated, float]:
    """Return the calibration and its objective; terms are looked for from those of ``near``."""
    engines = [Engine(make_case(run, setting)) for run in runs]
    made = Calibrated(setting=setting, values={"time": base, "memory": base})
    total = 0.0
    for quantity in (MEMORY, TIME):
        own = [engine for engine in engines if quantity.measured(engine.case.run)]
        if not own:
            continue
        terms = quantity.terms

        def says(z: Array, own: list[Engine] = own, quantity: Quantity = quantity) -> Array:
            value = moved(base, dict(zip(quantity.terms, z.tolist(), strict=True)))
            return np.log([quantity.says(engine, value, True) for engine in own])

        starts = [np.zeros(len(terms))]
        for hidden, start in quantity.hidden:
            starts.append(np.array([start * (term == hidden) for term in terms]))
        if near is not None:
            starts = [near.fits[quantity.name].z]
        found = fit(
            says,
            np.log([quantity.measured(engine.case.run) or 1.0 for engine in own]),
            np.array([features(engine.case) for engine in own]),
            starts,
            [quantity.process],
        )
        total += found.objective
        made.fits[quantity.name] = found
        steps = dict(zip(terms, found.z.tolist(), strict=True))
        made.values[quantity.name] = moved(base, steps)
        if quantity is MEMORY:
            engines = [Engine(engine.case, made.values["memory"]) for engine in engines]
    return made, total


def predict(calibrated: Calibrated, cases: Sequence[Case]) -> list[Predicted]:
    """Predict runs under a calibration."""
    memory = calibrated.values["memory"] if "memory" in calibrated.fits else None
    engines = [Engine(make_case(case.run, calibrated.setting), memory) for case in cases]
    table = np.array([features(engine.case) for engine in engines])
    said: list[dict[str, tuple[float, float]]] = [{} for _ in engines]
    for quantity in (TIME, MEMORY):
        found = calibrated.fits.get(quantity.name)
        mean, sigma = np.zeros(len(engines)), np.full(len(engines), _prior_sigma(quantity))
        if found is not None and engines:
            mean, sigma = found.correction(table)
        for index, engine in enumerate(engines):
            value = quantity.says(engine, calibrated.values[quantity.name], False)
            said[index][quantity.name] = (float(np.log(value) + mean[index]), float(sigma[index]))
    return [
        Predicted(run=engine.case.run, kind_bytes=engine.case.memory_bytes, said=one)
        for engine, one in zip(engines, said, strict=True)
    ]


def _prior_sigma(quantity: Quantity) -> float:
    """Return the interval of the catalogue alone: terms of one spread each, added up."""
    if quantity.name == "memory":
        return SPREAD["activations"]
    return float(np.hypot(SPREAD["matmul"], SPREAD["bandwidth"]))


def score(predicted: Sequence[Predicted]) -> dict[str, Any]:
    """Return errors, ranking and confusion of predictions against what was measured."""
    result: dict[str, Any] = {}
    for quantity in (TIME, MEMORY):
        rows = [one for one in predicted if quantity.measured(one.run)]
        said = np.array([one.said[quantity.name][0] for one in rows])
        sigma = np.array([one.said[quantity.name][1] for one in rows])
        seen = np.log([quantity.measured(one.run) or 1.0 for one in rows])
        result[quantity.name] = errors(said, seen, sigma)
        if quantity is TIME:
            result.update(ranking(said, seen, [one.run.group() for one in rows]))
    result["fits"] = confusion(
        [
            (one.run.failed, bool(np.exp(one.said["memory"][0]) > one.kind_bytes), one.run.model)
            for one in predicted
        ]
    )
    return result
