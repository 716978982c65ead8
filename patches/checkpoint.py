"""Seams of checkpoints: damaged optimizer state mended, torch's own Adam loaded, plans stamped.

*Reshardable.* Megatron up to 0.19 writes the distributed optimizer's fully reshardable form from
wrong offsets: it gathers each gradient buffer with the padding between its buckets removed, and
then cuts the parameters out at offsets that still count that padding. Every parameter behind the
first bucket is shifted. Here the offsets are made those of the gathered buffer for that call.

*Torch Adam.* Without Transformer Engine or Apex the distributed optimizer wraps torch's Adam, whose
state has a step for each parameter; saving works and loading fails in three places.

*Stamp.* The plan and its layout are written beside each checkpoint, for the next job to compare.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_memx.patches.registry import Context, Patch, Replacer, fired, resolve

from megatron_memx.resume import STAMP, stamp_of

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_SAVE = "megatron.training.checkpointing:save_checkpoint"


def padding_before(buffer: Any) -> list[int]:
    """Return for each bucket of a gradient buffer the padded elements that stand before it."""
    before = [0]
    for bucket in buffer.buckets:
        before.append(before[-1] + bucket.grad_data.numel() - bucket.numel_unpadded)
    return before[:-1]


def compact_index_map(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Return parameter -> (start, end, bucket) counted without the padding between buckets."""
    before = padding_before(buffer)
    return {
        parameter: (start - before[bucket], end - before[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }


def _apply_reshardable(_context: Context, replacer: Replacer) -> None:
    owner = resolve(_OPTIMIZER)
    original = owner.sharded_param_state_fully_reshardable

    @functools.wraps(original)
    def sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
        gather = self.get_parameter_state_dp_zero
        maps = [buffer.param_index_map for buffer in self.buffers]

        def gather_then_compact(*gather_args: Any, **gather_kwargs: Any) -> Any:
            gathered = gather(*gather_args, **gather_kwargs)
            for buffer in self.buffers:
                buffer.param_index_map = MappingProxyType(compact_index_map(buffer))
            return gathered

        self.get_parameter_state_dp_zero = gather_then_compact
        try:
            return original(self, *args, **kwargs)
        finally:
            del self.get_parameter_state_dp_zero
            for buffer, index_map in zip(self.buffers, maps, strict=True):
                buffer.param_index_map = index_map
            fired("reshardable")

    replacer.replace(
        owner, "sharded_param_state_fully_reshardable", sharded_param_state_fully_reshardable
    )


def _reshardable_needed(context: Context) -> str | None:
    if context.plan is None:
        return "no plan"
    if resolve(f"{_OPTIMIZER}.sharded_param_state_fully_reshardable") is None:
        return "this Megatron has no fully reshardable form"
    return None


def _apply_torch_adam(_context: Context, replacer: Replacer) -> None:
    import torch

    owner = resolve(_OPTIMIZER)
    original_state = owner.state_dict
    original_load = owner.load_state_dict
    original_set = owner._set_main_param_and_optimizer_states

    @functools.wraps(original_state)
    def state_dict(self: Any) -> Any:
        if not self.optimizer.state and isinstance(
            self.optimizer, (torch.optim.Adam, torch.optim.AdamW)
        ):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return original_state(self)

    @functools.wraps(original_load)
    def load_state_dict(self: Any, state: Any) -> Any:
        result = original_load(self, state)
        for each in self.optimizer.state.values():
            if isinstance(each.get("step"), torch.Tensor):
                # Megatron gives all parameters one tensor, which each of them would count up.
                each["step"] = each["step"].clone()
        fired("torch-adam")
        return result

    @functools.wraps(original_set)
    def set_states(self: Any, model_param: Any, tensors: Any) -> Any:
        group, place = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][place]
        step = self.optimizer.state[main].get("step")
        known = dict(tensors) if step is None else {**tensors, "step": step}
        with torch.no_grad():
            return original_set(self, model_param, known)

    replacer.replace(owner, "state_dict", state_dict)
    replacer.replace(owner, "load_state_dict", load_state_dict)
    replacer.replace(owner, "_set_main_param_and_optimizer_states", set_states)


def _torch_adam_needed(context: Context) -> str | None:
    if context.plan is None:
        return "no plan"
    owner = resolve(_OPTIMIZER)
    if owner is None:
        return "there is no distributed optimizer"
    if getattr(sys.modules[owner.__module__], "HAVE_APEX_OR_TE", True):
        return "Transformer Engine's or Apex's Adam is used"
    return None


def _apply_stamp(context: Context, replacer: Replacer) -> None:
    from megatron.training import checkpointing

    original = checkpointing.save_checkpoint
    plan = context.plan
    assert plan is not None

    @functools.wraps(original)
    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        result = original(iteration, *args, **kwargs)
        from megatron.training import get_args

        arguments = get_args()
        folder = Path(
            checkpointing.get_checkpoint_name(arguments.save, iteration, return_base_dir=True)
        )
        if int(os.environ.get("RANK", "0")) == 0 and folder.is_dir():
            data = stamp_of(
                plan,
                fully_reshardable=bool(
                    getattr(arguments, "dist_ckpt_optim_fully_reshardable", False)
                ),
                sound_optimizer=True,
            )
            temporary = folder / f".{STAMP}.tmp"
            temporary.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, folder / STAMP)
        fired("stamp")
        return result

    for module_name in list(sys.modules):
        module = sys.modules[module_name]
        if module_name.startswith("megatron.") and (
            vars(module).get("save_checkpoint") is original
        ):
            replacer.replace(module, "save_checkpoint", save_checkpoint)


def _stamp_needed(context: Context) -> str | None:
    return None if context.plan is not None else "no plan"


RESHARDABLE = Patch(
    id="reshardable",
    why="the fully reshardable optimizer state is written from right offsets",
    targets=(
        f"{_OPTIMIZER}.sharded_param_state_fully_reshardable?",
        f"{_OPTIMIZER}.get_parameter_state_dp_zero",
    ),
    needed=_reshardable_needed,
    apply=_apply_reshardable,
)
TORCH_ADAM = Patch(
    id="torch-adam",
    why="the distributed optimizer loads torch's own Adam",
    targets=(
        f"{_OPTIMIZER}.state_dict",
        f"{_OPTIMIZER}.load_state_dict",
        f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
    ),
    needed=_torch_adam_needed,
    apply=_apply_torch_adam,
)
STAMP_PATCH = Patch(
    id="stamp",
    why="the plan and its layout stand beside each checkpoint",
    targets=(_SAVE,),
    needed=_stamp_needed,
    apply=_apply_stamp,
)
