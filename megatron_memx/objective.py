"""The objective: Phi = T^a * M^b * V^g, every factor relative to a reference plan."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

from megatron_memx.errors import BadInputError

# Where the reference is balanced to the last bit, balance is measured against a spread of this
# share of the memory (0.1 percentage points), so that V stays finite.
LEAST_SPREAD = 1e-3
# A number or a numpy array; this module works without importing numpy.
Number = TypeVar("Number", bound=Any)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Exponents of time, peak memory and memory balance."""

    alpha: float
    beta: float
    gamma: float
    name: str = "by hand"

    def __post_init__(self) -> None:
        """Refuse negative or missing weights."""
        for label in ("alpha", "beta", "gamma"):
            value = getattr(self, label)
            if not (math.isfinite(value) and value >= 0):
                raise BadInputError(
                    f"--memx-{label} {value}: must be 0 or more", flag=f"--memx-{label}"
                )
        if self.alpha + self.beta + self.gamma == 0:
            raise BadInputError(
                "all weights are 0: no plan would be better than another",
                fix="--memx-alpha 1",
                flag="--memx-alpha",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)


PROFILES: Mapping[str, Weights] = {
    "default": Weights(alpha=0.4, beta=0.2, gamma=0.4, name="default"),
    "safety": Weights(alpha=0.3, beta=0.5, gamma=0.2, name="safety"),
    "throughput": Weights(alpha=0.7, beta=0.2, gamma=0.1, name="throughput"),
}
TIME_ONLY = Weights(alpha=1.0, beta=0.0, gamma=0.0, name="time only")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Time, peak and variance of the reference plan; V's additive term."""

    time_s: float
    peak: float
    variance: float
    label: str = ""
    unit: float = 1.0

    @property
    def epsilon(self) -> float:
        """1 % of the reference's variance, but not less than :data:`LEAST_SPREAD` squared."""
        return max(0.01 * self.variance, (LEAST_SPREAD * self.unit) ** 2)


def phi(time_s: float, loads: Sequence[float], weights: Weights, reference: Reference) -> float:
    """Return Phi of a plan.

    Args:
        time_s: Iteration time.
        loads: Peak memory of each rank: utilisation, or bytes under ``--memx-balance absolute``.
    """
    variance = statistics.pvariance(loads) if len(loads) > 1 else 0.0
    return float(phi_of(time_s, max(loads), variance, weights, reference))


def phi_of[Number: Any](
    time_s: Number, peak: Number, variance: Number, weights: Weights, reference: Reference
) -> Number:
    """Return Phi from its three parts: numbers, or arrays of them."""
    epsilon = reference.epsilon
    balance = (variance + epsilon) / (reference.variance + epsilon)
    return cast(
        Number,
        (time_s / reference.time_s) ** weights.alpha
        * (peak / reference.peak) ** weights.beta
        * balance**weights.gamma,
    )


def auto_weights(*, least_margin: float, compute_rates: Sequence[float]) -> Weights:
    """Return the weight profile that ``--memx-objective auto`` picks.

    Args:
        least_margin: Least free share of memory of any rank under the time-optimal plan.
        compute_rates: Peak rate of each device.
    """
    if least_margin < 0.10:
        return PROFILES["safety"]
    mean = statistics.fmean(compute_rates)
    if statistics.pstdev(compute_rates) / mean < 0.10:
        return PROFILES["throughput"]
    return PROFILES["default"]
