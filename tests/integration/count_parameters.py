"""Build real GPT models for lists of Megatron words (JSON on stdin) and count what a rank holds.

Ranks other than 0 are fake: no message is sent while a model is built.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from megatron_memx.platforms import prepare_environment

prepare_environment("cpu")


def count(case: dict[str, Any]) -> dict[str, int]:
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron_memx.patches.model import build, parsed_arguments, transformer_config

    from megatron_memx.parallel import Recompute

    tp, ep, etp = case["tp"], case["ep"], case["etp"]
    world = max(tp, ep * etp)
    os.environ.update({"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_RANK": "0"})
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )
    words = [*case["words"]]
    words += ["--tensor-model-parallel-size", str(tp), "--micro-batch-size", "1"]
    words += ["--expert-model-parallel-size", str(ep), "--expert-tensor-parallel-size", str(etp)]
    before, sys.stdout = sys.stdout, sys.stderr
    try:
        args = parsed_arguments(words)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        config = transformer_config(args, policy=Recompute())
        model = build(args, config, vocab_size=case["padded_vocab_size"], mtp=True)
    finally:
        sys.stdout = before
    found = {"total": 0, "expert": 0}
    for name, parameter in model.named_parameters():
        found["total"] += parameter.numel()
        if not getattr(parameter, "allreduce", True):
            found["expert"] += parameter.numel()
        if name.startswith("decoder.layers."):
            key = "layer" + name.split(".")[2]
            found[key] = found.get(key, 0) + parameter.numel()
        if name.startswith("mtp."):
            found["mtp"] = found.get("mtp", 0) + parameter.numel()
    return found


def without_core_attention() -> None:
    """Let latent attention be built without Transformer Engine: its kernel has no parameters."""
    import torch
    from megatron.core.models.backends import LocalSpecProvider

    class NoParameters(torch.nn.Module):
        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            super().__init__()

    LocalSpecProvider.core_attention = lambda _self: NoParameters


def main() -> None:
    from megatron_memx.patches.platform import cpu

    cpu.install()
    without_core_attention()
    print(json.dumps([count(case) for case in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
