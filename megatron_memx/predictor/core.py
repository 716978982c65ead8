"""The physical core: ``a + b T + c T s`` for each unit, fitted on the measured pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_memx.cost.units import CHUNK, EMBEDDING, HEAD, LAYER
from megatron_memx.profile.design import FIRST, LAST, MIDDLE
from megatron_memx.profile.store import CONTENDED, OK, ProfileRow

QUANTITIES = ("forward_s", "backward_s", "saved_bytes", "transient_bytes")
_ADDITIVE = ("forward_s", "backward_s", "saved_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitClass:
    """Units that share their coefficients."""

    unit: str
    tp: int
    recompute: str = "none"
    modules: tuple[str, ...] = ()
    sequence_parallel: bool = False


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One unit's figures at one shape, taken out of the measured pieces."""

    unit_class: UnitClass
    micro_batch_size: int
    seq_length: int
    values: Mapping[str, float]
    spread: float


@dataclass(frozen=True, kw_only=True)
class Core:
    """Coefficients and measured ranges of each class of units.

    Args:
        coefficients: Quantity -> (a, b, c).
    """

    coefficients: Mapping[UnitClass, Mapping[str, tuple[float, float, float]]]
    ranges: Mapping[UnitClass, tuple[int, int, int, int]]

    def value(self, unit: UnitClass, quantity: str, mbs: int, seq: int) -> float:
        """Return the core's value of a quantity, never below 0.

        Beyond the largest measured micro-batch it grows in proportion: what was fitted as start-up
        may be noise, and must not make large micro-batches look free.
        """
        a, b, c = self.coefficients[unit][quantity]
        if unit.unit == CHUNK:
            return a
        largest = self.ranges[unit][1]
        tokens = min(mbs, largest) * seq
        return max(0.0, a + b * tokens + c * tokens * seq) * max(1.0, mbs / largest)

    def in_range(self, unit: UnitClass, mbs: int, seq: int) -> bool:
        """Whether a shape lies within twice the measured micro-batches and at measured lengths."""
        if unit.unit == CHUNK:
            return True
        low, high, shortest, longest = self.ranges[unit]
        return low <= mbs <= 2 * high and shortest <= seq <= longest


def observe(rows: Sequence[ProfileRow]) -> list[Observation]:
    """Take single units out of measured pieces.

    A piece of two layers less one of one layer is a layer; what is left of the smaller piece is
    what a chunk costs whatever it holds. First and last pieces less a middle one of the same shape
    are the embedding and the head. Working bytes do not add up: a piece's are those of its
    hungriest unit.
    """
    good = usable(rows)
    middle = {_shape(row) + (row.num_layers,): row for row in good if row.part == MIDDLE}
    overhead = _overheads(good, middle)
    found: list[Observation] = [
        Observation(
            unit_class=UnitClass(unit=CHUNK, tp=tp, sequence_parallel=sequence_parallel),
            micro_batch_size=1,
            seq_length=1,
            values={**dict.fromkeys(QUANTITIES, 0.0), **times},
            spread=0.0,
        )
        for (tp, sequence_parallel), times in overhead.items()
    ]
    for row in good:
        unit = {MIDDLE: LAYER, FIRST: EMBEDDING, LAST: HEAD}.get(row.part)
        if unit is None or (row.part == MIDDLE and row.num_layers != 1):
            continue
        values: dict[str, float]
        if row.part == MIDDLE:
            spare = overhead.get((row.tp, row.sequence_parallel), {})
            values = {
                q: max(getattr(row, q) - spare.get(q, 0.0), getattr(row, q) / 2) for q in _ADDITIVE
            }
        else:
            base = middle.get(_shape(row) + (1,))
            if base is None:
                continue
            values = {q: max(0.0, getattr(row, q) - getattr(base, q)) for q in _ADDITIVE}
        values["transient_bytes"] = float(row.transient_bytes)
        found.append(
            Observation(
                unit_class=UnitClass(
                    unit=unit,
                    tp=row.tp,
                    recompute=row.recompute,
                    modules=row.modules,
                    sequence_parallel=row.sequence_parallel,
                ),
                micro_batch_size=row.micro_batch_size,
                seq_length=row.seq_length,
                values=values,
                # What is left of the spread in the median of the repeats.
                spread=row.spread / max(row.repeats, 1) ** 0.5,
            )
        )
    return found


def usable(rows: Sequence[ProfileRow]) -> list[ProfileRow]:
    """Return the rows to learn from: undisturbed ones, and disturbed ones where there is no other.

    A disturbed row's memory is exact all the same, and its time better than none.
    """
    best = {row.key: row for row in rows if row.status == CONTENDED}
    best.update({row.key: row for row in rows if row.status == OK})
    return list(best.values())


def fit_core(observations: Sequence[Observation]) -> Core:
    """Fit each class of units; all coefficients are 0 or more."""
    by_class: dict[UnitClass, list[Observation]] = {}
    for item in observations:
        by_class.setdefault(item.unit_class, []).append(item)
    coefficients: dict[UnitClass, dict[str, tuple[float, float, float]]] = {}
    ranges: dict[UnitClass, tuple[int, int, int, int]] = {}
    for unit, items in by_class.items():
        tokens = np.array([i.micro_batch_size * i.seq_length for i in items], dtype=float)
        lengths = np.array([i.seq_length for i in items], dtype=float)
        columns = np.stack([np.ones_like(tokens), tokens, tokens * lengths], axis=1)
        sizes = [i.micro_batch_size for i in items]
        # A term that these shapes cannot tell from the tokens is left out.
        told = np.array([len(set(sizes)) > 1, True, len(set(lengths.tolist())) > 1])
        if unit.unit == CHUNK:
            told = np.array([True, False, False])
        coefficients[unit] = {
            quantity: _fit(columns * told, np.array([i.values[quantity] for i in items]))
            for quantity in QUANTITIES
        }
        ranges[unit] = (min(sizes), max(sizes), int(lengths.min()), int(lengths.max()))
    return Core(coefficients=coefficients, ranges=ranges)


def _fit(columns: NDArray[np.float64], target: NDArray[np.float64]) -> tuple[float, float, float]:
    """Non-negative least squares on relative errors; zero targets count at the mean's scale."""
    from scipy.optimize import nnls

    scale = float(np.abs(target).mean())
    if scale == 0:
        return 0.0, 0.0, 0.0
    rows = 1.0 / np.maximum(target, 0.05 * scale)
    widths = np.maximum(columns.max(axis=0), 1e-300)
    solution, _ = nnls(columns / widths * rows[:, None], target * rows)
    a, b, c = solution / widths
    return float(a), float(b), float(c)


def _shape(row: ProfileRow) -> tuple[object, ...]:
    recompute = row.recompute if row.part == MIDDLE else "none"
    modules = row.modules if row.part == MIDDLE else ()
    return (row.tp, row.micro_batch_size, row.seq_length, recompute, modules)


def _overheads(
    rows: Sequence[ProfileRow], middle: Mapping[tuple[object, ...], ProfileRow]
) -> dict[tuple[int, bool], dict[str, float]]:
    """Return what a chunk costs by itself: twice a one-layer piece less a two-layer one.

    It is the same for every policy, and noise can only be told from it by the least of them.
    """
    seen: dict[tuple[int, bool], dict[str, list[float]]] = {}
    for row in rows:
        one = middle.get(_shape(row) + (1,))
        if row.part != MIDDLE or row.num_layers != 2 or one is None:
            continue
        entry = seen.setdefault((row.tp, row.sequence_parallel), {})
        for quantity in ("forward_s", "backward_s"):
            spare = 2.0 * getattr(one, quantity) - getattr(row, quantity)
            entry.setdefault(quantity, []).append(max(0.0, spare))
    return {
        key: {quantity: min(values) for quantity, values in entry.items()}
        for key, entry in seen.items()
    }
