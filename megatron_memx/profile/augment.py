"""Rows between measured rows, interpolated in physical features, each with origin and weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# What an interpolated row counts against a measured one when the residual is fitted.
AUGMENTED_WEIGHT = 0.3


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One row for fitting.

    Args:
        features: Physical features (logarithms of FLOPs, bytes and sizes).
        targets: ln(measured / core) of time and of memory.
        group: Rows of one group differ in shape only, so that one may interpolate inside it.
        origin: Indices of the measured rows that it comes from (one: it is measured itself).
    """

    features: NDArray[np.float64]
    targets: NDArray[np.float64]
    group: str
    origin: tuple[int, ...]
    weight: float = 1.0


def augment(samples: Sequence[Sample], *, per_pair: int = 3) -> list[Sample]:
    """Return ``samples`` and, for each pair of measured rows of a group, rows between them.

    Features and targets are logarithms, so a straight line between two rows is a power law between
    two shapes; nothing is made outside the measured ones. Split into training and test rows before
    calling this: a row made from a test row would leak it.
    """
    result = list(samples)
    for i, left in enumerate(samples):
        for right in samples[i + 1 :]:
            if left.group != right.group or len(left.origin) > 1 or len(right.origin) > 1:
                continue
            for step in range(1, per_pair + 1):
                share = step / (per_pair + 1)
                result.append(
                    Sample(
                        features=(1 - share) * left.features + share * right.features,
                        targets=(1 - share) * left.targets + share * right.targets,
                        group=left.group,
                        origin=(*left.origin, *right.origin),
                        weight=AUGMENTED_WEIGHT,
                    )
                )
    return result
