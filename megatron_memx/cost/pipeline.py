"""Megatron's pipeline schedules as exact event orders, and the time that they take.

The orders are those of ``core/pipeline_parallel/schedules.py``: one-forward-one-backward, and the
interleaved schedule with micro-batch groups of the pipeline's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

FORWARD, BACKWARD = 0, 1
# Pipelines' worths of micro-batches after which the schedule repeats itself.
_SETTLED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTime:
    """Duration of all forward and backward passes of one iteration.

    Args:
        total_s: From the first forward to the end of the last backward pass.
        busy_s: Seconds in which each pipeline rank computes.
        finish_s: When each rank ends its last backward pass.
    """

    total_s: float
    busy_s: tuple[float, ...]
    finish_s: tuple[float, ...]


def _warmup(pp: int, vpp: int, num_microbatches: int, rank: int) -> int:
    """Return how many forward passes come before the first pair of passes."""
    ahead = pp - rank - 1
    return min(num_microbatches * vpp, ahead if vpp == 1 else 2 * ahead + (vpp - 1) * pp)


@lru_cache(maxsize=4096)
def order(pp: int, vpp: int, num_microbatches: int, rank: int) -> tuple[tuple[int, int, int], ...]:
    """Return the (FORWARD or BACKWARD, micro-batch, chunk) events of one pipeline rank."""
    m, warmup = num_microbatches, _warmup(pp, vpp, num_microbatches, rank)
    if vpp == 1:
        forward = [(FORWARD, i, 0) for i in range(m)]
        backward = [(BACKWARD, i, 0) for i in range(m)]
    else:
        table = [
            (group * pp + i, chunk)
            for group in range(-(-m // pp))
            for chunk in range(vpp)
            for i in range(min(pp, m - group * pp))
        ]
        forward = [(FORWARD, i, chunk) for i, chunk in table]
        backward = [(BACKWARD, i, vpp - 1 - chunk) for i, chunk in table]
    events = forward[:warmup]
    steady = len(forward) - warmup
    for k in range(steady):
        events.append(forward[warmup + k])
        events.append(backward[k])
    events += backward[steady:]
    return tuple(events)


@dataclass(frozen=True, order=True, slots=True)
class Moment:
    """A moment at which a rank may hold most.

    Args:
        held: Micro-batches that each chunk holds.
        chunk: The chunk at work.
        forward: Whether it is at its forward pass; else at its backward pass.
        borders: Activations, or their gradients, of the stage's borders that live beside.
    """

    held: tuple[int, ...]
    chunk: int
    forward: bool
    borders: int

    def covers(self, other: Moment) -> bool:
        """Return whether this moment holds at least what the other does."""
        return (
            self.chunk == other.chunk
            and self.forward == other.forward
            and self.borders >= other.borders
            and all(more >= less for more, less in zip(self.held, other.held, strict=True))
        )


@lru_cache(maxsize=4096)
def full_moments(pp: int, vpp: int, num_microbatches: int, rank: int) -> tuple[Moment, ...]:
    """Return every moment at which a rank may hold most, but those that another one covers."""
    held = [0] * vpp
    moments: set[Moment] = set()
    events = order(pp, vpp, num_microbatches, rank)
    borders = _borders(pp, vpp, num_microbatches, rank)
    for (kind, _, chunk), beside in zip(events, borders, strict=True):
        if kind == FORWARD:
            held[chunk] += 1
        moments.add(Moment(tuple(held), chunk, kind == FORWARD, beside))
        if kind == BACKWARD:
            held[chunk] -= 1
    return tuple(
        sorted(
            moment
            for moment in moments
            if not any(other != moment and other.covers(moment) for other in moments)
        )
    )


def _borders(pp: int, vpp: int, num_microbatches: int, rank: int) -> list[int]:
    """Return, for each event, how many activations of the borders live beside the layers' own.

    They are what variables and lists of the schedule hold at that time: what was received ahead,
    what was sent, and a micro-batch's input, with its gradient, that outlives its backward pass.
    The gradient that a backward pass begins with is counted with it.
    """
    events = order(pp, vpp, num_microbatches, rank)
    if pp == 1:
        return [0] * len(events)
    warmup = _warmup(pp, vpp, num_microbatches, rank)
    total = len(events) // 2
    paired = warmup + 2 * (total - warmup)
    forwards = [event[1:] for event in events if event[0] == FORWARD]
    first, last = (0 if rank == 0 else -1), (vpp - 1 if rank == pp - 1 else -1)
    latest: dict[int, tuple[int, int]] = {}  # The input of each chunk's latest forward pass.
    done: set[tuple[int, int]] = set()
    sent: set[tuple[int, int]] = set()  # The gradient sent last lives until the next is made.
    # The input received last before the pairs stays in its variable to the end.
    stays = forwards[warmup : warmup + 1] if vpp > 1 else []
    found = []
    for at, (kind, i, chunk) in enumerate(events):
        steady = warmup <= at < paired
        if kind == FORWARD:
            latest[chunk] = (i, chunk)
            inputs = {*latest.values(), *stays} & done
            if vpp == 1:
                inputs |= sent  # Behind the output that was let go last hangs its input.
            beside = 0
            if steady and last != events[at + 1][2] and (vpp > 1 or done):
                beside += 1  # The gradient received for the backward pass to come, or the last.
        else:
            inputs = {*latest.values(), *stays} & done
            beside = 0
            if steady and vpp > 1:
                beside += events[at - 1][2] != last  # The output on its way.
                beside += at + 1 < paired and events[at + 1][2] != first  # The input to come.
        inputs = {one for one in inputs if one[1] != first}
        found.append(len(inputs) + len(inputs | sent) + beside)
        if kind == BACKWARD:
            done.add((i, chunk))
            sent = {(i, chunk)} if chunk != first else set()
    return found


def extrapolate(
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    p2p_s: Sequence[float],
    num_microbatches: int,
) -> PipelineTime:
    """Return nearly what :func:`simulate` does, for fits that ask for many long iterations.

    After its warm-up the schedule repeats itself, a pipeline's worth of micro-batches at a time.
    Where a slow stage makes itself felt only later, this is up to 2 % below the exact time.
    """
    pp, m = len(forward_s), num_microbatches
    settled = _SETTLED * pp + m % pp
    if m <= settled + pp:
        return simulate(forward_s, backward_s, p2p_s, m)
    short = simulate(forward_s, backward_s, p2p_s, settled)
    longer = simulate(forward_s, backward_s, p2p_s, settled + pp)
    rest = (m - settled) // pp

    def after(early: Sequence[float], late: Sequence[float]) -> tuple[float, ...]:
        return tuple(b + (rest - 1) * (b - a) for a, b in zip(early, late, strict=True))

    finish_s = after(short.finish_s, longer.finish_s)
    return PipelineTime(
        total_s=max(finish_s), busy_s=after(short.busy_s, longer.busy_s), finish_s=finish_s
    )


def simulate(
    forward_s: Sequence[Sequence[float]],
    backward_s: Sequence[Sequence[float]],
    p2p_s: Sequence[float],
    num_microbatches: int,
) -> PipelineTime:
    """Run the schedule of ``num_microbatches`` micro-batches.

    Args:
        forward_s: ``forward_s[rank][chunk]`` seconds of one micro-batch.
        backward_s: The same for backward passes, recomputation included.
        p2p_s: Seconds of a transfer from rank i to i + 1; the last entry: from the last to the
            first rank (between chunks).
    """
    pp, vpp, m = len(forward_s), len(forward_s[0]), num_microbatches
    last = pp * vpp - 1
    # done[slot][micro-batch]: when the pass of chunk slot // pp on rank slot % pp has ended.
    done_f = [[-1.0] * m for _ in range(pp * vpp)]
    done_b = [[-1.0] * m for _ in range(pp * vpp)]
    queues = [order(pp, vpp, m, rank) for rank in range(pp)]
    position = [0] * pp
    clock = [0.0] * pp
    busy = [0.0] * pp
    remaining = sum(map(len, queues))
    while remaining:
        moved = False
        for rank in range(pp):
            queue = queues[rank]
            while position[rank] < len(queue):
                kind, i, chunk = queue[position[rank]]
                slot = chunk * pp + rank
                if kind == FORWARD:
                    ready = done_f[slot - 1][i] + p2p_s[(rank - 1) % pp] if slot else 0.0
                    if slot and done_f[slot - 1][i] < 0:
                        break
                    duration = forward_s[rank][chunk]
                elif slot == last:
                    ready, duration = done_f[slot][i], backward_s[rank][chunk]
                    if ready < 0:
                        break
                else:
                    if done_b[slot + 1][i] < 0:
                        break
                    ready = done_b[slot + 1][i] + p2p_s[rank % pp]
                    duration = backward_s[rank][chunk]
                end = max(clock[rank], ready) + duration
                clock[rank] = end
                busy[rank] += duration
                (done_f if kind == FORWARD else done_b)[slot][i] = end
                position[rank] += 1
                remaining -= 1
                moved = True
        if not moved:
            raise ValueError(f"schedule of pp {pp}, vpp {vpp}, {m} micro-batches never ends")
    return PipelineTime(total_s=max(clock), busy_s=tuple(busy), finish_s=tuple(clock))


def lower_bound_s(stage_s: Sequence[float], num_microbatches: int, vpp: int = 1) -> float:
    """Return a time that no schedule of these stages beats.

    Args:
        stage_s: Forward and backward seconds of one micro-batch over all chunks of each rank.

    A rank starts when the first chunk of the ranks before it has been passed forward, and the last
    gradients pass the same way back after it has ended.
    """
    best = sum(stage_s)
    before = 0.0
    for busy in stage_s:
        best = max(best, num_microbatches * busy + before / vpp)
        before += busy
    return best
