"""Platforms: what differs between accelerators, as a table; the only place that names vendors.

``prepare_environment`` is called before torch is imported, ``default_words`` when Megatron parses
its arguments; the shims themselves are in :mod:`megatron_memx.patches.platform`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from megatron_memx.errors import BadInputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """One kind of accelerator as torch and Megatron see it.

    Args:
        name: Name of the platform, as ``--memx-platform`` takes it.
        backend: Name of its collectives in ``torch.distributed``.
        visible_devices_variable: Environment variable that selects devices; None: none.
        timeout_variable: Environment variable of its collectives' time-out; None: none.
        package: torch plug-in that must be importable; None: part of torch.
    """

    name: str
    backend: str
    visible_devices_variable: str | None
    timeout_variable: str | None
    package: str | None


PLATFORMS = {
    item.name: item
    for item in (
        Platform(
            name="cuda",
            backend="nccl",
            visible_devices_variable="CUDA_VISIBLE_DEVICES",
            timeout_variable="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
            package=None,
        ),
        Platform(
            name="rocm",
            backend="nccl",
            visible_devices_variable="HIP_VISIBLE_DEVICES",
            timeout_variable="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
            package=None,
        ),
        Platform(
            name="npu",
            backend="hccl",
            visible_devices_variable="ASCEND_RT_VISIBLE_DEVICES",
            timeout_variable="HCCL_CONNECT_TIMEOUT",
            package="torch_npu",
        ),
        Platform(
            name="musa",
            backend="mccl",
            visible_devices_variable="MUSA_VISIBLE_DEVICES",
            timeout_variable=None,
            package="torch_musa",
        ),
        Platform(
            name="maca",
            backend="nccl",
            visible_devices_variable="CUDA_VISIBLE_DEVICES",
            timeout_variable=None,
            package=None,
        ),
        Platform(
            name="xpu",
            backend="xccl",
            visible_devices_variable="ZE_AFFINITY_MASK",
            timeout_variable=None,
            package=None,
        ),
        Platform(
            name="cpu",
            backend="gloo",
            visible_devices_variable=None,
            timeout_variable=None,
            package=None,
        ),
    )
}

# Without an accelerator Megatron needs its local layers and none of the GPU's fused kernels.
_CPU_WORDS: tuple[tuple[str, ...], ...] = (
    ("--transformer-impl", "local"),
    ("--attention-backend", "unfused"),
    ("--distributed-backend", "gloo"),
    ("--no-persist-layer-norm",),
    ("--no-gradient-accumulation-fusion",),
    ("--no-masked-softmax-fusion",),
    ("--no-bias-gelu-fusion",),
    ("--no-bias-swiglu-fusion",),
    ("--no-bias-dropout-fusion",),
    ("--no-rope-fusion",),
)
_CPU_ENVIRONMENT = {
    # Megatron's fused functions are compiled at import; the flag for it comes too late.
    "TORCHDYNAMO_DISABLE": "1",
    # Megatron asserts on it for tp > 1 on older devices.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
}


def get(name: str) -> Platform:
    """Return a platform by name.

    Raises:
        BadInputError: No such platform; the nearest names are given.
    """
    if name not in PLATFORMS:
        near = difflib.get_close_matches(name, PLATFORMS, n=1)
        raise BadInputError(
            f"platform {name!r} is unknown",
            fix=near[0] if near else ", ".join(PLATFORMS),
            flag="--memx-platform",
        )
    return PLATFORMS[name]


def prepare_environment(name: str, environment: MutableMapping[str, str] | None = None) -> None:
    """Set the variables that must stand before torch is imported; the user's own win."""
    get(name)
    target = os.environ if environment is None else environment
    if name == "cpu":
        for variable, value in _CPU_ENVIRONMENT.items():
            target.setdefault(variable, value)


def default_words(name: str, typed: Sequence[str]) -> list[str]:
    """Return the Megatron flags that the platform needs and the user did not write.

    Raises:
        BadInputError: The user wrote a value that the platform cannot run.
    """
    if name != "cpu":
        return []
    words: list[str] = []
    given: dict[str, str] = {}
    for index, word in enumerate(typed):
        flag, sign, value = word.partition("=")
        given[flag] = value if sign else (typed[index + 1] if index + 1 < len(typed) else "")
    for flag, *values in _CPU_WORDS:
        if flag not in given:
            words += [flag, *values]
        elif values and given[flag] != values[0]:
            raise BadInputError(
                f"{flag} {given[flag]} cannot run with --memx-platform cpu",
                fix=f"{flag} {values[0]}, or leave it out",
                flag=flag,
            )
    return words
