"""The units that a stage is made of, and what one of them costs: the planner's cost interface.

A chunk is some decoder layers, perhaps the embedding before them, perhaps the head (final norm,
output layer and loss) and multi-token-prediction layers behind them. Running a chunk costs
something by itself too. Everything about a stage is composed of these, so that a provider answers
for units only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatron_memx.cluster import Cluster

LAYER, MOE_LAYER, EMBEDDING, HEAD, MTP = "layer", "moe_layer", "embedding", "head", "mtp"
# What a chunk costs whatever it holds: wrappers, masks, Python.
CHUNK = "chunk"
# The batch's attention mask, where a checkpoint keeps it.
MASK = "mask"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitKey:
    """Which unit, on which device kind, in which shape.

    Args:
        recompute: ``none``, ``selective`` or ``full`` for layers; ``none`` otherwise.
        seq_length: Tokens of a sequence on this rank's context-parallel share.
        across_nodes: Whether its pipeline has stages on several nodes.
    """

    kind: str
    unit: str
    tp: int
    micro_batch_size: int
    seq_length: int
    recompute: str = "none"
    modules: tuple[str, ...] = ()
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    across_nodes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCost:
    """Cost of one unit for one micro-batch.

    Args:
        forward_s: Forward pass.
        backward_s: Backward pass, what it recomputes included.
        saved_bytes: Held from the end of its forward to its backward pass.
        forward_bytes: The most that its forward pass needs above what is saved.
        backward_bytes: The most that its backward pass needs above what is saved.
        log_sigma: One standard deviation of ln(time).
        memory_log_sigma: One standard deviation of ln(bytes).
        measured: Whether it rests on measurements of this device kind.
        in_range: Whether the shape lies between measured shapes.
    """

    forward_s: float
    backward_s: float
    saved_bytes: float
    forward_bytes: float
    backward_bytes: float
    log_sigma: float
    memory_log_sigma: float
    measured: bool = False
    in_range: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Per-iteration cost that does not depend on the schedule.

    Args:
        optimizer_s_per_parameter: Seconds for each parameter that a rank updates.
        optimizer_s: Seconds of a step whatever the number of parameters.
        optimizer_bytes_per_parameter: Temporary bytes for each parameter that a rank updates.
        optimizer_bytes: Temporary bytes of a step whatever the number of parameters.
        fixed_s: Data, logging and Python between iterations.
        exposed: Share of an overlapped gradient reduction that nothing hides.
        transfer_s: Software's time of one transfer between stages on different nodes.
        reserved_bytes: Memory outside what is counted, where runs told of it.
    """

    optimizer_s_per_parameter: float
    optimizer_s: float
    optimizer_bytes_per_parameter: float
    optimizer_bytes: float
    fixed_s: float
    exposed: float = 0.0
    transfer_s: float = 0.0
    reserved_bytes: float = 0.0


class UnitProvider(Protocol):
    """Answers what units cost.

    Args:
        basis: On what the answers rest, in words.
        cluster: The cluster with its links as training reaches them.
    """

    basis: str
    cluster: Cluster

    def unit(self, key: UnitKey) -> UnitCost:
        """Return the cost of one unit."""

    def step(self, kind: str) -> StepCost:
        """Return the per-iteration cost on a device kind."""
