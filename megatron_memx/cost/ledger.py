"""What passes allocate and free, and the most that is alive at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """Bytes of one unit for one micro-batch.

    Args:
        saved_bytes: Held from the end of its forward to its backward pass.
        forward_bytes: The most that its forward pass needs above what is saved.
        backward_bytes: The most that its backward pass needs above what is saved, the gradient
            that it begins with included.
    """

    saved_bytes: float
    forward_bytes: float
    backward_bytes: float


class Ledger:
    """Bytes that are allocated now, and the most that ever were."""

    def __init__(self) -> None:
        self.now = 0.0
        self.peak = 0.0

    def add(self, *sizes: float) -> None:
        """Allocate."""
        self.now += sum(sizes)
        self.peak = max(self.peak, self.now)

    def drop(self, *sizes: float) -> None:
        """Free."""
        self.now -= sum(sizes)

    def swap(self, new: float, *old: float) -> None:
        """Allocate a result, then free what it was made of."""
        self.add(new)
        self.drop(*old)
