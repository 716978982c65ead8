"""Trace one rank's pipeline stage: real model, real schedule, real optimizer; no memory used."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron_memx.patches.trace import world

from megatron_memx.profile.traced import Traced


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceTask:
    """What to trace.

    Args:
        words: Megatron's arguments, sizes and layout included, as the user would write them.
        rank: Global rank to be.
        world_size: Ranks of the job.
        padded_vocab_size: Vocabulary as padded for its tensor-parallel size.
        engine, flash, fused_rope: See :func:`megatron_memx.patches.trace.world.install`.
        num_microbatches: Micro-batches to run; enough of them to fill the pipeline.
    """

    words: tuple[str, ...]
    rank: int
    world_size: int
    padded_vocab_size: int
    num_microbatches: int
    engine: bool = False
    flash: bool = False
    fused_rope: bool = False


def trace(task: TraceTask) -> Traced:
    """Trace a rank; the process is that rank until the next trace."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.training import global_vars
    from megatron_memx.patches.model import parsed_arguments

    logging.getLogger("megatron.core").setLevel(logging.WARNING)
    world.start(task.rank, task.world_size)
    args = parsed_arguments(list(task.words))
    args.padded_vocab_size = task.padded_vocab_size
    global_vars.unset_global_variables()
    global_vars.set_args(args)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    patched = world.Patched()
    try:
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        world.install(patched, engine=task.engine, flash=task.flash, fused_rope=task.fused_rope)
        return _run(args, task)
    finally:
        patched.undo()
        gc.collect()


def _run(args: Any, task: TraceTask) -> Traced:
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.training.training import get_megatron_optimizer_config, get_model

    gc.collect()
    with world.fake_tensors(args.moe_router_topk or 1) as tracker:
        before = tracker.current_bytes
        chunks = get_model(lambda *a, **k: _provide(args, *a, **k))
        weights = list(dict.fromkeys(p for chunk in chunks for p in chunk.parameters()))
        parameters = sum(p.numel() * p.element_size() for p in weights)
        gradients = tracker.current_bytes - before - parameters
        config, overrides = get_megatron_optimizer_config(args)
        optimizer = get_megatron_optimizer(
            config, chunks, config_overrides=overrides, use_gloo_process_groups=False
        )
        run = _Iteration(args, chunks, optimizer, task.num_microbatches)
        run.passes()
        run.step()
        gc.collect()
        resting = tracker.current_bytes - before
        tracker.reset_peak()
        run.passes()
        passes = tracker.peak_bytes - before
        tracker.reset_peak()
        run.step()
        return Traced(
            parameter_bytes=parameters,
            gradient_bytes=gradients,
            optimizer_bytes=resting - parameters - gradients,
            resting_bytes=resting,
            pass_peak_bytes=passes,
            step_peak_bytes=tracker.peak_bytes - before,
            num_parameters=sum(p.numel() for p in weights),
        )


class _Iteration:
    """One iteration as ``megatron.training.training.train_step`` runs it."""

    def __init__(self, args: Any, chunks: Sequence[Any], optimizer: Any, num: int) -> None:
        self._args, self._chunks, self._optimizer, self._num = args, list(chunks), optimizer, num

    def passes(self) -> None:
        """Run the schedule's forward and backward passes, then the gradient reduction."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.utils import get_model_config

        args = self._args
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        config = get_model_config(self._chunks[0])
        config.grad_scale_func = self._optimizer.scale_loss
        config.finalize_model_grads_func = finalize_model_grads
        get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=[iter(())] * len(self._chunks) if len(self._chunks) > 1 else iter(()),
            model=self._chunks,
            num_microbatches=self._num,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )

    def step(self) -> None:
        """Run the optimizer."""
        self._optimizer.step()

    def _forward_step(self, _data: Any, model: Any, *_rest: Any) -> Any:
        args = self._args
        inner = model
        while hasattr(inner, "module"):
            inner = inner.module
        first, last = inner.pre_process, inner.post_process
        tokens = positions = labels = mask = weights = None
        b, s = args.micro_batch_size, args.seq_length // args.context_parallel_size
        if first or last or args.mtp_num_layers:
            tokens = torch.empty((b, s), dtype=torch.int64)
            positions = torch.empty((b, s), dtype=torch.int64)
            labels = torch.empty((b, s), dtype=torch.int64) if last else None
            weights = torch.empty((b, s), dtype=torch.float32)
            if args.create_attention_mask_in_dataloader:
                mask = torch.empty((b, 1, s, args.seq_length), dtype=torch.bool)
        output = model(tokens, positions, mask, labels=labels)

        def loss(losses: Any) -> Any:
            assert weights is not None, "only the last stage asks for a loss"
            total = torch.sum(losses.view(-1).float() * weights.view(-1).float())
            count = torch.empty((), dtype=torch.int32)
            return total, count, {"lm loss": total.detach().clone().view(1)}

        return output, loss


def _provide(
    args: Any,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    **_rest: Any,
) -> Any:
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron_memx.patches.model import build

    return build(
        args,
        core_transformer_config_from_args(args),
        vocab_size=args.padded_vocab_size,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        mtp=True,
    )
