"""Pre-train a GPT with Megatron from PyPI alone, in Megatron's own conventions.

Megatron-LM's repository has a ``pretrain_gpt.py`` with more options; its wheel has none. This one
runs on megatron-core 0.17, 0.18 and 0.19, with or without MemX:

    memx-torchrun --nproc-per-node 2 examples/pretrain_gpt.py --auto-parallel <Megatron arguments>
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import arguments, get_args, pretrain, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build this rank's part of the model."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    engine = args.transformer_impl == "transformer_engine"
    if args.num_experts:
        spec = specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=engine,
            normalization=args.normalization,
            vp_stage=vp_stage,
        )
    elif engine:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=args.qk_layernorm, multi_latent_attention=args.multi_latent_attention
        )
    else:
        spec = specs.get_gpt_layer_local_spec(
            qk_layernorm=args.qk_layernorm,
            multi_latent_attention=args.multi_latent_attention,
            normalization=args.normalization,
        )
    mtp_spec = None
    if args.mtp_num_layers:
        mtp_spec = specs.get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=engine, vp_stage=vp_stage
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
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
        pg_collection=pg_collection,
    )


def get_batch(data_iterator: Any, vp_stage: int | None) -> tuple[Any, Any, Any, Any, Any]:
    """Return tokens, labels, loss mask, attention mask and positions; Nones in the middle."""
    ends = (
        mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    )
    if not any(ends):
        return None, None, None, None, None
    data = next(data_iterator) if mpu.get_tensor_model_parallel_rank() == 0 else None
    whole = tensor_parallel.broadcast_data(["tokens", "labels", "position_ids"], data, torch.int64)
    loss_mask = tensor_parallel.broadcast_data(["loss_mask"], data, torch.float32)["loss_mask"]
    length = whole["tokens"].size(1)
    attention_mask = torch.ones(
        (1, 1, length, length), dtype=torch.bool, device=torch.cuda.current_device()
    ).triu(1)
    return whole["tokens"], whole["labels"], loss_mask, attention_mask, whole["position_ids"]


def loss_func(loss_mask: Any, output: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the summed loss, the number of tokens and both for the log."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    count = mask.sum().clone().detach().to(torch.int)
    return loss, count, {"lm loss": torch.cat([loss.clone().detach().view(1), count.view(1)])}


def forward_step(data_iterator: Any, model: Any) -> tuple[Any, Any]:
    """Run one micro-batch forward."""
    inner = model
    while not hasattr(inner, "vp_stage"):
        inner = inner.module
    tokens, labels, loss_mask, attention_mask, positions = get_batch(data_iterator, inner.vp_stage)
    output = model(tokens, positions, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask)


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Build the training, validation and test sets on the ranks that read data."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
    )

    def reads_data() -> bool:
        ends = (
            mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        )
        return any(ends) and mpu.get_tensor_model_parallel_rank() == 0

    print_rank_0("building the datasets")
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, reads_data, config).build()


def main() -> None:
    """Train; the order of ``pretrain``'s parameters tells the release."""
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    defaults = {"tokenizer_type": "NullTokenizer"}
    first = next(iter(inspect.signature(pretrain).parameters))
    common = {
        "train_valid_test_dataset_provider": datasets_provider,
        "model_provider": model_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if first == "train_valid_test_dataset_provider":  # 0.17
        pretrain(**common, args_defaults=defaults)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    args = arguments.parse_and_validate_args(args_defaults=defaults)
    pretrain(pretrain_cfg_container_from_args(args), **common)


if __name__ == "__main__":
    main()
