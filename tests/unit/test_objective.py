"""Phi and its weights."""

from __future__ import annotations

import pytest

from megatron_memx.errors import BadInputError
from megatron_memx.objective import PROFILES, Reference, Weights, auto_weights, phi
from megatron_memx.options import MemXOptions
from megatron_memx.planner import weights_of


def test_phi_by_hand() -> None:
    reference = Reference(time_s=2.0, peak=0.5, variance=0.04)
    weights = PROFILES["default"]
    value = phi(1.0, [0.4, 0.6], weights, reference)
    epsilon = 0.0004
    expected = 0.5**0.4 * 1.2**0.2 * ((0.01 + epsilon) / (0.04 + epsilon)) ** 0.4
    assert value == pytest.approx(expected)


def test_a_perfectly_even_reference_keeps_v_finite() -> None:
    reference = Reference(time_s=1.0, peak=0.5, variance=0.0)
    assert phi(1.0, [0.5, 0.5], PROFILES["default"], reference) == pytest.approx(1.0)
    assert phi(1.0, [0.4, 0.6], PROFILES["default"], reference) > 1.0


def test_profiles_are_the_documented_ones() -> None:
    assert {name: (w.alpha, w.beta, w.gamma) for name, w in PROFILES.items()} == {
        "default": (0.4, 0.2, 0.4),
        "safety": (0.3, 0.5, 0.2),
        "throughput": (0.7, 0.2, 0.1),
    }


def test_auto() -> None:
    assert auto_weights(least_margin=0.05, compute_rates=[1, 9]).name == "safety"
    assert auto_weights(least_margin=0.5, compute_rates=[10, 10.1]).name == "throughput"
    assert auto_weights(least_margin=0.5, compute_rates=[1, 9]).name == "default"


def test_weights_from_options() -> None:
    assert weights_of(MemXOptions()) == PROFILES["default"]
    assert weights_of(MemXOptions(memx_objective="safety")) == PROFILES["safety"]
    assert weights_of(MemXOptions(memx_objective="auto")) is None
    by_hand = weights_of(MemXOptions(memx_alpha=1.0, memx_beta=0.0, memx_gamma=0.0))
    assert by_hand == Weights(alpha=1.0, beta=0.0, gamma=0.0)
    with pytest.raises(BadInputError, match="all three"):
        weights_of(MemXOptions(memx_alpha=1.0))
    with pytest.raises(BadInputError, match="both set"):
        weights_of(MemXOptions(memx_alpha=1.0, memx_objective="safety"))
    with pytest.raises(BadInputError, match="0 or more"):
        weights_of(MemXOptions(memx_alpha=-1.0, memx_beta=0.0, memx_gamma=0.0))
    with pytest.raises(BadInputError, match="all weights are 0"):
        weights_of(MemXOptions(memx_alpha=0.0, memx_beta=0.0, memx_gamma=0.0))
