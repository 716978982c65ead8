"""What a trace of one rank says: bytes, counted without a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """Bytes of one rank.

    Args:
        parameter_bytes: Weights.
        gradient_bytes: Accumulated gradients.
        optimizer_bytes: Optimizer states after the first step.
        resting_bytes: All that lives between two iterations.
        pass_peak_bytes: Most bytes in the second iteration's passes.
        step_peak_bytes: Most bytes in the second optimizer step.
        num_parameters: Parameters of this rank.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    resting_bytes: int
    pass_peak_bytes: int
    step_peak_bytes: int
    num_parameters: int

    @property
    def peak_bytes(self) -> int:
        """Most bytes at any time."""
        return max(self.pass_peak_bytes, self.step_peak_bytes)
