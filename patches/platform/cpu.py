"""Make the CPU answer for ``torch.cuda``, so that unedited Megatron-LM trains without a GPU.

Megatron asks ``torch.cuda`` unconditionally for devices, streams, events, random states, memory
figures and type strings. Each name below answers for the CPU with the meaning that Megatron relies
on: streams and synchronisation are empty because CPU operators run in order, events hold clock
readings, the random state is the CPU generator's, memory figures come from the tracker in
:mod:`megatron_memx.patches.platform.memory` where it runs.

Every replaced attribute is remembered, so that :func:`uninstall` puts torch back as it was.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform as host_platform
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor as_tensor asarray empty empty_like empty_strided zeros zeros_like ones ones_like full "
    "full_like rand rand_like randn randn_like randint randint_like randperm arange linspace eye "
    "tril_indices triu_indices scalar_tensor"
).split()
_NEW_METHODS = ["new_tensor", "new_empty", "new_zeros", "new_ones", "new_full"]
_TENSOR_TYPES = [
    "FloatTensor",
    "HalfTensor",
    "BFloat16Tensor",
    "DoubleTensor",
    "IntTensor",
    "LongTensor",
]
_replaced: list[tuple[Any, str, Any]] = []
_MISSING = object()


class Stream:
    """A stream of a device whose operators run in order: every wait is already over."""

    cuda_stream = 0
    device = _CPU
    device_index = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def wait_stream(self, _stream: Any) -> None:
        """Return at once."""

    def wait_event(self, _event: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: nothing is ever pending."""
        return True

    def record_event(self, event: Any = None) -> Event:
        """Return an event that holds the time now."""
        made: Event = Event() if event is None else event
        made.record(self)
        return made

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass


class Event:
    """An event that holds a clock reading; ``elapsed_time`` is in milliseconds, as on CUDA."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.time_s = 0.0

    def record(self, _stream: Any = None) -> None:
        """Store the time now."""
        self.time_s = time.perf_counter()

    def wait(self, _stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds from this event to ``end``."""
        return (end.time_s - self.time_s) * 1e3


class _Generators(tuple[torch.Generator, ...]):
    """One generator whatever the index: Megatron asks with ``current_device()``."""

    def __getitem__(self, _index: Any) -> Any:
        return tuple.__getitem__(self, 0)


_STREAM = Stream()


@contextlib.contextmanager
def _stream_context(stream: Any) -> Iterator[Any]:
    yield stream


def _is_cuda(device: Any) -> bool:
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, owner.__dict__.get(name, _MISSING)))
    setattr(owner, name, value)


def _distinct(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a new function object: torch's compiler refuses one object under two names."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _with_cpu_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original`` with ``device="cuda"`` (or an index) and pinning taken out."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return call


def _without_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Tensor.to`` or ``Module.to`` with a CUDA device read as the CPU."""

    @functools.wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return original(self, *args, **kwargs)

    return to


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Answer as for a CUDA tensor: gradient clipping and the optimizers compare these strings."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is None:
            text: str = original(self)
            return text.replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original(self, dtype, **kwargs)

    return type_


def _cuda(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    return self


def _properties(*_a: Any, **_k: Any) -> Any:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return types.SimpleNamespace(
        name=_device_name(),
        major=8,
        minor=0,
        total_memory=total,
        multi_processor_count=os.cpu_count() or 1,
        uuid="cpu",
    )


def _device_name(*_a: Any, **_k: Any) -> str:
    return f"cpu ({host_platform.machine()})"


def _memory_stats(*_a: Any, **_k: Any) -> dict[str, int]:
    from megatron_memx.patches.platform.memory import current_bytes, peak_bytes

    return {
        "allocated_bytes.all.current": current_bytes(),
        "allocated_bytes.all.peak": peak_bytes(),
        "reserved_bytes.all.current": current_bytes(),
        "reserved_bytes.all.peak": peak_bytes(),
        "allocation.all.current": 0,
        "allocated_bytes.all.allocated": 0,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _cuda_surface() -> dict[str, Any]:
    from megatron_memx.patches.platform import memory

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def set_rng_state(state: torch.Tensor, *_a: Any, **_k: Any) -> None:
        torch.random.default_generator.set_state(state)

    def run(call: Callable[[], Any], **_kwargs: Any) -> None:
        call()

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": nothing,
        "_lazy_init": nothing,
        "_lazy_call": run,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "current_device": lambda: _CPU,
        "set_device": nothing,
        "device": lambda *_a, **_k: contextlib.nullcontext(),
        "synchronize": nothing,
        "get_device_properties": _properties,
        "get_device_name": _device_name,
        "get_device_capability": lambda *_a, **_k: (8, 0),
        "get_arch_list": list,
        "is_bf16_supported": lambda *_a, **_k: True,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "stream": _stream_context,
        "StreamContext": _stream_context,
        "set_stream": nothing,
        "current_stream": lambda *_a, **_k: _STREAM,
        "default_stream": lambda *_a, **_k: _STREAM,
        "current_blas_handle": lambda: 0,
        "get_rng_state": lambda *_a, **_k: torch.random.default_generator.get_state(),
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [torch.random.default_generator.get_state()],
        "set_rng_state_all": lambda states: set_rng_state(states[0]),
        "manual_seed": torch.random.default_generator.manual_seed,
        "manual_seed_all": torch.random.default_generator.manual_seed,
        "initial_seed": torch.random.default_generator.initial_seed,
        "default_generators": _Generators((torch.random.default_generator,)),
        "empty_cache": nothing,
        "ipc_collect": nothing,
        "memory_allocated": lambda *_a, **_k: memory.current_bytes(),
        "memory_reserved": lambda *_a, **_k: memory.current_bytes(),
        "max_memory_allocated": lambda *_a, **_k: memory.peak_bytes(),
        "max_memory_reserved": lambda *_a, **_k: memory.peak_bytes(),
        "reset_peak_memory_stats": lambda *_a, **_k: memory.reset_peak(),
        "reset_max_memory_allocated": lambda *_a, **_k: memory.reset_peak(),
        "memory_stats": _memory_stats,
        "memory_summary": lambda *_a, **_k: "memory of the CPU is not managed by an allocator",
        "mem_get_info": lambda *_a, **_k: _free_and_total_bytes(),
        "device_memory_used": lambda *_a, **_k: memory.current_bytes(),
        "is_current_stream_capturing": lambda: False,
    }


def _free_and_total_bytes() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def _not_about_generators(record: logging.LogRecord) -> bool:
    # CPU and "GPU" generators are one here, so that Megatron's warning is true and means nothing.
    return "CPU RNG state changed" not in record.getMessage()


def install() -> None:
    """Replace the ``torch.cuda`` surface; a second call does nothing."""
    if _replaced:
        return
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_about_generators)
    for name, value in _cuda_surface().items():
        plain = isinstance(value, (type, tuple)) or not callable(value)
        # Some callers go through the module that defines the name, as torch.cuda.random.
        for owner in (torch.cuda, torch.cuda.random, torch.cuda.memory):
            if owner is torch.cuda or name in vars(owner):
                _replace(owner, name, value if plain else _distinct(value))
    for name in _TENSOR_TYPES:
        _replace(torch.cuda, name, getattr(torch, name))
    for name in _FACTORIES:
        _replace(torch, name, _with_cpu_device(getattr(torch, name)))
    for name in _NEW_METHODS:
        _replace(torch.Tensor, name, _with_cpu_device(getattr(torch.Tensor, name)))
    _replace(torch.Tensor, "to", _without_cuda(torch.Tensor.to))
    _replace(torch.Tensor, "type", _tensor_type(torch.Tensor.type))
    _replace(torch.Tensor, "cuda", _distinct(_cuda))
    _replace(torch.Tensor, "pin_memory", _distinct(_cuda))
    _replace(torch.Tensor, "record_stream", lambda *_a, **_k: None)
    _replace(torch.nn.Module, "cuda", _distinct(_cuda))
    _replace(torch.nn.Module, "to", _without_cuda(torch.nn.Module.to))
    _replace(torch.cuda.nvtx, "range_push", lambda *_a, **_k: 0)
    _replace(torch.cuda.nvtx, "range_pop", lambda *_a, **_k: 0)
    _replace(torch.accelerator, "is_available", lambda: False)
    _replace(torch.accelerator, "current_accelerator", lambda *_a, **_k: _CPU)
    _replace(torch.accelerator, "device_count", _distinct(torch.cuda.device_count))
    _replace(torch.accelerator, "synchronize", lambda *_a, **_k: None)


def uninstall() -> None:
    """Put every replaced attribute back."""
    logging.getLogger("megatron.core.tensor_parallel.random").removeFilter(_not_about_generators)
    while _replaced:
        owner, name, value = _replaced.pop()
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
