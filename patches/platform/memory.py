"""Peak memory on a platform without an allocator that counts: the bytes of live storages.

While a :class:`StorageTracker` runs, every storage that an operator makes is counted when it is
made and discounted when it is freed (a weak reference to the storage, which torch keeps one Python
object for). Storages that lived before are found by one walk over the garbage collector's objects.
The figure is exact and repeatable, and means what ``torch.cuda.max_memory_allocated`` means apart
from the allocator's rounding. Each operator costs some microseconds, so track few steps.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_active: StorageTracker | None = None
_last_current = 0
_last_peak = 0


class StorageTracker(TorchDispatchMode):
    """Counts the bytes of live storages while it is entered.

    Attributes:
        current_bytes: Bytes of the storages alive now.
        peak_bytes: Most bytes alive since it was entered or :meth:`reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current_bytes = 0
        self.peak_bytes = 0
        self._inside = False
        self._sizes: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __enter__(self) -> StorageTracker:
        global _active
        for thing in gc.get_objects():
            if type(thing) in (torch.Tensor, torch.nn.Parameter):
                self._see(thing)
        self.peak_bytes = self.current_bytes
        _active = self
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        global _active, _last_current, _last_peak
        super().__exit__(*exc)
        _last_current, _last_peak = self.current_bytes, self.peak_bytes
        _active = None
        self._sizes.clear()

    def reset_peak(self) -> None:
        """Start a new peak at the bytes alive now."""
        self.peak_bytes = self.current_bytes

    @staticmethod
    @contextlib.contextmanager
    def one_kernel() -> Iterator[None]:
        """Count what is made inside only if it outlives the block, as of one fused kernel."""
        tracker = _active
        if tracker is None or tracker._inside:
            yield
            return
        tracker._inside, before = True, tracker.peak_bytes
        try:
            yield
        finally:
            tracker._inside = False
            tracker.peak_bytes = max(before, tracker.current_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, torch.Tensor):
                self._see(item)
        if func._schema.is_mutable and args:
            # resize_ and set_ change a storage that is counted already.
            for item in args:
                if isinstance(item, torch.Tensor):
                    self._see(item)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return  # sparse and functional tensors have no storage of their own
        size = storage.nbytes()
        key = storage._cdata
        known = self._sizes.get(key)
        if known is not None and known[0]() is storage:
            if known[1] != size:
                self._sizes[key] = (known[0], size)
                self._add(size - known[1])
            return
        tracker = weakref.ref(self)

        def forget(reference: Any) -> None:
            owner = tracker()
            entry = owner._sizes.get(key) if owner is not None else None
            if owner is not None and entry is not None and entry[0] is reference:
                del owner._sizes[key]
                owner.current_bytes -= entry[1]

        self._sizes[key] = (weakref.ref(storage, forget), size)
        self._add(size)

    def _add(self, size: int) -> None:
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)


def current_bytes() -> int:
    """Bytes alive now under the running tracker, else when the last one ended (0: never ran)."""
    return _active.current_bytes if _active is not None else _last_current


def peak_bytes() -> int:
    """Most bytes alive under the running tracker, else under the last one (0: never ran)."""
    return _active.peak_bytes if _active is not None else _last_peak


def reset_peak() -> None:
    """Start a new peak, if a tracker runs."""
    if _active is not None:
        _active.reset_peak()
