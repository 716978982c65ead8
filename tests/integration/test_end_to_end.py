"""The whole thread, small: measured, planned, trained, compared; then reused from the cache."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import ROOT, TINY_MODEL, TINY_TRAINING, memx_torchrun

pytestmark = pytest.mark.megatron
SCRIPT = str(ROOT / "examples" / "pretrain_gpt.py")
WORDS = [
    *("--nproc-per-node", "2", SCRIPT, "--auto-parallel", "--memx-platform", "cpu"),
    *("--pipeline-model-parallel-size", "2", *TINY_MODEL, *TINY_TRAINING),
    *("--micro-batch-size", "1", "--train-iters", "6"),
]


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"lm loss: ([0-9.E+-]+)", text)]


def test_profile_plan_train_and_reuse(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    first = memx_torchrun(*WORDS, "--memx-save-plan", str(saved), timeout_s=240)
    assert first.code == 0, first.text[-4000:]
    assert "MemX profile:" in first.err
    assert "planned now" in first.out
    assert "measured" in first.out
    assert len(losses(first.text)) == 6
    plan = json.loads(saved.read_text())
    assert plan["pins"] == {"pipeline_model_parallel_size": 2, "micro_batch_size": 1}
    assert "measured units" in plan["prediction"]["basis"]
    for stage in plan["stages"]:
        said = stage["prediction"]
        assert said["peak_memory_bytes"] < said["capacity_bytes"]
    (run_dir,) = (tmp_path / "memx-cache" / "runs").iterdir()
    for rank, stage in enumerate(plan["stages"]):
        steps = json.loads((run_dir / f"rank_{rank}.json").read_text())["steps"]
        peak = max(step["peak_allocated_bytes"] or 0 for step in steps)
        # A model of this size is mostly what no formula counts: the loop's own tensors.
        assert abs(stage["prediction"]["peak_memory_bytes"] / peak - 1) < 0.2
    second = memx_torchrun(*WORDS, timeout_s=120)
    assert second.code == 0, second.text[-4000:]
    assert "reused the cached plan" in second.out
    assert "MemX profile:" not in second.err
    assert losses(second.text) == losses(first.text)
    other = memx_torchrun(*WORDS, "--seq-length", "16", "--memx-dry-run", timeout_s=60)
    assert other.code == 0, other.text[-2000:]
    # Field report 30: another sequence is a miss, and the difference is named.
    assert "seq_length is 16, was 32" in other.out
    assert "no rank was started" in other.out


def test_dry_run_starts_nothing_and_shows_the_command(tmp_path: Path) -> None:
    done = memx_torchrun(*WORDS, "--memx-dry-run", "--memx-profile", "never", timeout_s=60)
    assert done.code == 0, done.text
    assert "--pipeline-model-parallel-layout" in done.out
    assert "no rank was started" in done.out
    assert losses(done.text) == []
