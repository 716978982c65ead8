"""The real GPT model from parsed Megatron arguments, in the pieces that pipelines are made of."""

from __future__ import annotations

import copy
from typing import Any

from megatron_memx.patches.recompute import config_with

from megatron_memx.parallel import Recompute


def transformer_config(args: Any, *, num_layers: int | None = None, policy: Recompute) -> Any:
    """Return the TransformerConfig of ``args``, with another depth and recompute policy."""
    from megatron.training.arguments import core_transformer_config_from_args

    changed = copy.copy(args)
    if num_layers is not None:
        changed.num_layers = num_layers
    for name in ("recompute_granularity", "recompute_method", "recompute_num_layers"):
        setattr(changed, name, None)
    return config_with(core_transformer_config_from_args(changed), policy)


def layer_spec(args: Any, config: Any, vp_stage: int | None = None) -> Any:
    """Return the layer specification that Megatron's own GPT builder chooses for ``args``."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    engine = args.transformer_impl == "transformer_engine"
    if args.num_experts:
        return specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=engine,
            normalization=args.normalization,
            vp_stage=vp_stage,
        )
    common = {
        "num_experts": args.num_experts,
        "moe_grouped_gemm": args.moe_grouped_gemm,
        "qk_layernorm": args.qk_layernorm,
        "multi_latent_attention": args.multi_latent_attention,
    }
    if engine:
        return specs.get_gpt_layer_with_transformer_engine_spec(**common)
    return specs.get_gpt_layer_local_spec(**common, normalization=args.normalization)


def build(
    args: Any,
    config: Any,
    *,
    vocab_size: int,
    pre_process: bool = True,
    post_process: bool = True,
    mtp: bool = False,
    vp_stage: int | None = None,
) -> Any:
    """Return a real ``GPTModel``.

    Args:
        vocab_size: Padded for the current tensor-parallel size.
        pre_process: Whether it starts with the embedding.
        post_process: Whether it ends with the output layer and the loss.
        mtp: Whether it has the multi-token-prediction layers of ``args``.
        vp_stage: Which virtual stage it is; None without virtual stages.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    mtp_spec = None
    if mtp and post_process and args.mtp_num_layers:
        engine = args.transformer_impl == "transformer_engine"
        mtp_spec = specs.get_gpt_mtp_block_spec(
            config, layer_spec(args, config), use_transformer_engine=engine
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(args, config, vp_stage),
        vocab_size=vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        mtp_block_spec=mtp_spec,
        vp_stage=vp_stage,
    )


def parsed_arguments(words: list[str]) -> Any:
    """Return Megatron's parsed and validated arguments for ``words``, for pieces of a model.

    An optimizer's cost does not depend on its learning rate, but without one it is not made.
    """
    import sys

    from megatron.training import arguments

    before = sys.argv
    sys.argv = [before[0], *words]
    try:
        args = arguments.parse_args(ignore_unknown_args=True)
        if args.lr is None:
            args.lr = 1e-4
        arguments.validate_args(args)
    finally:
        sys.argv = before
    return args
