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

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular
from scipy.optimize import least_squares

Array = NDArray[np.float64]
# A fit says nothing about shares further from the assumed ones than this many spreads.
_FARTHEST = 3.0
_MOST_EVALUATIONS = 12


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
        covariance: Of ``z`` and of what is unexplained, for intervals.
    """

    z: Array
    process: Process
    features: Array
    weights: Array
    factor: tuple[Array, bool]
    objective: float

    def correction(self, features: Array) -> tuple[Array, Array]:
        """Return (mean, standard deviation) of what the physics misses at ``features``."""
        across = self.process.covariance(features, self.features)
        prior = self.process.covariance(features[:1], features[:1])[0, 0]
        seen = cho_solve(self.factor, across.T)
        variance = np.maximum(prior - (across * seen.T).sum(1), 0) + self.process.noise**2
        return across @ self.weights, np.sqrt(variance)


def fit(
    says: Callable[[Array], Array],
    measured: Array,
    features: Array,
    num_terms: int,
    processes: Sequence[Process],
) -> Fit:
    """Return the best calibration over ``processes``.

    Args:
        says: ln of what the engine predicts for each row, given ``z``.
        measured: ln of what was measured.
        features: One row for each measurement.
    """
    best: Fit | None = None
    start = np.zeros(num_terms)
    for process in processes:
        covariance = process.covariance(features, features)
        covariance[np.diag_indices_from(covariance)] += process.noise**2
        lower = cholesky(covariance, lower=True)

        def misses(z: Array, lower: Array = lower) -> Array:
            whitened = solve_triangular(lower, measured - says(z), lower=True)
            return np.concatenate([whitened, z])

        solved = least_squares(
            misses,
            start,
            bounds=(-_FARTHEST, _FARTHEST),
            max_nfev=_MOST_EVALUATIONS,
            diff_step=1e-3,
        )
        start = np.clip(solved.x, -_FARTHEST * 0.99, _FARTHEST * 0.99)
        objective = float(2 * solved.cost + 2 * np.log(np.diag(lower)).sum())
        # The evidence also pays for what the data pinned down (Laplace's approximation).
        objective += float(np.linalg.slogdet(solved.jac.T @ solved.jac)[1])
        if best is None or objective < best.objective:
            factor = cho_factor(covariance, lower=True)
            left = measured - says(solved.x)
            best = Fit(
                z=solved.x,
                process=process,
                features=features,
                weights=cho_solve(factor, left),
                factor=factor,
                objective=objective,
            )
    assert best is not None
    return best


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
