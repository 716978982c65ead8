"""``memx cluster``: check a cluster file and show what MemX understood."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_memx.cli.parsing import CommandParser, print_json


def run(arguments: Sequence[str]) -> int:
    """Run ``memx cluster`` and return its exit code.

    Raises:
        BadInputError: The file cannot be used; the line is named.
    """
    from megatron_memx.cluster_file import catalogue, load_cluster
    from megatron_memx.units import format_bytes

    parser = CommandParser(
        "cluster", "Check a cluster file and show its devices.", "memx cluster cluster.yaml"
    )
    parser.add_argument("file", nargs="?", help="cluster.yaml; without it: the device catalogue")
    options = parser.parse_args(list(arguments))
    if options.file is None:
        kinds = catalogue()
        if options.json:
            print_json({name: _kind(kind) for name, kind in kinds.items()})
            return 0
        for name, kind in kinds.items():
            print(
                f"  {name:16} {kind.vendor:14} {kind.platform:5} {format_bytes(kind.memory_bytes)}"
            )
        return 0
    cluster = load_cluster(options.file)
    if options.json:
        print_json(cluster.to_dict())
        return 0
    print(f"{cluster.name}: {cluster.num_devices} devices on {len(cluster.nodes)} node(s)")
    first = 0
    for node in cluster.nodes:
        kind = cluster.kinds[node.device_kind]
        last = first + node.num_devices - 1
        print(
            f"  {node.name}: ranks {first}-{last}, {node.num_devices} x {kind.name} "
            f"({kind.platform}, {format_bytes(kind.capacity_bytes)} usable of "
            f"{format_bytes(kind.memory_bytes)}; {kind.source})"
        )
        first = last + 1
    ranks = [cluster.ranks_of_kind(kind)[0] for kind in cluster.used_kinds]
    for name, rank in zip(cluster.used_kinds, ranks, strict=True):
        print(f"  inside a node of {name}: {_link(cluster.link(rank, rank))}")
    for i, a in enumerate(ranks):
        for b in ranks[i + 1 :]:
            names = f"{cluster.devices[a][2]} to {cluster.devices[b][2]}"
            print(f"  {names}: {_link(cluster.link(a, b))}")
    return 0


def _kind(kind: object) -> dict[str, object]:
    from dataclasses import asdict

    data: dict[str, object] = asdict(kind)  # type: ignore[call-overload]
    return data


def _link(link: object) -> str:
    from megatron_memx.cluster import Link

    assert isinstance(link, Link)
    return (
        f"{link.bandwidth_bytes_per_s / 1e9:g} GB/s, {link.latency_s * 1e6:g} us, {link.kind} "
        f"({link.source})"
    )
