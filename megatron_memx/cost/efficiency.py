"""How far a device kind falls short of its catalogue: the terms that measurements calibrate.

Each term has a middle value and a spread (one standard deviation of its logarithm) that hold for
accelerators nobody has measured; a fit moves only the terms that its rows can tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from megatron_memx.cluster import Cluster, DeviceKind, Link


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of peaks, and times that do not depend on size.

    Args:
        matmul: Share of the peak that products of large matrices reach.
        half_size: A side at which a product reaches half of that.
        attention: Share of the peak of a fused attention kernel.
        bandwidth: Share of the memory bandwidth of element-wise operators.
        kernel_start_s: The processor's time for one operator.
        collective_start_s: The processor's time for one collective.
        crossing: By which share every tensor-parallel rank slows its node's processors where the
            pipeline crosses nodes; nothing, unless measured.
        optimizer: Share of the memory bandwidth of the optimizer's step.
        intra_link: Share of a link's bandwidth inside a node.
        intra_latency_s: Start of one step of a collective inside a node.
        inter_link: Share of a link's bandwidth between nodes.
        inter_latency_s: Start of one step of a collective between nodes.
        transfer_s: Software's time of one transfer between stages on different nodes.
        exposed: Share of an overlapped gradient reduction that nothing hides.
        fixed_s: Between iterations: data, logging, Python.
        activations: Activation bytes over those counted.
        reserved_bytes: Bytes outside what is counted: allocator's reserve, workspaces.
        kept_gathered: Gathered inputs that a layer keeps where Megatron gathers them again.
        kept_hidden: Hidden states that a layer keeps beyond those of Megatron.
        kept_ffn: The same for tensors as wide as the MLP.
        kept_logits: The same for single-precision logits of the last stage.
        kept_parameter_bytes: Bytes of each parameter beyond those of Megatron.
    """

    matmul: float = 0.75
    half_size: float = 100.0
    attention: float = 0.55
    bandwidth: float = 0.75
    kernel_start_s: float = 6e-6
    collective_start_s: float = 20e-6
    crossing: float = 0.0
    optimizer: float = 0.7
    intra_link: float = 0.7
    intra_latency_s: float = 8e-6
    inter_link: float = 0.6
    inter_latency_s: float = 20e-6
    transfer_s: float = 100e-6
    exposed: float = 0.3
    fixed_s: float = 20e-3
    activations: float = 1.0
    reserved_bytes: float = 0.7e9
    kept_gathered: float = 0.0
    kept_hidden: float = 0.0
    kept_ffn: float = 0.0
    kept_logits: float = 0.0
    kept_parameter_bytes: float = 0.0

    def to_dict(self) -> dict[str, float]:
        """Return plain JSON types."""
        return asdict(self)


# One standard deviation of each term's logarithm among devices and software that were not measured.
SPREAD: Mapping[str, float] = {
    "matmul": 0.15,
    "half_size": 0.7,
    "attention": 0.35,
    "bandwidth": 0.25,
    "kernel_start_s": 0.7,
    "collective_start_s": 1.5,
    "optimizer": 0.5,
    "intra_link": 0.5,
    "intra_latency_s": 0.8,
    "inter_link": 0.6,
    "inter_latency_s": 0.8,
    "transfer_s": 2.5,
    "exposed": 0.7,
    "fixed_s": 1.0,
    "activations": 0.10,
    "reserved_bytes": 0.8,
}
# The same for terms that are zero where nothing shows them: they add.
ADDED: Mapping[str, float] = {
    "crossing": 0.3,
    "kept_gathered": 1.0,
    "kept_hidden": 2.0,
    "kept_ffn": 1.0,
    "kept_logits": 1.0,
    "kept_parameter_bytes": 1.5,
}
MEMORY_TERMS = (
    *("activations", "reserved_bytes"),
    *(name for name in ADDED if name.startswith("kept_")),
)
TIME_TERMS = tuple(name for name in (*SPREAD, *ADDED) if name not in MEMORY_TERMS)
# A processor without a driver in between, and its start of an iteration.
_CPU = {"kernel_start_s": 30e-6, "fixed_s": 8e-3}


def assumed(kind: DeviceKind) -> Efficiency:
    """Return what is assumed of a device kind that was not measured."""
    made = Efficiency()
    if kind.matmul_efficiency:
        # The published rate is the best that was seen; training's products reach a bit less.
        made = replace(made, matmul=0.92 * kind.matmul_efficiency)
    return replace(made, **_CPU) if kind.platform == "cpu" else made


def moved(value: Efficiency, steps: Mapping[str, float]) -> Efficiency:
    """Return ``value`` with terms moved by ``steps``, counted in spreads."""
    changes = {}
    for name, step in steps.items():
        now = getattr(value, name)
        if name in ADDED:
            changes[name] = now + step * ADDED[name]
            if name == "crossing":
                changes[name] = max(0.0, changes[name])
        else:
            changes[name] = now * math.exp(step * SPREAD[name])
    return replace(value, **changes)


def reached(link: Link, value: Efficiency, *, inside_node: bool) -> Link:
    """Return what a link gives: its share of the bandwidth, and the latency of a step.

    A link that was measured is already what it gives.
    """
    if link.source == "measured":
        return link
    share = value.intra_link if inside_node else value.inter_link
    latency = value.intra_latency_s if inside_node else value.inter_latency_s
    return replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * share,
        latency_s=latency if link.source in ("catalogue", "assumed") else link.latency_s,
    )


def reached_links(cluster: Cluster, values: Mapping[str, Efficiency]) -> Cluster:
    """Return the cluster with every link as it is reached in training."""
    intra, inter = {}, {}
    for kind in cluster.used_kinds:
        rank = cluster.ranks_of_kind(kind)[0]
        intra[kind] = reached(cluster.link(rank, rank), values[kind], inside_node=True)
    for a in cluster.used_kinds:
        for b in cluster.used_kinds:
            if a > b:
                continue
            slower = min(values[a], values[b], key=lambda item: item.inter_link)
            inter[f"{a}|{b}"] = reached(cluster.node_link(a, b), slower, inside_node=False)
    return cluster.with_links(intra, inter)
