"""Plans: round trip, validation of untrusted files, layout and rank order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import make_plan

from megatron_memx.errors import BadInputError, LegalityError
from megatron_memx.parallel import ParallelSizes, Recompute
from megatron_memx.plan import Plan

POLICIES = [
    Recompute(),
    Recompute.selective(),
    Recompute.selective("core_attn", "mlp"),
    Recompute.full("block", 1),
    Recompute.full("uniform", 2),
]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pp = draw(st.integers(1, 4))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    layers = [[draw(st.integers(1, 4)) for _ in range(vpp)] for _ in range(pp)]
    policies = [[draw(st.sampled_from(POLICIES)) for _ in range(vpp)] for _ in range(pp)]
    dp = draw(st.integers(1, 2))
    order = draw(st.permutations(range(pp * dp)))
    return make_plan(
        layers,
        recompute=policies,
        rank_order=list(order),
        data_parallel_size=dp,
        pins={"micro_batch_size": 1},
        runners_up=({"label": "tp1"},),
    )


@given(plans())
def test_json_round_trip_is_exact(plan: Plan) -> None:
    assert Plan.from_dict(json.loads(plan.to_json())) == plan


@given(plans())
def test_layout_holds_each_layer_once_and_ends_at_the_ends(plan: Plan) -> None:
    layout = plan.layout
    assert layout.replace("|", "").count("t") == plan.num_layers
    assert layout.startswith("E") and layout.endswith("L")
    slots = layout.split("|")
    sizes = plan.parallel
    pp = sizes.pipeline_model_parallel_size
    assert len(slots) == pp * sizes.virtual_pipeline_model_parallel_size
    for index, slot in enumerate(slots):
        chunk = plan.stages[index % pp].chunks[index // pp]
        assert slot.count("t") == chunk.num_layers


def test_rank_order_maps_launcher_ranks_to_megatron_ranks() -> None:
    plan = make_plan([[2], [1]], rank_order=[3, 1, 0, 2], data_parallel_size=2)
    assert [plan.megatron_rank(rank) for rank in range(4)] == [2, 1, 3, 0]


def test_save_and_load(tmp_path: Path) -> None:
    plan = make_plan([[3], [1]])
    plan.save(tmp_path / "deep" / "plan.json")
    assert Plan.load(tmp_path / "deep" / "plan.json") == plan
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["plan.json"]


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="cannot be written") as error:
        make_plan([[3], [1]]).save(tmp_path / "file" / "plan.json")
    assert error.value.flag == "--memx-save-plan"


def broken(change: Any) -> dict[str, Any]:
    data = json.loads(make_plan([[3], [1]]).to_json())
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema=99), "schema 99; this version reads 1"),
        (lambda d: d.pop("stages"), "stages"),
        (lambda d: d["stages"].pop(), "1 stages for pipeline_model_parallel_size 2"),
        (lambda d: d["stages"][1].update(ranks=[0]), "not a permutation of 0 to 1"),
        (lambda d: d["stages"][1].update(ranks=["1"]), "must be a whole number"),
        (lambda d: d["stages"][0]["chunks"][0].update(num_layers=2), "end at 2"),
        (lambda d: d["model"].update(num_layers=28), "24 layers unassigned"),
        (lambda d: d["stages"][0]["chunks"][0].update(embedding=False), "embedding"),
        (lambda d: d.update(layout="Ett|ttL"), "layout says 'Ett|ttL'"),
        (lambda d: d["parallel"].update(micro_batch_size=0), "micro_batch_size is 0"),
        (lambda d: d["stages"][0]["chunks"][0]["recompute"].update(granularity="x"), "'x'"),
        (lambda d: d["stages"][0].update(surprise=1, chunks=None), "unknown field"),
        (lambda d: d.update(model=[]), "model must be an object"),
    ],
)
def test_wrong_plans_are_refused_with_the_reason(change: Any, words: str) -> None:
    with pytest.raises(BadInputError, match=r"file\.json: ") as caught:
        Plan.from_dict(broken(change), source="file.json")
    assert words in caught.value.message


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000])
def test_files_that_are_no_plan(tmp_path: Path, content: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(content)
    with pytest.raises(BadInputError, match="plan.json"):
        Plan.load(file)


def test_missing_file_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(BadInputError) as caught:
        Plan.load(tmp_path / "no.json")
    assert caught.value.flag == "--memx-plan"


def test_batch_that_does_not_divide_offers_both_neighbours() -> None:
    with pytest.raises(LegalityError) as caught:
        ParallelSizes(micro_batch_size=2, data_parallel_size=7, global_batch_size=256)
    assert "= 14" in caught.value.message
    assert caught.value.fix == "252 or 266"


def test_uniform_zero_is_refused_because_megatron_loops() -> None:
    with pytest.raises(LegalityError, match="loops for ever"):
        Recompute.full("uniform", 0)


def test_block_recomputes_the_first_layers_of_the_chunk() -> None:
    assert Recompute.full("block", 2).layer_classes(3) == ("full", "full", "none")
    assert Recompute.full("block", 9).layer_classes(2) == ("full", "full")
    assert Recompute.full("uniform", 2).layer_classes(3) == ("full",) * 3


@pytest.mark.parametrize(
    "fields",
    [
        {"granularity": "selective"},
        {"granularity": "selective", "modules": ("mlp",), "num_layers": 1},
        {"granularity": "none", "modules": ("mlp",)},
        {"granularity": "full", "method": "blocks", "num_layers": 1},
        {"granularity": "full", "method": "block"},
    ],
)
def test_contradictory_recompute_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadInputError):
        Recompute(**fields)


def test_plan_is_frozen() -> None:
    plan = make_plan([[1]])
    assert replace(plan, created="x") != plan
    with pytest.raises(AttributeError):
        plan.created = "x"  # type: ignore[misc]
