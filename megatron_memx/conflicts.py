"""Options of the user that contradict a plan: refused, never quietly overruled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_memx.errors import BadInputError
from megatron_memx.megatron_args import (
    REPLACED_BY_LAYOUT,
    expand_layout,
    plan_overrides,
    typed_options,
)
from megatron_memx.plan import Plan

_REFUSED_WITH_PLAN = {
    "yaml_cfg": "--yaml-cfg makes Megatron ignore the command line, the plan's values included",
    "use_checkpoint_args": "it restores the parallel sizes of a checkpoint but not its layout",
    "use_mp_args_from_checkpoint_args": "it restores parallel sizes but not the layout",
    "use_tp_pp_dp_mapping": "it spreads the ranks of a stage over the cluster, which the plan does "
    "not",
}
# What a plan holds for each chunk, or in its layout: one value for all can only be a pin of it.
_ONLY_AS_PINS = (
    *sorted(REPLACED_BY_LAYOUT),
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "recompute_activations",
)


def refuse_conflicts(plan: Plan, words: Sequence[str]) -> None:
    """Refuse options of the user that contradict the plan.

    Raises:
        BadInputError: Names the option, its value and the plan's value.
    """
    typed = typed_options(words)
    for name, reason in _REFUSED_WITH_PLAN.items():
        if name in typed:
            flag = "--" + name.replace("_", "-")
            raise BadInputError(f"{flag} cannot be used with a plan: {reason}", flag=flag)
    for name, value in plan_overrides(plan).items():
        if name not in typed or isinstance(value, bool):
            continue
        given, wanted = typed[name], str(value)
        if name == "pipeline_model_parallel_layout":
            given, wanted = expand_layout(given), expand_layout(wanted)
        elif name == "hybrid_layer_pattern":
            given, wanted = given.replace("|", ""), wanted.replace("|", "")
        if given != wanted:
            raise _contradiction(name, typed[name], value)
    for name in _ONLY_AS_PINS:
        if name in typed and typed[name] != _as_typed(plan.pins.get(name)):
            layouts = " | ".join(
                chunk.recompute.label for stage in plan.stages for chunk in stage.chunks
            )
            said = plan.layout if name in REPLACED_BY_LAYOUT else f"by stage: {layouts}"
            raise _contradiction(name, typed[name] or "given", said)


def _contradiction(name: str, given: str, wanted: Any) -> BadInputError:
    flag = "--" + name.replace("_", "-")
    return BadInputError(
        f"{flag} is {given} but the plan says {wanted}",
        fix=f"leave {flag} out, or plan again with it",
        flag="--memx-replan",
    )


def _as_typed(pin: Any) -> str | None:
    """Return a pin as :func:`typed_options` would have it."""
    if pin is None:
        return None
    if pin is True:
        return ""
    return " ".join(map(str, pin)) if isinstance(pin, (list, tuple)) else str(pin)
