"""The recorder of steps: what it keeps, what it writes, and that it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from megatron_memx.patches.platform.memory import StorageTracker
from megatron_memx.patches.schedule import KEPT_STEPS, TRACKED_STEPS, Recorder


def train_step() -> tuple[Any, ...]:
    return {"lm loss": torch.tensor([3.5])}, 0, None, None, 0, 1.25, None


def test_steps_are_kept_up_to_a_number_and_then_cost_nothing(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path), "cpu")
    clock = recorder.clocks["forward_s"]
    for _ in range(KEPT_STEPS + 3):
        recorder.step(lambda: clock.run(train_step))
    recorder.write()
    data = json.loads((tmp_path / "rank_0.json").read_text())
    assert len(data["steps"]) == KEPT_STEPS
    # The step that finds the number reached is the last that its clock sees.
    assert clock.calls == KEPT_STEPS
    assert not clock.enabled
    first = data["steps"][0]
    assert first["losses"] == {"lm loss": [3.5]}
    assert first["grad_norm"] == 1.25
    assert 0 < first["forward_s"] <= first["step_s"]
    tracked = [step["iteration"] for step in data["steps"] if step["memory_tracked"]]
    assert tracked == list(TRACKED_STEPS)


def test_a_rank_that_never_stepped_writes_nothing(tmp_path: Path) -> None:
    Recorder(str(tmp_path), "cpu").write()
    assert list(tmp_path.iterdir()) == []


def test_the_tracker_counts_storages_once_and_forgets_them() -> None:
    kept = torch.zeros(1000)
    with StorageTracker() as tracker:
        base = tracker.current_bytes
        one = torch.zeros(256)
        view = one.view(16, 16)
        assert tracker.current_bytes - base == 1024
        two = view + 1
        assert tracker.current_bytes - base == 2048
        del one
        assert tracker.current_bytes - base == 2048  # the view holds it
        del view, two
        assert tracker.current_bytes == base
        assert tracker.peak_bytes - base == 2048
        tracker.reset_peak()
        assert tracker.peak_bytes == base
    assert base >= kept.numel() * 4
