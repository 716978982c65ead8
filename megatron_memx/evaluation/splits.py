"""How many decoder layers each pipeline rank holds: as a row's notes say, else as frameworks do."""

from __future__ import annotations

import re

from megatron_memx.evaluation.runs import Run
from megatron_memx.model import ModelShape
from megatron_memx.parallel import ParallelSizes

_BY_STAGE = re.compile(r"\bs(\d+):\s*(\d+) layers")
_LISTED = re.compile(r"layers per stage \[([\d,\s]+)\]")


def stage_layers(run: Run, model: ModelShape, sizes: ParallelSizes) -> tuple[tuple[int, ...], ...]:
    """Return ``layers[pipeline rank][virtual stage]``."""
    pp, vpp = sizes.pipeline_model_parallel_size, sizes.virtual_pipeline_model_parallel_size
    noted = _noted(run.notes, model.num_layers)
    if noted is not None and len(noted) == pp and vpp == 1:
        return tuple((count,) for count in noted)
    if "nanotron" in run.framework and vpp == 1:
        return tuple((count,) for count in _by_cost(model, pp))
    flat = _even(model.num_layers, pp * vpp)
    return tuple(tuple(flat[v * pp + rank] for v in range(vpp)) for rank in range(pp))


def _noted(notes: str, num_layers: int) -> list[int] | None:
    listed = _LISTED.search(notes)
    if listed:
        counts = [int(word) for word in listed.group(1).replace(",", " ").split()]
        return counts if sum(counts) == num_layers else None
    found = _BY_STAGE.findall(notes)
    counts = [int(count) for _, count in found]
    if counts and "incl. embedding and head" in notes:
        if len(counts) == 1:
            return [num_layers]
        counts[0] -= 1
        counts[-1] -= 1
    return counts if counts and sum(counts) == num_layers else None


def _even(layers: int, chunks: int) -> list[int]:
    """Return Megatron's split, and that of DeepSpeed's uniform method: the first get the rest."""
    each, left = divmod(layers, chunks)
    return [each + (i < left) for i in range(chunks)]


def _by_cost(model: ModelShape, pp: int) -> list[int]:
    """Return nanotron's split: by the products' cost, a stage closed by what exceeds its share."""
    attention = 4 * model.hidden_size * model.num_attention_heads * model.kv_channels
    layer = float(attention + 3 * model.ffn_hidden_size * model.hidden_size)
    head = float(model.vocab_size * model.hidden_size)
    costs = [0.0, *[layer] * model.num_layers, 0.0, head, 0.0, 0.0]
    total = sum(costs)
    stages = [0] * pp
    stage, done = 0, 0.0
    for index, cost in enumerate(costs):
        stages[stage] += 0 < index <= model.num_layers
        done += cost
        if stage < pp - 1 and done > total * (stage + 1) / pp:
            stage += 1
    return stages
