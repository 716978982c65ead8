"""``memx predict``: the planner's own prediction of the configuration that the words write out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st
from jobs import words

from megatron_memx.cli.main import main
from megatron_memx.cost.memory import RankMemory, oom_probability

CLUSTER = str(ROOT / "examples" / "clusters" / "one_node.yaml")
MODEL = {
    **{"num_layers": 16, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048},
    **{"max_position_embeddings": 2048, "vocab_size": 32000, "global_batch_size": 64},
    **{"bf16": True, "micro_batch_size": 1},
}
SIZES = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def said(command: str, capsys: pytest.CaptureFixture[str], **more: Any) -> dict[str, Any]:
    code = main([command, "--json", "--cluster", CLUSTER, "--", *words(**MODEL, **more)])
    told = capsys.readouterr()
    assert code == 0, told.err
    return json.loads(told.out)


def test_predict_says_of_a_plan_what_the_search_said(capsys: pytest.CaptureFixture[str]) -> None:
    pinned = {
        **SIZES,
        "recompute_granularity": "selective",
        "pipeline_model_parallel_layout": "E" + "t" * 7 + "|" + "t" * 9 + "L",
    }
    plan = said("plan", capsys, **pinned)
    predicted = said("predict", capsys, sequence_parallel=True, **pinned)
    assert predicted["iteration_time_s"] == pytest.approx(plan["prediction"]["iteration_time_s"])
    for stage, planned in zip(predicted["stages"], plan["stages"], strict=True):
        assert stage["layers"] == [chunk["num_layers"] for chunk in planned["chunks"]]
        assert stage["peak_memory_bytes"] == planned["prediction"]["peak_memory_bytes"]
        assert stage["ranks"] == planned["ranks"]


def test_the_breakdown_adds_up_and_the_interval_holds_the_prediction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = said("predict", capsys, **SIZES)
    low, high = found["iteration_time_low_s"], found["iteration_time_high_s"]
    assert low < found["iteration_time_s"] < high
    assert "nothing was measured" in found["basis"]
    for stage in found["stages"]:
        parts = stage["memory_breakdown_bytes"].values()
        assert sum(parts) == pytest.approx(stage["peak_memory_bytes"], abs=len(parts))
        assert stage["oom_probability"] < 0.01


def test_sizes_that_are_not_written_are_megatrons_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said("predict", capsys)["sizes"].startswith("tp1 pp1 dp8")


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    more = {"hidden_size": 16384, "num_attention_heads": 128, "num_layers": 32}
    head = ["predict", "--cluster", CLUSTER, "--"]
    assert main([*head, *words(**{**MODEL, **more}, **SIZES)]) == 0
    told = capsys.readouterr().out
    assert "does not fit with a margin of 5%" in told
    assert "out of memory with probability 100.0%" in told


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"pipeline_model_parallel_size": 8, "num_layers": 12}, "12 layers"),
        ({"tensor_model_parallel_size": 3}, "3"),
    ],
)
def test_an_illegal_configuration_is_one_clear_error(
    more: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    head = ["predict", "--cluster", CLUSTER, "--"]
    assert main([*head, *words(**{**MODEL, **more})]) == 2
    told = capsys.readouterr().err
    assert text in told
    assert told.count("memx predict:") == 1


def test_words_must_stand_behind_the_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "--cluster", CLUSTER]) == 2
    assert "behind --" in capsys.readouterr().err


@given(
    st.integers(10**9, 10**11),
    st.integers(0, 10**10),
    st.integers(10**9, 10**11),
    st.integers(1, 10**10),
)
def test_more_room_means_less_risk(peak: int, spread: int, capacity: int, more: int) -> None:
    memory = RankMemory(peak_bytes=peak, high_bytes=peak + spread, breakdown_bytes={})
    risk = oom_probability(memory, capacity)
    assert 0 <= oom_probability(memory, capacity + more) <= risk <= 1
    if spread > 100:
        assert oom_probability(memory, peak) == pytest.approx(0.5)
        assert oom_probability(memory, peak + spread) == pytest.approx(0.0228, abs=1e-3)
