"""Calibration on a few runs: the most probable efficiencies, and what they leave unexplained.

With ``y`` the logarithm of what was measured and ``f(z)`` that of what the engine says under
efficiencies ``e^(z spread)`` times those assumed, ``z`` minimises

    (y - f(z))' C^-1 (y - f(z)) + z' z,        C = K + noise^2 I,

the most probable values under standard normal ``z`` and a Gaussian process with covariance ``K``
for what the physics does not know (a library's kernel for one shape, a collective's protocol for
one size). Predictions add the process's conditional mean, which fades to nothing away from the
measured shapes: there the physics speaks alone, with a wider interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.optimize import least_squares

Array = NDArray[np.float64]
# A fit says nothing about shares further from the assumed ones than this many spreads.
_FARTHEST = 3.0
_MOST_EVALUATIONS = 12
# Standard deviations between a row and what the others say of it, from which it is not believed.
_CONTRADICTED = 3.5
_MOST_CONTRADICTED = 0.3
_ROUNDS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """The unexplained part: standard deviation by block of features, and how far a row tells.

    Args:
        blocks: (columns, amplitude, length) of each term; the terms add up.
        noise: Standard deviation of one measurement.
    """

    blocks: tuple[tuple[tuple[int, ...], float, float], ...]
    noise: float

    def covariance(self, a: Array, b: Array) -> Array:
        """Return the covariance of rows ``a`` with rows ``b``."""
        total = np.zeros((len(a), len(b)))
        for columns, amplitude, length in self.blocks:
            left, right = a[:, columns] / length, b[:, columns] / length
            square = np.maximum(
                (left**2).sum(1)[:, None] + (right**2).sum(1)[None, :] - 2 * left @ right.T, 0
            )
            total += amplitude**2 * np.exp(-np.sqrt(square + 1e-12))
        return total

    def scaled(self, amplitude: float, length: float) -> Process:
        """Return the process with amplitudes and lengths multiplied."""
        blocks = tuple((c, a * amplitude, size * length) for c, a, size in self.blocks)
        return Process(blocks=blocks, noise=self.noise)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A calibration of one quantity.

    Args:
        z: Terms, in spreads from their assumed values.
        contradicted: Rows that the others contradict; they had no say.
    """

    z: Array
    process: Process
    features: Array
    weights: Array
    lower: Array
    objective: float
    contradicted: tuple[int, ...] = ()

    def left_out_sigma(self) -> float:
        """Return the spread of each row about what the others say of it."""
        inverse = cho_solve((self.lower, True), np.eye(len(self.weights)))
        left_out = self.weights / np.diag(inverse)
        kept = [i for i in range(len(left_out)) if i not in self.contradicted]
        return float(np.sqrt(np.mean(left_out[kept] ** 2)))

    def correction(self, features: Array) -> tuple[Array, Array]:
        """Return (mean, standard deviation) of what the physics misses at ``features``."""
        across = self.process.covariance(features, self.features)
        prior = self.process.covariance(features[:1], features[:1])[0, 0]
        seen = cho_solve((self.lower, True), across.T)
        variance = np.maximum(prior - (across * seen.T).sum(1), 0) + self.process.noise**2
        return across @ self.weights, np.sqrt(variance)


def fit(
    says: Callable[[Array], Array],
    measured: Array,
    features: Array,
    starts: Sequence[Array],
    processes: Sequence[Process],
) -> Fit:
    """Return the best calibration over ``processes``.

    A row that the others contradict (a contended device, another setting that the source does not
    tell) is found by leaving it out, loses its say, and the fit is made again.

    Args:
        says: ln of what the engine predicts for each row, given ``z``.
        measured: ln of what was measured.
        features: One row for each measurement.
        starts: Where to look from: a term that hides at one end shows from the other.
    """
    extra = np.zeros(len(measured))
    best = _best(says, measured, features, starts, processes, extra)
    for _ in range(_ROUNDS):
        inverse = cho_solve((best.lower, True), np.eye(len(measured)))
        left_out = best.weights / np.diag(inverse)
        deviations = np.abs(left_out) * np.sqrt(np.diag(inverse))
        deviations[extra > 0] = 0.0
        worst = np.argsort(-deviations)[: max(1, len(measured) // 20)]
        worst = worst[deviations[worst] > _CONTRADICTED]
        room = int(_MOST_CONTRADICTED * len(measured)) - int((extra > 0).sum())
        if not len(worst) or room < len(worst):
            break
        extra[worst] = left_out[worst] ** 2
        best = _best(says, measured, features, [best.z], [best.process], extra)
    return best


def _best(
    says: Callable[[Array], Array],
    measured: Array,
    features: Array,
    starts: Sequence[Array],
    processes: Sequence[Process],
    extra: Array,
) -> Fit:
    best: Fit | None = None
    for process in processes:
        covariance = process.covariance(features, features)
        covariance[np.diag_indices_from(covariance)] += process.noise**2 + extra
        lower = cholesky(covariance, lower=True)

        misses = partial(_misses, says, measured, lower)

        for start in starts:
            solved = least_squares(
                misses,
                np.clip(start, -_FARTHEST * 0.99, _FARTHEST * 0.99),
                bounds=(-_FARTHEST, _FARTHEST),
                max_nfev=_MOST_EVALUATIONS,
                diff_step=np.full(len(start), 1e-3),
            )
            objective = float(2 * solved.cost + 2 * np.log(np.diag(lower)).sum())
            # The evidence also pays for what the data pinned down (Laplace's approximation).
            told = np.asarray(solved.jac, dtype=np.float64)
            objective += float(np.linalg.slogdet(told.T @ told)[1])
            if best is None or objective < best.objective:
                left = measured - says(solved.x)
                best = Fit(
                    z=solved.x,
                    process=process,
                    features=features,
                    weights=cho_solve((lower, True), left),
                    lower=lower,
                    objective=objective,
                    contradicted=tuple(int(i) for i in np.flatnonzero(extra)),
                )
    assert best is not None
    return best


def _misses(says: Callable[[Array], Array], measured: Array, lower: Array, z: Array) -> Array:
    whitened = solve_triangular(lower, measured - says(z), lower=True)
    return np.concatenate([whitened, z])


def choose(jacobian: Array, features: Array, process: Process, count: int) -> list[int]:
    """Return the rows whose measurement tells most about all rows: the minimal set.

    Under the linearised model every row's logarithm is Gaussian with covariance ``J J' + K``; each
    step takes the row that lowers the sum of all rows' remaining variances the most. A term that no
    row tells apart keeps its prior and draws no measurements.

    Args:
        jacobian: d ln(prediction) / d z of each row.
    """
    rows = len(features)
    covariance = jacobian @ jacobian.T + process.covariance(features, features)
    chosen: list[int] = []
    free = np.ones(rows, dtype=bool)
    for _ in range(min(count, rows)):
        gains = (covariance**2).sum(0) / (np.diag(covariance) + process.noise**2)
        gains[~free] = -math.inf
        pick = int(np.argmax(gains))
        chosen.append(pick)
        free[pick] = False
        column = covariance[:, pick]
        covariance = covariance - np.outer(column, column) / (column[pick] + process.noise**2)
    return chosen
