"""The cluster: nodes, device kinds and the links between their devices. Frozen data.

Ranks are numbered as the launcher numbers them: node by node in the order given, and inside a node
by local rank. Bandwidths are one way and for one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from megatron_memx.errors import BadInputError
from megatron_memx.typed import checked
from megatron_memx.units import GIB

# When nobody says how nodes are connected: one 100 Gbit/s port a node, measured by nobody.
ASSUMED_INTER_NODE_BYTES_PER_S = 12.5e9
ASSUMED_INTRA_NODE_BYTES_PER_S = 16e9
T = TypeVar("T")
ASSUMED_LATENCY_S = {"intra": 10e-6, "inter": 20e-6}
# Free memory is rounded down to this, so that a plan is not lost over a few megabytes.
FREE_QUANTUM_BYTES = GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceKind:
    """One accelerator model.

    Args:
        peak_flops: Dense peak by dtype name (``bf16``, ``fp16``, ``fp32``).
        reserved_bytes: Memory that no job may count on (context, display, other jobs).
        free_bytes: Memory free now, where the device was asked; None otherwise.
        matmul_efficiency: Measured share of the peak that large matrix products reach.
        source: Where the figures come from.
    """

    name: str
    vendor: str
    platform: str
    memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    reserved_bytes: int = 0
    free_bytes: int | None = None
    matmul_efficiency: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse a device without memory or speed."""
        for name in ("memory_bytes", "memory_bandwidth_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise BadInputError(f"device {self.name}: {name} must be more than 0")
        if not self.peak_flops or min(self.peak_flops.values()) <= 0:
            raise BadInputError(f"device {self.name}: peak_flops must give a rate above 0")
        if not 0 <= self.reserved_bytes < self.memory_bytes:
            raise BadInputError(
                f"device {self.name}: reserved_bytes {self.reserved_bytes} must lie below "
                f"memory_bytes {self.memory_bytes}"
            )

    @property
    def capacity_bytes(self) -> int:
        """Bytes that a job can use: what is free, else all, less what is reserved."""
        usable = self.memory_bytes - self.reserved_bytes
        if self.free_bytes is None:
            return usable
        return min(usable, self.free_bytes // FREE_QUANTUM_BYTES * FREE_QUANTUM_BYTES or usable)

    def flops(self, dtype: str) -> float:
        """Return the dense peak for ``bf16``, ``fp16`` or ``fp32``.

        A 16-bit type that is not listed counts as the other one; fp32 as half of 16 bits (the
        ratio of TF32 on the devices that have it).
        """
        if dtype in self.peak_flops:
            return self.peak_flops[dtype]
        sixteen = self.peak_flops.get("bf16") or self.peak_flops.get("fp16")
        if sixteen is None:
            return next(iter(self.peak_flops.values()))
        return sixteen / 2 if dtype == "fp32" else sixteen


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A way between two devices.

    Args:
        kind: ``direct``, or ``relay`` through host memory (between vendors).
        source: ``given``, ``catalogue``, ``measured`` or ``assumed``.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    kind: str = "direct"
    source: str = "given"

    def transfer_s(self, size_bytes: float) -> float:
        """Return the seconds that ``size_bytes`` take."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One host with devices of one kind."""

    name: str
    device_kind: str
    num_devices: int
    address: str | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes with their devices and links.

    Args:
        intra_node: Device kind -> link inside a node.
        inter_node: ``"kind|kind"`` (names sorted) -> link between nodes of these kinds.
    """

    name: str
    nodes: tuple[Node, ...]
    kinds: Mapping[str, DeviceKind]
    intra_node: Mapping[str, Link] = field(default_factory=dict)
    inter_node: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a cluster without devices or with unknown kinds."""
        if not self.nodes:
            raise BadInputError(f"cluster {self.name} has no nodes")
        for node in self.nodes:
            if node.num_devices < 1:
                raise BadInputError(
                    f"node {node.name} has {node.num_devices} devices: must be 1 or more"
                )
            if node.device_kind not in self.kinds:
                raise BadInputError(f"node {node.name}: unknown device kind {node.device_kind!r}")

    @cached_property
    def devices(self) -> tuple[tuple[int, int, str], ...]:
        """(node index, local index, kind) of each rank."""
        return tuple(
            (index, local, node.device_kind)
            for index, node in enumerate(self.nodes)
            for local in range(node.num_devices)
        )

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return len(self.devices)

    @cached_property
    def used_kinds(self) -> tuple[str, ...]:
        """Kinds in the order in which nodes name them first."""
        return tuple(dict.fromkeys(node.device_kind for node in self.nodes))

    def ranks_of_kind(self, kind: str) -> tuple[int, ...]:
        """Return the ranks whose device is of ``kind``."""
        return self._once(
            kind,
            lambda: tuple(rank for rank, device in enumerate(self.devices) if device[2] == kind),
        )

    def kind_of(self, rank: int) -> DeviceKind:
        """Return the device kind of a rank."""
        return self.kinds[self.devices[rank][2]]

    def link(self, rank_a: int, rank_b: int) -> Link:
        """Return the link between the devices of two ranks."""
        node_a, _, kind_a = self.devices[rank_a]
        node_b, _, kind_b = self.devices[rank_b]
        if node_a == node_b:
            return self.intra_node.get(kind_a) or Link(
                bandwidth_bytes_per_s=ASSUMED_INTRA_NODE_BYTES_PER_S,
                latency_s=ASSUMED_LATENCY_S["intra"],
                source="assumed",
            )
        return self.node_link(kind_a, kind_b)

    def node_link(self, kind_a: str, kind_b: str) -> Link:
        """Return the link between two nodes with devices of these kinds."""
        return self.inter_node.get("|".join(sorted((kind_a, kind_b)))) or Link(
            bandwidth_bytes_per_s=ASSUMED_INTER_NODE_BYTES_PER_S,
            latency_s=ASSUMED_LATENCY_S["inter"],
            source="assumed",
        )

    def group_link(self, ranks: tuple[int, ...]) -> Link:
        """Return the link that bounds a collective over ``ranks``.

        A collective that crosses nodes leaves each by all the devices it has there.
        """
        pairs, ways = self._once(("group", ranks), lambda: self._group(ranks))
        links = []
        for a, b in pairs:
            link = self.link(a, b)
            if self.devices[a][0] != self.devices[b][0]:
                link = replace(link, bandwidth_bytes_per_s=ways * link.bandwidth_bytes_per_s)
            links.append(link)
        slowest = min(links, key=lambda item: item.bandwidth_bytes_per_s)
        return replace(slowest, latency_s=max(link.latency_s for link in links))

    def _group(self, ranks: tuple[int, ...]) -> tuple[list[tuple[int, int]], int]:
        """Return one pair of ranks for each kind of link in a group, and devices of a node."""
        nodes: dict[int, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(self.devices[rank][0], []).append(rank)
        heads = [own[0] for own in nodes.values()]
        pairs = [(own[0], own[0]) for own in nodes.values() if len(own) > 1]
        if len(nodes) > 1:
            pairs += zip(heads, heads[1:] + heads[:1], strict=True)
        return self.distinct(pairs or [(ranks[0], ranks[0])]), min(map(len, nodes.values()))

    def distinct(self, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return one pair of ranks for each kind of link among ``pairs``."""
        found: dict[tuple[bool, str, str], tuple[int, int]] = {}
        for a, b in pairs:
            node_a, _, kind_a = self.devices[a]
            node_b, _, kind_b = self.devices[b]
            found.setdefault((node_a == node_b, kind_a, kind_b), (a, b))
        return list(found.values())

    def boundary(
        self, sender: tuple[int, ...], receiver: tuple[int, ...]
    ) -> list[tuple[int, int, int]]:
        """Return (rank, partner, ranks that leave its node at once), once for each kind of link."""
        return self._once(("boundary", sender, receiver), lambda: self._partners(sender, receiver))

    def _partners(
        self, sender: tuple[int, ...], receiver: tuple[int, ...]
    ) -> list[tuple[int, int, int]]:
        pairs = list(zip(sender, receiver, strict=True))
        leaving: Counter[int] = Counter()
        for a, b in pairs:
            leaving[self.devices[a][0]] += self.devices[a][0] != self.devices[b][0]
        crowded = sorted(pairs, key=lambda pair: -leaving[self.devices[pair[0]][0]])
        return [(a, b, max(1, leaving[self.devices[a][0]])) for a, b in self.distinct(crowded)]

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what ``make`` gives, asked for once in all clusters with these nodes."""
        if key not in self._answers:
            self._answers[key] = make()
        answer: T = self._answers[key]
        return answer

    @cached_property
    def _answers(self) -> dict[Hashable, Any]:
        return {}

    def with_links(
        self,
        intra_node: Mapping[str, Link] | None = None,
        inter_node: Mapping[str, Link] | None = None,
    ) -> Cluster:
        """Return this cluster with some links replaced (by measured ones)."""
        made = replace(
            self,
            intra_node={**self.intra_node, **(intra_node or {})},
            inter_node={**self.inter_node, **(inter_node or {})},
        )
        # Which ranks share a node does not change with the links.
        made.__dict__.update(devices=self.devices, _answers=self._answers)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "name": self.name,
            "nodes": [asdict(node) for node in self.nodes],
            "kinds": {
                name: {**asdict(kind), "peak_flops": dict(kind.peak_flops)}
                for name, kind in self.kinds.items()
                if name in self.used_kinds
            },
            "intra_node": {name: asdict(link) for name, link in self.intra_node.items()},
            "inter_node": {name: asdict(link) for name, link in self.inter_node.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """Return the cluster that :meth:`to_dict` wrote.

        Raises:
            BadInputError: A field is missing, unknown or of another type.
        """
        return checked(cls, data, "cluster")

    def signature_fields(self) -> dict[str, Any]:
        """Return what of the cluster may change a plan: names and addresses do not."""
        return {
            "nodes": [[node.device_kind, node.num_devices] for node in self.nodes],
            "kinds": {
                name: {
                    "memory_bytes": self.kinds[name].memory_bytes,
                    "capacity_bytes": self.kinds[name].capacity_bytes,
                    "platform": self.kinds[name].platform,
                    "peak_flops": dict(self.kinds[name].peak_flops),
                    "memory_bandwidth_bytes_per_s": self.kinds[name].memory_bandwidth_bytes_per_s,
                }
                for name in self.used_kinds
            },
            "links": {
                key: [link.bandwidth_bytes_per_s, link.latency_s, link.kind]
                for key, link in sorted({**self.intra_node, **self.inter_node}.items())
            },
        }
