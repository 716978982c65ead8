"""Words of Megatron's command line: grouping, layouts, a plan's overrides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import make_plan

from megatron_memx.errors import BadInputError
from megatron_memx.megatron_args import (
    expand_layout,
    overrides_to_argv,
    plan_overrides,
    typed_options,
    without_options,
)


def test_typed_options_groups_values_and_takes_the_last() -> None:
    words = ["--lr", "-1e-3", "--bf16", "--split", "1,2", "--recompute-modules", "mlp", "moe"]
    assert typed_options([*words, "--lr=2"]) == {
        "lr": "2",
        "bf16": "",
        "split": "1,2",
        "recompute_modules": "mlp moe",
    }


def test_without_options_drops_values_too() -> None:
    words = ["--a", "1", "2", "--b", "--c=3", "--d", "-4"]
    assert without_options(words, {"a", "c"}) == ["--b", "--d", "-4"]


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("Et*3|tL", "Ettt|tL"),
        ("E(tt|)*2tL", "Ett|tt|tL"),
        ("E,t,|,t,L", "Et|tL"),
        ("Et|*3tL", "Et|||tL"),
    ],
)
def test_layout_repetitions(text: str, expanded: str) -> None:
    assert expand_layout(text) == expanded


@pytest.mark.parametrize("text", ["E((tt)*2|)*2L", "E(tt|L", "Exx|tL"])
def test_layout_refuses_what_megatron_misreads(text: str) -> None:
    with pytest.raises(BadInputError) as error:
        expand_layout(text)
    assert error.value.flag == "--pipeline-model-parallel-layout"


@given(st.lists(st.integers(1, 5), min_size=2, max_size=6))
def test_overrides_say_the_split_as_a_layout_and_stay_plain(layers: list[int]) -> None:
    values = plan_overrides(make_plan([[n] for n in layers]))
    assert values["pipeline_model_parallel_layout"].count("t") == sum(layers)
    assert all(isinstance(value, (str, int, bool)) for value in values.values())
    assert not any("recompute" in name for name in values)
    words = overrides_to_argv(values)
    assert typed_options(words)["pipeline_model_parallel_size"] == str(len(layers))


def test_hybrid_plans_use_the_pattern() -> None:
    plan = make_plan([[2], [1]])
    data = plan.to_dict()
    data["model"]["hybrid"] = True
    values = plan_overrides(type(plan).from_dict(data))
    assert values["hybrid_layer_pattern"] == "*-*-|*-"
    assert "pipeline_model_parallel_layout" not in values


def test_virtual_stages_on_0_17_do_without_the_overlap_that_it_gets_wrong() -> None:
    plan = make_plan([[1, 1], [1, 1], [1, 1]], versions={"megatron_core": "0.17.1"})
    assert "--no-overlap-p2p-communication" in overrides_to_argv(plan_overrides(plan))
    newer = make_plan([[1, 1], [1, 1], [1, 1]], versions={"megatron_core": "0.19.2"})
    assert "--no-overlap-p2p-communication" not in overrides_to_argv(plan_overrides(newer))
