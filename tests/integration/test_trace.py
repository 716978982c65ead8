"""``memx profile``: real layers measured, and real stages traced under fake tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import ROOT
from jobs import words

from megatron_memx.cli.main import main

pytestmark = pytest.mark.megatron

CLUSTER = str(ROOT / "examples" / "clusters" / "one_node.yaml")
COMMON = {
    **{"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 2048},
    **{"max_position_embeddings": 2048, "vocab_size": 32000, "tokenizer_type": "NullTokenizer"},
    **{"micro_batch_size": 2, "global_batch_size": 64, "bf16": True, "train_iters": 1, "lr": 1e-4},
    **{"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
}


def traced(cache: Path, capsys: pytest.CaptureFixture[str], **more: object) -> tuple[dict, str]:
    head = ["profile", "--trace", "--json", "--cluster", CLUSTER, "--cache-dir", str(cache), "--"]
    code = main([*head, *words(**COMMON, **more)])
    told = capsys.readouterr()
    assert code == 0, told.err
    return json.loads(told.out), told.err


def test_counted_bytes_are_the_traced_ones_and_a_trace_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, told = traced(tmp_path, capsys, swiglu=True, sequence_parallel=True)
    assert "traced 2 of 2 stages" in told
    assert [stage["layers"] for stage in found["stages"]] == [[2], [2]]
    for stage in found["stages"]:
        assert abs(stage["counted_error"]) < 0.005
        static = stage["counted_breakdown_bytes"]
        assert stage["traced_parameter_bytes"] == static["parameters"]
        assert stage["traced_gradient_bytes"] == pytest.approx(static["gradients"], rel=1e-4)
    again, told = traced(tmp_path, capsys, swiglu=True, sequence_parallel=True, lr_warmup_iters=1)
    assert "traced" not in told
    assert again == found


def test_recomputation_shows_in_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = {"recompute_method": "uniform", "recompute_num_layers": 1}
    found, _ = traced(tmp_path, capsys, recompute_granularity="full", **full)
    none, _ = traced(tmp_path, capsys)
    for less, more in zip(found["stages"], none["stages"], strict=True):
        assert less["traced_peak_bytes"] < more["traced_peak_bytes"]
        assert abs(less["counted_error"]) < 0.01


def test_what_was_measured_is_what_the_next_plan_rests_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks measure; no learning rate is needed, and a second call measures nothing."""
    model = words(hidden_size=64, micro_batch_size=2, tensor_model_parallel_size=1)
    cache = ["--cache-dir", str(tmp_path)]
    measure = ["profile", "--json", "--platform", "cpu", "--nproc-per-node", "2", *cache, "--"]
    assert main([*measure, *model]) == 0
    known = json.loads(capsys.readouterr().out)["devices"]["cpu"]
    assert known["ok"] == known["rows"] > 10
    before = Path(known["file"]).read_text()
    assert main([*measure, *model]) == 0
    assert json.loads(capsys.readouterr().out)["devices"]["cpu"] == known
    assert Path(known["file"]).read_text() == before
    world = str(ROOT / "examples" / "clusters" / "two_cpu_ranks.yaml")
    assert main(["plan", "--json", "--cluster", world, *cache, "--", *model]) == 0
    basis = json.loads(capsys.readouterr().out)["prediction"]["basis"]
    assert "cpu:" in basis
    assert "measured units" in basis


def test_what_megatron_says_against_the_arguments_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = ["profile", "--trace", "--cluster", CLUSTER, "--cache-dir", str(tmp_path), "--"]
    assert main([*head, *words(**{**COMMON, "lr": None}, min_lr=1.0, lr_decay_style="bent")]) == 2
    told = capsys.readouterr().err
    assert "Megatron refuses rank 0 of 8: " in told
    assert "bent" in told
    assert "Traceback" not in told
