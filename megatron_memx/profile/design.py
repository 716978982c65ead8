"""The smallest set of runs that identifies the terms of the cost model.

Each cost of a unit (forward, backward, kept and working bytes) is ``a + b T + c T s`` with T tokens
of a micro-batch and s tokens of a sequence: start-up, everything linear in tokens, and attention.
Three shapes tell a, b and c apart: the base (smallest micro-batch, full sequence), a second
micro-batch at the same sequence (separates a from b + c s) and the base at half the sequence
(separates b from c s). Without any one of them the three unknowns have two equations.

Layers, embedding and head are told apart by the pieces of a pipeline themselves: a middle stage of
one layer, one of two (the difference is one layer, the rest is per-stage overhead), a first stage
(adds the embedding) and a last one (adds the head). Tensor parallelism changes kernels and adds
collectives in ways that no formula here predicts, so each size has runs of its own; recomputation
changes layers only, so each policy has the one-layer runs of its own, while what a stage costs by
itself is told once. No run can be left out: each of them alone tells some term (the test takes them
away one by one).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_memx.parallel import Recompute

MIDDLE, FIRST, LAST, OPTIMIZER, LINK = "middle", "first", "last", "optimizer", "link"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilePoint:
    """One run of the minimal set, and why it is needed."""

    part: str
    num_layers: int
    tp: int
    micro_batch_size: int
    seq_length: int
    recompute: str = "none"
    modules: tuple[str, ...] = ()
    sequence_parallel: bool = False
    reason: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What is measured, comparable with the middle of a row's key."""
        return (
            self.part,
            self.num_layers,
            self.tp,
            self.micro_batch_size,
            self.seq_length,
            self.recompute,
            self.modules,
            self.sequence_parallel,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "modules": list(self.modules)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ProfilePoint:
        """Return the point that :meth:`to_dict` wrote."""
        return cls(**{**data, "modules": tuple(data["modules"])})


def shapes(micro_batch_sizes: Sequence[int], seq_length: int) -> list[tuple[int, int, str]]:
    """Return (micro-batch, sequence, reason) of the three shapes, the base first."""
    smallest = min(micro_batch_sizes)
    larger = [size for size in sorted(micro_batch_sizes) if size > smallest]
    second = larger[0] if larger else 2 * smallest
    half = max(1, seq_length // 2)
    return [
        (smallest, seq_length, "base shape"),
        (second, seq_length, "tells start-up from what grows with tokens"),
        (smallest, half, "tells attention from what grows with tokens"),
    ]


def minimal_set(
    *,
    tps: Sequence[tuple[int, bool]],
    micro_batch_sizes: Sequence[int],
    seq_length: int,
    policies: Sequence[Recompute],
) -> tuple[ProfilePoint, ...]:
    """Return the runs to make on one device kind.

    Args:
        tps: Tensor-parallel sizes to plan with, each with its sequence parallelism.
        micro_batch_sizes: Micro-batch sizes that the search may choose.
        policies: Policies that the search may choose; their classes are measured.
    """
    classes = policy_classes(policies)
    points: list[ProfilePoint] = []
    for tp, sp in tps:
        for index, (mbs, seq, why) in enumerate(shapes(micro_batch_sizes, seq_length)):
            base: dict[str, Any] = {
                "tp": tp,
                "micro_batch_size": mbs,
                "seq_length": seq,
                "sequence_parallel": sp,
            }
            for name, modules in classes:
                again = {**base, "recompute": name, "modules": modules}
                points.append(
                    ProfilePoint(part=MIDDLE, num_layers=1, reason=f"layer, {why}", **again)
                )
                if index == 0 and name == "none":
                    points.append(
                        ProfilePoint(
                            part=MIDDLE,
                            num_layers=2,
                            reason="tells the layer from per-stage overhead",
                            **again,
                        )
                    )
            points.append(
                ProfilePoint(part=FIRST, num_layers=1, reason=f"embedding, {why}", **base)
            )
            points.append(ProfilePoint(part=LAST, num_layers=1, reason=f"head, {why}", **base))
    return tuple(points)


def policy_classes(policies: Iterable[Recompute]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the distinct (class, modules) of layers under ``policies``, ``none`` first."""
    found: dict[tuple[str, tuple[str, ...]], None] = {("none", ()): None}
    for policy in policies:
        if policy.granularity != "none":
            found[(policy.granularity, policy.modules)] = None
    return list(found)


def full_grid_size(
    *,
    tps: int,
    micro_batch_sizes: int,
    policies: int,
    num_layers: int,
) -> int:
    """Return the runs of a grid over every axis of the search: what is *not* measured.

    Tensor-parallel sizes x micro-batch sizes x policies x number of layers of a stage x three
    kinds of stage.
    """
    return tps * micro_batch_sizes * policies * num_layers * 3
