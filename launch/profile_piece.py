"""One piece of a pipeline for the profile: a real first, middle or last stage, and its passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_memx.parallel import Recompute
from megatron_memx.profile.design import FIRST, LAST, ProfilePoint

if TYPE_CHECKING:
    from megatron_memx.launch.profile_worker import Worker


class Piece:
    """A real first, middle or last stage and one micro-batch for it."""

    def __init__(self, worker: Worker, point: ProfilePoint) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.transformer.module import Float16Module
        from megatron_memx.patches.model import build, transformer_config

        torch, args = worker.torch, worker.args
        self._worker = worker
        self._point = point
        config = transformer_config(args, num_layers=point.num_layers, policy=_policy(point))
        self._pre, self._post = point.part == FIRST, point.part == LAST
        model = build(
            args,
            config,
            vocab_size=args.padded_vocab_size,
            pre_process=self._pre,
            post_process=self._post,
        )
        if worker.on_device:
            model.cuda()
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        if args.fp16 or args.bf16:
            model = Float16Module(config, model)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
            overlap_grad_reduce=False,
            use_distributed_optimizer=False,
        )
        self.module = DistributedDataParallel(config, ddp, model)
        self.module.train()
        b, s, h = point.micro_batch_size, point.seq_length, args.hidden_size
        rows = s // point.tp if point.sequence_parallel else s
        dtype = config.pipeline_dtype or config.params_dtype
        self._hidden = ((rows, b, h), dtype)
        device = worker.device
        self._tokens = torch.randint(0, worker.task["vocab_size"], (b, s), device=device)
        self._positions = torch.arange(s, device=device).unsqueeze(0).expand(b, s)
        self._mask = torch.ones((1, 1, s, s), device=device, dtype=torch.bool).triu(1)

    def _input(self) -> Any:
        if self._pre:
            return None
        torch = self._worker.torch
        shape, dtype = self._hidden
        tensor = torch.empty(shape, dtype=dtype, device=self._worker.device).normal_()
        return tensor.requires_grad_()

    def _forward(self, hidden: Any) -> Any:
        if not self._pre:
            _unwrap(self.module).set_input_tensor(hidden)
        labels = self._tokens if self._post else None
        output = self.module(self._tokens, self._positions, self._mask, labels=labels)
        return output.float().mean() if self._post else output

    def _gradient(self, output: Any) -> Any:
        return None if self._post else self._worker.torch.ones_like(output)

    def run_pass(self) -> tuple[float, float]:
        """Run forward and backward once and return their seconds."""
        worker = self._worker
        hidden = self._input()
        worker.evict()
        begin = worker.now()
        output = self._forward(hidden)
        middle = worker.now()
        worker.evict()
        resumed = worker.now()
        worker.torch.autograd.backward(output, grad_tensors=self._gradient(output))
        return middle - begin, worker.now() - resumed

    def memory(self) -> tuple[int, int]:
        """Return (bytes held after the forward pass, most bytes needed above that)."""
        worker = self._worker
        if not self._pre:
            _unwrap(self.module).set_input_tensor(None)  # drop the last pass's input
        with worker.tracker() as tracker:
            before = tracker.current_bytes
            hidden = self._input()
            output = self._forward(hidden)
            own = 0 if self._post else output.numel() * output.element_size()
            # Megatron frees a stage's output once it is sent.
            saved = tracker.current_bytes - before - own
            worker.torch.autograd.backward(output, grad_tensors=self._gradient(output))
            peak = tracker.peak_bytes
        del hidden, output
        return max(0, saved), max(0, peak - before - max(0, saved))


def _policy(point: ProfilePoint) -> Recompute:
    if point.recompute == "full":
        return Recompute.full("uniform", 1)
    if point.recompute == "selective":
        return Recompute.selective(*point.modules)
    return Recompute()


def _unwrap(module: Any) -> Any:
    while hasattr(module, "module"):
        module = module.module
    return module
