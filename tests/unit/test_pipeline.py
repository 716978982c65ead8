"""The schedules' event orders and their time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_memx.cost.pipeline import (
    BACKWARD,
    FORWARD,
    Moment,
    full_moments,
    lower_bound_s,
    order,
    simulate,
)

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))


@given(SIZES)
def test_every_pass_runs_once_and_backward_after_forward(sizes: tuple[int, int, int]) -> None:
    pp, vpp, groups = sizes
    m = groups * pp
    for rank in range(pp):
        events = order(pp, vpp, m, rank)
        assert len(events) == len(set(events)) == 2 * m * vpp
        place = {event: index for index, event in enumerate(events)}
        for i in range(m):
            for chunk in range(vpp):
                assert place[FORWARD, i, chunk] < place[BACKWARD, i, chunk]


def test_one_forward_one_backward_by_hand() -> None:
    assert order(2, 1, 3, 0) == (
        (FORWARD, 0, 0),
        (FORWARD, 1, 0),
        (BACKWARD, 0, 0),
        (FORWARD, 2, 0),
        (BACKWARD, 1, 0),
        (BACKWARD, 2, 0),
    )


def test_interleaved_warm_up_as_megatron_counts_it() -> None:
    """2 (pp - rank - 1) + (vpp - 1) pp forward passes before the first pair."""
    for rank, warmup in ((0, 2 * 3 + 4), (3, 4)):
        events = order(4, 2, 8, rank)
        first_backward = next(i for i, event in enumerate(events) if event[0] == BACKWARD)
        assert first_backward == warmup + 1
    assert [event[1:] for event in order(2, 2, 4, 1)[:3]] == [(0, 0), (1, 0), (0, 1)]


@given(SIZES)
def test_in_flight_counts(sizes: tuple[int, int, int]) -> None:
    pp, vpp, groups = sizes
    m = groups * pp
    for rank in range(pp):
        moments = full_moments(pp, vpp, m, rank)
        warmup = pp - rank - 1 if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp
        assert max(sum(moment.held) for moment in moments) == min(m * vpp, warmup + 1)
        assert all(moment.held[moment.chunk] > 0 for moment in moments)
        assert pp > 1 or all(moment.borders == 0 for moment in moments)


def test_borders_of_one_forward_one_backward() -> None:
    """Read off Megatron's loop: what its variables hold besides the micro-batches in flight."""
    # A middle stage at its backward pass has the gradient it sent last; at its forward pass that,
    # the input it belongs to, and the gradient received last.
    assert full_moments(4, 1, 8, 1) == (
        Moment(held=(3,), chunk=0, forward=False, borders=1),
        Moment(held=(3,), chunk=0, forward=True, borders=3),
    )
    # The last stage receives no gradient, the first sends none and has no input.
    assert {moment.borders for moment in full_moments(4, 1, 8, 3) if moment.forward} == {2}
    assert {moment.borders for moment in full_moments(4, 1, 8, 0)} == {0, 1}
    # All of the first stage's forward passes are warm-up: nothing came back yet.
    assert {moment.borders for moment in full_moments(4, 1, 3, 0)} == {0}


def test_borders_of_the_interleaved_schedule() -> None:
    """Received ahead and on its way; then what outlives its backward pass, as traces show it."""

    def fullest(m: int, rank: int) -> int:
        moments = [moment for moment in full_moments(4, 2, m, rank) if not moment.forward]
        most = max(sum(moment.held) for moment in moments)
        return max(moment.borders for moment in moments if sum(moment.held) == most)

    assert [fullest(4, rank) for rank in range(3)] == [0, 0, 2]
    # Rank 2's first chunk is done with what came last before its pairs: input and gradient stay.
    assert [fullest(8, rank) for rank in range(3)] == [3, 3, 7]


def test_even_stages_take_the_textbook_time() -> None:
    """(m + pp - 1) (f + b) without transfers."""
    for pp, m in ((1, 4), (2, 4), (4, 8)):
        time = simulate([[1.0]] * pp, [[2.0]] * pp, [0.0] * pp, m)
        assert time.total_s == pytest.approx((m + pp - 1) * 3.0)
        assert time.busy_s == tuple([3.0 * m] * pp)


def test_virtual_stages_shrink_the_bubble() -> None:
    plain = simulate([[2.0]] * 4, [[4.0]] * 4, [0.0] * 4, 8).total_s
    halves = simulate([[1.0, 1.0]] * 4, [[2.0, 2.0]] * 4, [0.0] * 4, 8).total_s
    assert halves == pytest.approx(8 * 6.0 + 3 * 3.0)
    assert halves < plain


def test_transfers_delay_the_first_and_last_stage() -> None:
    without = simulate([[1.0]] * 3, [[1.0]] * 3, [0.0] * 3, 1).total_s
    assert simulate([[1.0]] * 3, [[1.0]] * 3, [0.5] * 3, 1).total_s == without + 4 * 0.5


@given(
    st.lists(st.tuples(st.floats(0.1, 5), st.floats(0.1, 5)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_the_bound_never_exceeds_the_schedule(
    stages: list[tuple[float, float]], vpp: int, groups: int
) -> None:
    pp = len(stages)
    if pp == 1:
        vpp = 1
    m = groups * pp
    forward = [[f / vpp] * vpp for f, _ in stages]
    backward = [[b / vpp] * vpp for _, b in stages]
    time = simulate(forward, backward, [0.0] * pp, m).total_s
    assert lower_bound_s([f + b for f, b in stages], m, vpp) <= time * (1 + 1e-9)
