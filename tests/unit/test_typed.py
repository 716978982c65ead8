"""Plans as untrusted input: any wrong value is one error that names its place."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import make_plan

from megatron_memx.errors import BadInputError
from megatron_memx.plan import Plan

PLAN = json.loads(make_plan([[3], [1]]).to_json())
WRONG = [None, True, -1, 3.5, "x", [], {}, [1], float("nan"), 10**30]


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a document."""
    found = [path] if path else []
    if not isinstance(data, (dict, list)):
        return found
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        found += places(value, (*path, key))
    return found


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("stages", 0, "chunks", 0, "num_layers"), "3", "stages[0].chunks[0].num_layers is '3'"),
        (("stages", 0, "chunks", 0, "num_layers"), 3.0, "must be a whole number"),
        (("parallel", "micro_batch_size"), True, "parallel.micro_batch_size is True"),
        (("prediction", "phi"), "x", "prediction.phi is 'x': must be a number"),
        (("stages", 0, "prediction", "capacity_bytes"), 0, "must be 1 or more"),
        (("stages", 0, "device_kind"), {}, "must be text"),
        (("cluster", "nodes"), 4, "nodes must be a list"),
        (("objective",), {"weights": "q"}, "weights must be an object"),
        (("stages", 0, "extra"), 1, "unknown field 'extra'"),
    ],
)
def test_wrong_values_are_named(path: tuple[Any, ...], value: Any, text: str) -> None:
    data = copy.deepcopy(PLAN)
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises(BadInputError) as error:
        Plan.from_dict(data)
    assert text in error.value.message


@settings(deadline=None)
@given(st.sampled_from(places(PLAN)), st.sampled_from(WRONG), st.booleans())
def test_a_spoiled_plan_is_refused_or_still_a_plan(
    path: tuple[Any, ...], value: Any, remove: bool
) -> None:
    """Never another error; and what is accepted can be written, read and shown."""
    data = copy.deepcopy(PLAN)
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    try:
        plan = Plan.from_dict(data)
    except BadInputError:
        return
    import io

    from megatron_memx.report.terminal import make_console, show_plan

    plan.to_json()
    show_plan(plan, reused=True, took_s=None, console=make_console(io.StringIO()))
