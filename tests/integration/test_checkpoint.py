"""A checkpoint of one plan goes on under another: the same losses, the same state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL, TINY_TRAINING, memx_torchrun
from runs import NONE, SCRIPT, SELECTIVE, Run, block, plan_for, run_plan, run_stock

from megatron_memx.plan import Plan

pytestmark = pytest.mark.megatron
WORDS = [
    *TINY_MODEL,
    *TINY_TRAINING,
    *("--hidden-dropout", "0", "--attention-dropout", "0", "--train-iters", "6"),
]
STEPS_AT_SAVE = 3
# Sizes that fill no bucket to a multiple of 128: Megatron pads between buckets then.
WORDS[WORDS.index("--hidden-size") + 1] = "40"


def assembled(folder: Path) -> dict[str, dict[str, Any]]:
    """Return name -> whole parameter and moments, put together from all ranks' pieces."""
    import torch

    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("state_*.pt")):
        for piece in torch.load(file):
            entry = found.setdefault(piece["name"], {"steps": set()})
            entry["steps"].add(piece["step"])
            for key in ("param", "exp_avg", "exp_avg_sq"):
                whole = entry.setdefault(key, torch.full((piece["numel"],), float("nan")))
                whole[piece["start"] : piece["end"]] = piece[key]
    return found


def same_state(before: Path, after: Path) -> None:
    """Every tensor that both hold is equal, and complete."""
    import torch

    left, right = assembled(before), assembled(after)
    common = left.keys() & right.keys()
    assert len(common) > 40
    assert {name.partition(".layers.")[2][:1] for name in common} >= {"1", "2", "3", "4"}
    assert "embedding.word_embeddings.weight" in common
    for name in common:
        assert left[name]["steps"] == right[name]["steps"] == {float(STEPS_AT_SAVE)}, name
        for key in ("param", "exp_avg", "exp_avg_sq"):
            assert not torch.isnan(left[name][key]).any()
            assert torch.equal(left[name][key], right[name][key]), f"{name} {key}"


def save(plan: Plan, folder: Path, *more: str) -> Run:
    return run_plan(
        plan,
        folder,
        *("--save", str(folder / "checkpoint"), "--save-interval", str(STEPS_AT_SAVE)),
        *more,
        model=WORDS,
        env={"TEST_DUMP_STATE": str(STEPS_AT_SAVE)},
    )


def resume(plan: Plan, folder: Path, checkpoint: Path, *more: str) -> Run:
    tracker = checkpoint / "latest_checkpointed_iteration.txt"
    tracker.write_text(str(STEPS_AT_SAVE))
    return run_plan(
        plan,
        folder,
        *("--load", str(checkpoint)),
        *more,
        model=WORDS,
        env={"TEST_DUMP_STATE": "start"},
    )


def losses(run: Run) -> list[float]:
    found = []
    for step in run.steps:
        (values,) = step["losses"].values()
        found.append(float.fromhex(values[0]))
    return found


def test_plain_optimizer_under_another_split_and_recompute(tmp_path: Path) -> None:
    first = plan_for([[3], [1]], WORDS, recompute=[[block(2)], [NONE]])
    second = plan_for([[1], [3]], WORDS, recompute=[[NONE], [SELECTIVE]])
    whole = save(first, tmp_path / "a")
    checkpoint = tmp_path / "a" / "checkpoint"
    stamp = json.loads((checkpoint / "iter_0000003" / "memx_plan.json").read_text())
    assert stamp["layout"] == "Ettt|tL"
    again = resume(second, tmp_path / "b", checkpoint)
    same_state(tmp_path / "a", tmp_path / "b")
    assert losses(again) == pytest.approx(losses(whole)[STEPS_AT_SAVE:], rel=1e-6)


def test_distributed_optimizer_with_several_buckets(tmp_path: Path) -> None:
    """Saved on two stages, whose tied embedding is a bucket of its own; resumed on two replicas."""
    first = plan_for(
        [[3], [1]], WORDS, use_distributed_optimizer=True, recompute=[[block(1)], [NONE]]
    )
    second = plan_for([[4]], WORDS, data_parallel_size=2, use_distributed_optimizer=True)
    whole = save(first, tmp_path / "a", "--dist-ckpt-optim-fully-reshardable")
    assert "data corruption" not in whole.finished.text
    again = resume(
        second,
        tmp_path / "b",
        tmp_path / "a" / "checkpoint",
        "--dist-ckpt-optim-fully-reshardable",
    )
    same_state(tmp_path / "a", tmp_path / "b")
    assert losses(again) == pytest.approx(losses(whole)[STEPS_AT_SAVE:], rel=1e-6)


def test_a_checkpoint_that_cannot_be_resharded_is_refused_before_launch(tmp_path: Path) -> None:
    first = plan_for([[4]], WORDS, data_parallel_size=2, use_distributed_optimizer=True)
    save(first, tmp_path / "a")
    second = plan_for([[2], [2]], WORDS, use_distributed_optimizer=True)
    second.save(tmp_path / "second.json")
    done = memx_torchrun(
        *("--nproc-per-node", "2", SCRIPT, *WORDS, "--load", str(tmp_path / "a/checkpoint")),
        *("--memx-platform", "cpu", "--memx-plan", str(tmp_path / "second.json")),
        timeout_s=20,
    )
    assert done.code == 2
    assert "cannot be resharded" in done.err
    assert not list(tmp_path.glob("steps_*"))


def test_canary_upstream_still_damages_reshardable_state(tmp_path: Path) -> None:
    """When this fails, upstream has mended its offsets: the patch may end at that release."""
    stock = run_stock(
        2,
        tmp_path,
        *("--micro-batch-size", "1", "--use-distributed-optimizer"),
        *("--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "Ettt|tL"),
        *("--dist-ckpt-optim-fully-reshardable", "--save", str(tmp_path / "checkpoint")),
        *("--save-interval", "3"),
        model=WORDS,
    )
    assert "data corruption" in stock.finished.text
