"""The user's options against a plan."""

from __future__ import annotations

import pytest
from plans import make_plan

from megatron_memx.conflicts import refuse_conflicts
from megatron_memx.errors import BadInputError
from megatron_memx.parallel import Recompute

PLAN = make_plan([[3], [1]], recompute=[[Recompute.full("block", 2)], [Recompute()]])


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--pipeline-model-parallel-size 2 --micro-batch-size 1",
        "--pipeline-model-parallel-layout Et*3|tL",
        "--bf16 --lr 1",
    ],
)
def test_agreement_passes(words: str) -> None:
    refuse_conflicts(PLAN, words.split())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--pipeline-model-parallel-size 4", "is 4 but the plan says 2"),
        ("--pipeline-model-parallel-layout Ett|ttL", "but the plan says Ettt|tL"),
        ("--recompute-granularity full", "by stage: full block 2 | none"),
        ("--recompute-activations", "--recompute-activations is given"),
        ("--decoder-last-pipeline-num-layers 2", "but the plan says Ettt|tL"),
        ("--use-checkpoint-args", "not its layout"),
        ("--use-tp-pp-dp-mapping", "spreads the ranks"),
        ("--yaml-cfg x.yaml", "ignore the command line"),
    ],
)
def test_contradictions_are_refused_with_both_values(words: str, text: str) -> None:
    with pytest.raises(BadInputError) as error:
        refuse_conflicts(PLAN, words.split())
    assert text in error.value.message


def test_pins_that_the_plan_was_made_with_pass() -> None:
    pins = {
        "recompute_granularity": "full",
        "recompute_num_layers": 2,
        "recompute_activations": True,
    }
    plan = make_plan([[3], [1]], pins=pins)
    words = ["--recompute-granularity", "full", "--recompute-num-layers", "2"]
    refuse_conflicts(plan, [*words, "--recompute-activations"])
