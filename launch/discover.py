"""Which accelerators this node has, asked without importing torch."""

from __future__ import annotations

import importlib.util
import os
import platform as host_platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_memx.cluster import Cluster, DeviceKind, Node
from megatron_memx.cluster_file import catalogue, catalogue_link
from megatron_memx.errors import BadInputError
from megatron_memx.platforms import get
from megatron_memx.units import MIB

_QUERY_TIMEOUT_S = 20.0
# A core with 256-bit fused multiply-add does 16 single-precision operations a cycle; how far that
# is from the truth here, the profile tells.
_FLOPS_PER_CYCLE = 16
_ASSUMED_HZ = 2.5e9
_ASSUMED_HOST_BYTES_PER_S = 20e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A device that a query tool reported."""

    name: str
    memory_bytes: int
    free_bytes: int


def local_cluster(
    *, platform: str | None, num_nodes: int, nproc: int | None
) -> tuple[Cluster, list[str]]:
    """Return the cluster that this node implies, and notes about it.

    Args:
        platform: ``--memx-platform``, or None: what is found.
        num_nodes: Nodes of the job; all are taken to be like this one.
        nproc: Ranks to start on each node; None: one a device.

    Raises:
        BadInputError: No device is found, fewer than ranks, or several kinds on one node.
    """
    if platform == "cpu":
        count = nproc or os.cpu_count() or 1
        kind = cpu_kind(count)
        return _cluster(kind, num_nodes, count), []
    if platform not in (None, "cuda"):
        raise BadInputError(
            f"devices of platform {platform} cannot be asked yet",
            fix="describe them in a cluster file",
            flag="--memx-cluster",
        )
    devices = visible(nvidia_devices(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not devices:
        raise BadInputError(
            "no accelerator was found on this node (nvidia-smi reports none)",
            fix="--memx-platform cpu to train on the CPU, or --memx-cluster FILE for other devices",
            flag="--memx-platform",
        )
    ranks = nproc or len(devices)
    if ranks > len(devices):
        raise BadInputError(
            f"{ranks} ranks a node are launched, {len(devices)} devices are visible "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}) and the "
            f"plan would need {ranks * num_nodes} in all",
            fix=f"--nproc-per-node {len(devices)}",
            flag="--nproc-per-node",
        )
    used = devices[:ranks]
    names = sorted({device.name for device in used})
    if len(names) > 1:
        raise BadInputError(
            f"this node has devices of several kinds: {', '.join(names)}",
            fix="describe the nodes in a cluster file",
            flag="--memx-cluster",
        )
    notes = []
    if ranks < len(devices):
        notes.append(f"{len(devices) - ranks} of {len(devices)} devices stay unused")
    return _cluster(nvidia_kind(used), num_nodes, ranks), notes


def require_here(platform: str) -> None:
    """Refuse to start ranks on a platform that this host cannot run; planning needs none of it.

    Raises:
        BadInputError: Names what is missing.
    """
    package = get(platform).package
    if package is not None and importlib.util.find_spec(package) is None:
        raise BadInputError(
            f"platform {platform} needs {package}, which is not installed; planning works without "
            "it, launching does not",
            fix=f"install {package} for your torch, or --memx-dry-run",
            flag="--memx-platform",
        )
    if platform == "cuda" and not nvidia_devices():
        raise BadInputError(
            "the plan is for cuda devices, and nvidia-smi reports none on this host",
            fix="start on the cluster, --memx-dry-run to plan here, or --memx-platform cpu",
            flag="--memx-platform",
        )


def _cluster(kind: DeviceKind, num_nodes: int, count: int) -> Cluster:
    link = catalogue_link(kind.name)
    return Cluster(
        name="found",
        nodes=tuple(
            Node(name=f"node{i}", device_kind=kind.name, num_devices=count)
            for i in range(num_nodes)
        ),
        kinds={kind.name: kind},
        intra_node={kind.name: link} if link else {},
    )


def cpu_kind(count: int) -> DeviceKind:
    """Return this host's CPU as ``count`` devices that share its cores and memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0))
    rate = cores / count * _FLOPS_PER_CYCLE * _clock_hz()
    return DeviceKind(
        name="cpu",
        vendor=host_platform.machine(),
        platform="cpu",
        memory_bytes=total // count // MIB * MIB,
        peak_flops={"fp32": rate, "bf16": rate / 2, "fp16": rate / 2},
        memory_bandwidth_bytes_per_s=_ASSUMED_HOST_BYTES_PER_S / count,
        source=f"{cores} cores of this host; rates estimated from its clock",
    )


def _clock_hz() -> float:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return _ASSUMED_HZ
    # The rated clock in the model's name does not change from run to run; the current one does.
    match = re.search(r"@ ([0-9.]+)GHz", text)
    return float(match.group(1)) * 1e9 if match else _ASSUMED_HZ


def nvidia_devices() -> list[Found]:
    """Return the devices that nvidia-smi reports; none where there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [
        tool,
        "--query-gpu=name,memory.total,memory.free",
        "--format=csv,noheader,nounits",
    ]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in output.splitlines():
        parts = [part.strip() for part in line.rsplit(",", 2)]
        if len(parts) == 3 and parts[1].isdigit() and parts[2].isdigit():
            found.append(
                Found(
                    name=parts[0],
                    memory_bytes=int(parts[1]) * MIB,
                    free_bytes=int(parts[2]) * MIB,
                )
            )
    return found


def visible(devices: Sequence[Found], setting: str | None) -> list[Found]:
    """Return the devices that CUDA_VISIBLE_DEVICES leaves, in its order."""
    if setting is None:
        return list(devices)
    chosen = []
    for item in setting.split(","):
        text = item.strip()
        if text.isdigit() and int(text) < len(devices):
            chosen.append(devices[int(text)])
        elif text.startswith(("GPU-", "MIG-")) and devices:
            chosen.append(devices[len(chosen) % len(devices)])
        else:
            break  # CUDA stops at the first entry that it does not know
    return chosen


def nvidia_kind(devices: Sequence[Found]) -> DeviceKind:
    """Return the kind of equal devices, with the least free memory of any."""
    first = devices[0]
    name = catalogue_name(first.name, first.memory_bytes)
    known = catalogue().get(name) if name else None
    if known is None:
        raise BadInputError(
            f"{first.name} is not in the device catalogue",
            fix="describe it under devices: in a cluster file",
            flag="--memx-cluster",
        )
    return DeviceKind(
        name=known.name,
        vendor=known.vendor,
        platform=known.platform,
        memory_bytes=first.memory_bytes,
        peak_flops=known.peak_flops,
        memory_bandwidth_bytes_per_s=known.memory_bandwidth_bytes_per_s,
        free_bytes=min(device.free_bytes for device in devices),
        matmul_efficiency=known.matmul_efficiency,
        source=f"nvidia-smi: {first.name}",
    )


def catalogue_name(reported: str, memory_bytes: int) -> str | None:
    """Return the catalogue's name for a reported device: words in common, nearest memory."""
    words = set(re.split(r"[^a-z0-9]+", reported.lower()))
    best: tuple[int, float, str] | None = None
    for name, kind in catalogue().items():
        parts = set(name.split("-"))
        model = name.split("-")[0]
        if model not in words and name.replace("-", " ") not in reported.lower():
            continue
        rank = (
            -len(parts & words),
            abs(kind.memory_bytes - memory_bytes) / memory_bytes,
            name,
        )
        if best is None or rank < best:
            best = rank
    return best[2] if best else None
