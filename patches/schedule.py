"""Seam: the pipeline scheduler. Time and peak memory of this rank's part of every step.

Megatron's three schedules call ``schedules.forward_step`` and ``backward_step`` and send and
receive through ``P2PCommunicator._communicate``; all are wrapped. On the CPU a clock is read; on
an accelerator event pairs are recorded, without synchronising, and read after the step. Raw losses
and gradient norms of each step are kept as well, because Megatron's second printed loss of a
process is the mean of its first two.

Each rank writes ``rank_<r>.json`` into the run folder; nothing is sent between ranks. Without a run
folder the patch is not applied and costs nothing.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_memx.patches.registry import Context, Patch, Replacer, fired

# Where the allocator does not count, tracking memory slows a step: these steps only (from 1). The
# second step is the first that begins with the optimizer's states in place.
TRACKED_STEPS = (3,)
KEPT_STEPS = 200
_PARTS = ("forward_s", "backward_s", "p2p_s")


class _Clock:
    """Adds up the durations of one part of a step."""

    def __init__(self, on_device: bool) -> None:
        self._on_device = on_device
        self._pairs: list[tuple[Any, Any]] = []
        self._total_s = 0.0
        self.calls = 0
        self.enabled = True

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.enabled:
            return function(*args, **kwargs)
        self.calls += 1
        if not self._on_device:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._total_s += time.perf_counter() - start
        import torch

        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        try:
            return function(*args, **kwargs)
        finally:
            end.record()
            self._pairs.append((begin, end))

    def take_s(self) -> float:
        """Return the seconds since the last call; the device must have finished the step."""
        total = self._total_s
        for begin, end in self._pairs:
            end.synchronize()
            total += begin.elapsed_time(end) / 1e3
        self._total_s = 0.0
        self._pairs.clear()
        return total


class Recorder:
    """Collects the steps of this rank and writes them out."""

    def __init__(self, run_dir: str, platform: str | None) -> None:
        self._on_device = platform != "cpu"
        self._platform = platform or "cuda"
        self.clocks = {part: _Clock(self._on_device) for part in _PARTS}
        self.steps: list[dict[str, Any]] = []
        self._count = 0
        rank = int(os.environ.get("RANK", "0"))
        self._path = Path(run_dir) / f"rank_{rank}.json"
        self._rank = rank

    def step(self, train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one training step and record it."""
        import torch

        self._count += 1
        tracked = not self._on_device and self._count in TRACKED_STEPS
        if self._count > KEPT_STEPS:
            for clock in self.clocks.values():
                clock.enabled = False
            return train_step(*args, **kwargs)
        for clock in self.clocks.values():
            clock.take_s()
        if self._on_device:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        peak: int | None
        if tracked:
            from megatron_memx.patches.platform.memory import StorageTracker

            with StorageTracker() as tracker:
                result = train_step(*args, **kwargs)
                peak = tracker.peak_bytes
        else:
            result = train_step(*args, **kwargs)
            peak = torch.cuda.max_memory_allocated() if self._on_device else None
        elapsed = time.perf_counter() - start
        entry: dict[str, Any] = {"iteration": self._count, "step_s": elapsed}
        entry.update({part: clock.take_s() for part, clock in self.clocks.items()})
        entry["memory_tracked"] = tracked
        entry["peak_allocated_bytes"] = peak
        if self._on_device:
            entry["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        entry["losses"], entry["grad_norm"] = _results(result)
        self.steps.append(entry)
        fired("schedule")
        return result

    def write(self) -> None:
        """Write what was recorded by atomic replace; a rank that stepped never writes nothing."""
        if not self.steps:
            return
        from megatron_memx.patches.registry import report

        data = {
            "schema": 1,
            "rank": self._rank,
            "pipeline_rank": _pipeline_rank(),
            "platform": self._platform,
            "calls": {part: clock.calls for part, clock in self.clocks.items()},
            "steps": self.steps,
            "patches": report(),
        }
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(data), encoding="utf-8")
        os.replace(temporary, self._path)


def _pipeline_rank() -> int:
    try:
        from megatron.core import parallel_state

        rank = int(parallel_state.get_pipeline_model_parallel_rank())
        _last_pipeline_rank[0] = rank
        return rank
    except (AssertionError, RuntimeError, ValueError):
        return _last_pipeline_rank[0]  # groups are gone at exit


_last_pipeline_rank = [0]


def _results(result: Any) -> tuple[dict[str, list[float]], float | None]:
    """Return the raw losses (empty except on the last stage) and the gradient norm."""
    losses = {
        str(name): [float(item) for item in value.detach().double().flatten()]
        for name, value in result[0].items()
        if hasattr(value, "detach")
    }
    norm = result[5]
    return losses, None if norm is None else float(norm)


def _apply(context: Context, replacer: Replacer) -> None:
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.training import training

    assert context.run_dir is not None
    recorder = Recorder(context.run_dir, context.platform)

    def timed(original: Any, part: str) -> Any:
        clock = recorder.clocks[part]

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return clock.run(original, *args, **kwargs)

        return call

    original_step = training.train_step

    @functools.wraps(original_step)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        result = recorder.step(original_step, *args, **kwargs)
        if len(recorder.steps) in (5, 20, 80):
            recorder.write()
        return result

    replacer.replace(schedules, "forward_step", timed(schedules.forward_step, "forward_s"))
    replacer.replace(schedules, "backward_step", timed(schedules.backward_step, "backward_s"))
    replacer.replace(P2PCommunicator, "_communicate", timed(P2PCommunicator._communicate, "p2p_s"))
    replacer.replace(training, "train_step", train_step)
    atexit.register(recorder.write)


def _needed(context: Context) -> str | None:
    return None if context.run_dir is not None else "nothing is measured without a run folder"


PATCH = Patch(
    id="schedule",
    why="time and peak memory of each stage in each step",
    targets=(
        "megatron.core.pipeline_parallel.schedules:forward_step",
        "megatron.core.pipeline_parallel.schedules:backward_step",
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
        "megatron.training.training:train_step",
    ),
    needed=_needed,
    apply=_apply,
)
