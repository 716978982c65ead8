"""Seam: hybrid models without Transformer Engine.

Megatron's ``HybridModel`` (the successor of ``GPTModel``) names Transformer Engine's modules in its
layer specification and its final norm. Where they are missing, the CPU platform puts Megatron's
own local modules in their place for the attention and MLP layers that a GPT-like pattern uses.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from functools import partial
from typing import Any

from megatron_memx.patches.registry import Context, Patch, Replacer, fired, resolve

_SPECS = "megatron.core.models.hybrid.hybrid_layer_specs"
_OLD_SPECS = "megatron.core.models.mamba.mamba_layer_specs"
_BLOCK = "megatron.core.models.hybrid.hybrid_block"


def local_stack_spec(original: Any) -> Any:
    """Return ``original`` with attention and MLP layers made of Megatron's local modules."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    spec = copy.copy(original)
    spec.submodules = copy.copy(original.submodules)
    spec.submodules.attention_layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=WrappedTorchNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=DotProductAttention,
                    linear_proj=RowParallelLinear,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
        ),
    )
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    if hasattr(MLP, "as_mlp_submodule"):
        mlp: Any = partial(MLP.as_mlp_submodule, submodules=linear)
    else:
        mlp = ModuleSpec(module=MLP, submodules=linear)
    spec.submodules.mlp_layer = ModuleSpec(
        module=MLPLayer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=WrappedTorchNorm, mlp=mlp, mlp_bda=get_bias_dropout_add
        ),
    )
    return spec


def _apply(_context: Context, replacer: Replacer) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    specs, block = importlib.import_module(_SPECS), importlib.import_module(_BLOCK)
    original = specs.hybrid_stack_spec
    local = local_stack_spec(original)
    # Older modules hold the same specification under its old name.
    importlib.import_module(_OLD_SPECS)
    for module in [module for name, module in sys.modules.items() if name.startswith("megatron.")]:
        for name in ("hybrid_stack_spec", "mamba_stack_spec"):
            if vars(module).get(name) is original:
                replacer.replace(module, name, local)

    class FinalNorm:
        """Megatron's local norm, made as the stack makes Transformer Engine's."""

        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_more: Any) -> Any:
            fired("hybrid")
            return WrappedTorchNorm(config, hidden_size, eps)

    replacer.replace(block, "TENorm", FinalNorm)


def _needed(context: Context) -> str | None:
    if context.platform != "cpu":
        return "not the CPU platform"
    if resolve(f"{_BLOCK}:HybridStack") is None:
        return "this Megatron has no hybrid model"
    if importlib.util.find_spec("transformer_engine") is not None:
        return "Transformer Engine is installed"
    return None


PATCH = Patch(
    id="hybrid",
    why="hybrid models of attention and MLP layers without Transformer Engine",
    targets=(f"{_BLOCK}:HybridStack.__init__?",),
    needed=_needed,
    apply=_apply,
)
