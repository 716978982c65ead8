"""Seconds of transfers and collectives, from the links between the ranks that take part."""

from __future__ import annotations

from megatron_memx.cluster import Cluster, Link


def all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a ring all-reduce: 2 (n - 1) steps of size / n each."""
    if ranks < 2 or size_bytes <= 0:
        return 0.0
    steps = 2 * (ranks - 1)
    return steps * link.latency_s + steps / ranks * size_bytes / link.bandwidth_bytes_per_s


def reduce_scatter_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Return the seconds of a ring reduce-scatter (or all-gather) of ``size_bytes`` in all."""
    return all_reduce_s(size_bytes, ranks, link) / 2


def boundary_s(
    cluster: Cluster, sender: tuple[int, ...], receiver: tuple[int, ...], size_bytes: float
) -> float:
    """Return the seconds in which each sender's activations reach its partner, at once.

    Ranks of one node that cross to other nodes at the same time share the node's way out.
    """
    slowest = 0.0
    for a, b, leaving in cluster.boundary(sender, receiver):
        link = cluster.link(a, b)
        share = leaving if link.kind == "relay" else 1
        slowest = max(slowest, link.transfer_s(size_bytes * share))
    return slowest
