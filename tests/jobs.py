"""Jobs and clusters for tests."""

from __future__ import annotations

from typing import Any

from megatron_memx.cluster import Cluster, DeviceKind, Link, Node
from megatron_memx.job import Job, parse_job
from megatron_memx.legality import Facts

GIB = 1024**3


def words(**more: Any) -> list[str]:
    """Return Megatron words; keys are option names, True a switch, None leaves one out."""
    values: dict[str, Any] = {
        "num_layers": 8,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "seq_length": 128,
        "max_position_embeddings": 128,
        "vocab_size": 1000,
        "global_batch_size": 16,
        **more,
    }
    found: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        found.append("--" + name.replace("_", "-"))
        if value is not True:
            found += str(value).split()
    return found


def job(**more: Any) -> Job:
    return parse_job(words(**more))


def facts(megatron: str = "0.19.2", *, engine: bool = True) -> Facts:
    return Facts(megatron=megatron, transformer_engine=engine, fused_norms=engine)


def kind(name: str = "gpu", *, memory_gib: float = 16, tflops: float = 100) -> DeviceKind:
    return DeviceKind(
        name=name,
        vendor="test",
        platform="cuda",
        memory_bytes=int(memory_gib * GIB),
        peak_flops={"bf16": tflops * 1e12},
        memory_bandwidth_bytes_per_s=1e12,
    )


def cluster(*nodes: tuple[str, int], kinds: list[DeviceKind] | None = None) -> Cluster:
    """Return a cluster of (kind name, devices) nodes."""
    known = {item.name: item for item in kinds or [kind()]}
    return Cluster(
        name="test",
        nodes=tuple(
            Node(name=f"n{i}", device_kind=name, num_devices=count)
            for i, (name, count) in enumerate(nodes)
        ),
        kinds=known,
        intra_node={name: Link(bandwidth_bytes_per_s=100e9, latency_s=5e-6) for name in known},
    )
