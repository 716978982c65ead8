"""What upstream does with input that MemX refuses, each in a few seconds; prints JSON.

An outcome is ``hangs``, ``crashes``, ``accepted``, or the name of the error. A test compares them
with what the legality rules were written for, so that a release that mends one is noticed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

from megatron_memx.platforms import prepare_environment

prepare_environment("cpu")
ALARM_S = 8
_MEMORY_BYTES = 24 * 1024**3


def outcome(action: Callable[[], Any]) -> str:
    """Run ``action`` in a child of its own, which is killed when its time is up."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        try:
            action()
            text = "accepted"
        except BaseException as error:
            text = type(error).__name__
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    deadline = time.monotonic() + ALARM_S
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return os.read(reader, 100).decode() or "crashes"
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"


def config(**more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, **more}
    return TransformerConfig(**values)


def model(*, bias: bool = True, **more: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    built = config(
        add_bias_linear=bias,
        num_layers=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )
    # As MemX's own patch does: set after validation, before construction.
    for name, value in more.items():
        setattr(built, name, value)
    return GPTModel(
        config=built,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=32,
        max_sequence_length=8,
    )


def train(gpt: Any) -> None:
    import torch

    gpt.train()
    tokens = torch.zeros((1, 8), dtype=torch.long)
    positions = torch.arange(8).unsqueeze(0)
    mask = torch.ones((1, 1, 8, 8), dtype=torch.bool).triu(1)
    gpt(tokens, positions, mask, labels=tokens).mean().backward()


def cases() -> dict[str, Callable[[], Any]]:
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    full = {"recompute_granularity": "full", "recompute_method": "uniform"}

    def selective(module: str) -> dict[str, Any]:
        return {"recompute_granularity": "selective", "recompute_modules": [module]}

    def nested() -> None:
        PipelineParallelLayerLayout.parse_str_to_list("E((tt)*2|)*2L")

    def edge_larger_than_model() -> None:
        config(
            pipeline_model_parallel_size=2,
            pipeline_dtype=__import__("torch").float32,
            num_layers_in_last_pipeline_stage=6,
        )

    def sequence_parallel_norm() -> None:
        norm_config = config()
        norm_config.sequence_parallel = True
        WrappedTorchNorm(norm_config, 16)

    def selective_with_method() -> None:
        config(recompute_granularity="selective", recompute_method="uniform")

    def stated_split_is_a_fiction() -> None:
        layout = PipelineParallelLayerLayout.from_str("|Etttt|L|", 4)
        layout.validate_layer_layout(num_layers=4, mtp_num_layers=0)

    return {
        "uniform-0": lambda: train(model(**full, recompute_num_layers=0)),
        "mlp-bias": lambda: train(model(**selective("mlp"))),
        "mlp-no-bias": lambda: train(model(bias=False, **selective("mlp"))),
        "layernorm-without-te": lambda: train(model(**selective("layernorm"))),
        "core-attention": lambda: train(model(**selective("core_attn"))),
        "edge-larger-than-model": edge_larger_than_model,
        "sequence-parallel-norm": sequence_parallel_norm,
        "selective-with-method": selective_with_method,
        "nested-parentheses": nested,
        "empty-first-slot": stated_split_is_a_fiction,
    }


def main() -> None:
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron_memx.patches.platform import cpu

    cpu.install()
    os.environ.update(
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    print(json.dumps({name: outcome(action) for name, action in cases().items()}))


if __name__ == "__main__":
    main()
