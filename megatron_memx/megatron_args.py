"""Megatron's command line as words: what a user wrote, and a plan in the same spelling.

Nothing here imports Megatron. Megatron's parser takes options only (no positional words) and
forbids abbreviations, so that words can be grouped without knowing every option.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_memx.errors import BadInputError
from megatron_memx.plan import Plan

# The layout string (or the hybrid pattern) says all that these say; Megatron refuses both at once.
REPLACED_BY_LAYOUT = frozenset(
    {
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "hybrid_override_pattern",
    }
)
_NEGATIVE_NUMBER = re.compile(r"^-\d|^-\.\d")
# Switches whose flag is not the name of the value that it sets.
_SWITCHES_OFF = {"overlap_p2p_comm": "--no-overlap-p2p-communication"}


def typed_options(words: Sequence[str]) -> dict[str, str]:
    """Return what the words set: option name (dashes as underscores) -> values, blank-separated.

    A switch has the value ``""``. The last of repeated options wins, as in argparse.
    """
    typed: dict[str, str] = {}
    for flag, values in _groups(words):
        if flag is not None:
            typed[flag.lstrip("-").replace("-", "_")] = " ".join(values)
    return typed


def without_options(words: Sequence[str], names: Collection[str]) -> list[str]:
    """Return ``words`` without the options called ``names`` and their values."""
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0].lstrip("-").replace("-", "_")
            dropping = name in names
        elif word.startswith("-") and not _NEGATIVE_NUMBER.match(word):
            dropping = False
        if not dropping:
            kept.append(word)
    return kept


def _groups(words: Sequence[str]) -> list[tuple[str | None, list[str]]]:
    groups: list[tuple[str | None, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            flag, sign, value = word.partition("=")
            groups.append((flag, [value] if sign else []))
        elif groups:
            groups[-1][1].append(word)
    return groups


def expand_layout(text: str) -> str:
    """Return a layout string with repetitions written out and commas dropped.

    ``x*n`` repeats the letter (or bar) before it, ``(xy)*n`` the group; groups do not nest.

    Raises:
        BadInputError: Nested or open parentheses, or letters other than E, t, m, L and the bar.
    """
    source = text.replace(",", "").replace(" ", "")
    flag = "--pipeline-model-parallel-layout"
    if re.search(r"\([^()]*\(", source) or source.count("(") != source.count(")"):
        raise BadInputError(
            f"layout {text!r}: parentheses nest or stay open; Megatron reads neither as written",
            fix="one level of parentheses, as (tt|)*3",
            flag=flag,
        )
    source = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m.group(1) * int(m.group(2)), source)
    source = re.sub(r"([A-Za-z|])\*(\d+)", lambda m: m.group(1) * int(m.group(2)), source)
    source = source.replace("(", "").replace(")", "")
    unknown = sorted(set(source) - set("EtmL|"))
    if unknown:
        raise BadInputError(
            f"layout {text!r}: {', '.join(map(repr, unknown))} mean nothing in a layout",
            fix="E (embedding), t (decoder layer), m (MTP layer), L (loss), | between stages",
            flag=flag,
        )
    return source


def hybrid_pattern(plan: Plan) -> str:
    """Return the plan's split as a hybrid pattern: ``*`` attention, ``-`` MLP, ``|`` stage."""
    vpp = plan.parallel.virtual_pipeline_model_parallel_size
    return "|".join("*-" * stage.chunks[v].num_layers for v in range(vpp) for stage in plan.stages)


def plan_overrides(plan: Plan) -> dict[str, Any]:
    """Return the values that the plan sets, by Megatron's argument names, plain types only.

    Recomputation is not among them: it differs by chunk, and Megatron's arguments are one for all.
    """
    sizes = plan.parallel
    values: dict[str, Any] = {
        "tensor_model_parallel_size": sizes.tensor_model_parallel_size,
        "pipeline_model_parallel_size": sizes.pipeline_model_parallel_size,
        "context_parallel_size": sizes.context_parallel_size,
        "micro_batch_size": sizes.micro_batch_size,
        "global_batch_size": sizes.global_batch_size,
    }
    if plan.model.get("moe"):
        values["expert_model_parallel_size"] = sizes.expert_model_parallel_size
        values["expert_tensor_parallel_size"] = sizes.expert_tensor_parallel_size
    if plan.model.get("hybrid"):
        values["hybrid_layer_pattern"] = hybrid_pattern(plan)
    elif sizes.pipeline_model_parallel_size > 1:
        values["pipeline_model_parallel_layout"] = plan.layout
    release = str(plan.versions.get("megatron_core", ""))
    if sizes.virtual_pipeline_model_parallel_size > 1 and release.startswith("0.17."):
        # Up to 0.17 an overlapped send may be released before it ends; 0.18 mended it.
        values["overlap_p2p_comm"] = False
    if sizes.sequence_parallel:
        values["sequence_parallel"] = True
    if sizes.use_distributed_optimizer:
        values["use_distributed_optimizer"] = True
    return values


def overrides_to_argv(values: Mapping[str, Any]) -> list[str]:
    """Return :func:`plan_overrides` as words that stock Megatron parses."""
    words: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        if value is False:
            words.append(_SWITCHES_OFF[name])
            continue
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, (list, tuple)):
            words += [flag, *map(str, value)]
        elif str(value).startswith("-"):
            words.append(f"{flag}={value}")
        else:
            words += [flag, str(value)]
    return words
