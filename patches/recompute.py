"""Seam: each chunk recomputes as the plan says.

``TransformerBlock`` (and the stack of hybrid models) gets, at construction, a shallow copy of the
configuration with the recompute fields of its own (pipeline rank, virtual stage). Full
recomputation is read from the block's configuration in its forward pass, selective at the
construction of its layers; both see the copy. Megatron's own argument values stay the same on
every rank. The copy is made after validation; the plan's legality was checked when it was made.
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

from megatron_memx.patches.registry import Context, Patch, Replacer, fired, resolve

from megatron_memx.errors import UpstreamChangedError
from megatron_memx.parallel import Recompute
from megatron_memx.plan import Plan

# Release by release: where the block and the hybrid stack live.
_BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock"
_STACKS = (
    "megatron.core.models.hybrid.hybrid_block:HybridStack",
    "megatron.core.ssm.mamba_block:MambaStack",
)
# A plan's layer is an attention and an MLP; a hybrid pattern counts each as a layer.
_HYBRID_LAYERS_PER_LAYER = 2


def config_with(config: Any, policy: Recompute, *, layers_per_layer: int = 1) -> Any:
    """Return a shallow copy of a TransformerConfig that recomputes by ``policy``."""
    changed = copy.copy(config)
    changed.recompute_granularity = None if policy.granularity == "none" else policy.granularity
    changed.recompute_method = policy.method
    changed.recompute_num_layers = (
        policy.num_layers * layers_per_layer if policy.num_layers is not None else None
    )
    changed.recompute_modules = list(policy.modules)
    return changed


def _pipeline_rank() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_rank())


def _wrap(original: Any, plan: Plan, *, hybrid: bool) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        if bound.arguments.get("is_mtp_layer"):
            original(self, *args, **kwargs)
            return
        rank = _pipeline_rank()
        virtual_stage = bound.arguments.get("vp_stage") or 0
        chunk = plan.stages[rank].chunks[virtual_stage]
        factor = _HYBRID_LAYERS_PER_LAYER if hybrid else 1
        bound.arguments["config"] = config_with(
            bound.arguments["config"], chunk.recompute, layers_per_layer=factor
        )
        original(*bound.args, **bound.kwargs)
        built = len(self.layers)
        if built != chunk.num_layers * factor:
            raise UpstreamChangedError(
                f"stage {rank} chunk {virtual_stage}: Megatron built {built} layers, the plan "
                f"says {chunk.num_layers * factor}; layout {plan.layout}",
                fix="plan again, and report this with your Megatron version",
                flag="--memx-replan",
            )
        fired("recompute")

    return __init__


def _apply(context: Context, replacer: Replacer) -> None:
    assert context.plan is not None
    block = resolve(_BLOCK)
    replacer.replace(block, "__init__", _wrap(block.__init__, context.plan, hybrid=False))
    for target in _STACKS:
        stack = resolve(target)
        if stack is not None:
            replacer.replace(stack, "__init__", _wrap(stack.__init__, context.plan, hybrid=True))
    _count_full_recomputation(replacer)


def _count_full_recomputation(replacer: Replacer) -> None:
    """Count the block's full-recompute path under the name that its forward pass calls.

    0.18 moved it from a method to a function imported by name, so the block's own code is asked.
    """
    module = resolve(_BLOCK.partition(":")[0] + ":" + "TransformerBlock")
    owner: Any = inspect.getmodule(module)
    name = "checkpointed_forward"
    if name not in module.forward.__code__.co_names:
        owner, name = module, "_checkpointed_forward"
    original = getattr(owner, name)

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        fired("recompute.full")
        return original(*args, **kwargs)

    replacer.replace(owner, name, counted)


def _needed(context: Context) -> str | None:
    return None if context.plan is not None else "no plan"


PATCH = Patch(
    id="recompute",
    why="a recompute policy for each pipeline stage and chunk",
    targets=(
        f"{_BLOCK}.__init__",
        f"{_BLOCK}.forward",
        *(f"{stack}.__init__?" for stack in _STACKS),
    ),
    needed=_needed,
    apply=_apply,
    must_fire=True,
)
