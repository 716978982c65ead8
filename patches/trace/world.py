"""A process that believes it is one rank of a cluster: fake collectives, fake tensors.

torch's fake process group answers collectives without partners; fake tensors have shapes and
storages without memory. Values do not exist, so that the few places where Megatron reads one get a
fixed answer, and routers a balanced one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron_memx.patches.platform.memory import StorageTracker
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class FixedAnswers(TorchDispatchMode):
    """Answers reads of values: 1 for numbers, False for flags, every routed token for masks."""

    def __init__(self, topk: int) -> None:
        super().__init__()
        self._topk = topk

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, or answer for it."""
        aten = torch.ops.aten
        tensors = [item for item in tree_iter((args, kwargs)) if isinstance(item, torch.Tensor)]
        if tensors and not any(isinstance(item, FakeTensor) for item in tensors):
            # Real counts, of balanced tokens: they stay real, so that Python may read them.
            with unset_fake_temporarily():
                return func(*args, **(kwargs or {}))
        if func is aten._local_scalar_dense.default:
            dtype = args[0].dtype
            if dtype == torch.bool:
                return False
            return 1.0 if dtype.is_floating_point else 1
        if func is aten.masked_select.default:
            # Megatron selects by a map of (experts, tokens): topk entries of each token are set.
            tokens = args[1].shape[-1]
            return args[0].new_empty((tokens * self._topk,))
        return func(*args, **(kwargs or {}))


class Patched:
    """Replaces attributes for the life of a trace process."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Put ``value`` at ``owner.name``; raise if there is no such name."""
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            owner, name, value = self._undo.pop()
            setattr(owner, name, value)


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as one kernel: only what outlives it is counted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with StorageTracker.one_kernel():
            return function(*args, **kwargs)

    call.__name__ = getattr(function, "__name__", "fused")
    call.__doc__ = function.__doc__
    return call


def import_megatron() -> None:
    """Import Megatron with every function that it compiles made one kernel."""
    original = torch.compile
    torch.compile = lambda function=None, **_k: fused(function) if function else fused
    try:
        import megatron.core.models.gpt
        import megatron.core.transformer.moe.moe_layer
        import megatron.training.training  # noqa: F401
    finally:
        torch.compile = original


def start(rank: int, world_size: int) -> None:
    """Become ``rank`` of ``world_size`` ranks; what stood before is forgotten."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_global_memory_buffer()
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=world_size
    )


def install(patched: Patched, *, engine: bool, flash: bool, fused_rope: bool) -> None:
    """Put the stand-ins into Megatron.

    Args:
        engine: The job uses Transformer Engine: its gathers are temporary, and its softmax fused.
        flash: The job's attention keeps no scores.
        fused_rope: Rotary embeddings are one kernel.
    """
    import importlib

    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.fusions import fused_softmax
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer.moe import token_dispatcher
    from megatron_memx.patches.trace import kernels

    for module in (
        "megatron.core.models.backends",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.transformer.transformer_block",
    ):
        found = importlib.import_module(module)
        for name in ("LNImpl", "LayerNormImpl", "WrappedTorchNorm"):
            if hasattr(found, name):
                patched.set(found, name, kernels.Norm)
    if flash or engine:
        attention = kernels.FlashAttention if flash else kernels.UnfusedAttention
        patched.set(backends.LocalSpecProvider, "core_attention", lambda _self: attention)
        if hasattr(gpt_layer_specs, "DotProductAttention"):
            patched.set(gpt_layer_specs, "DotProductAttention", attention)
    patched.set(fused_softmax.FusedScaleMaskSoftmax, "get_batch_per_block", lambda *_a: 1)
    patched.set(param_and_grad_buffer, "_coalescing_manager", _one_by_one)
    patched.set(fused_softmax, "ScaledUpperTriangMaskedSoftmax", kernels.FusedCausalSoftmax)
    patched.set(layers, "_grad_accum_fusion_available", True)
    layers.fused_weight_gradient_mlp_cuda = kernels.WeightGradients
    tracker = random.get_cuda_rng_tracker()
    patched.set(type(tracker), "fork", lambda *_a, **_k: contextlib.nullcontext())
    patched.set(torch.distributed, "all_gather_object", _gather_own)
    # The fused optimizers work in place: only their states outlive a step.
    patched.set(clip_grads, "l2_norm_impl", lambda *_a: (torch.empty(1), None))
    for module in (clip_grads, optimizer):
        patched.set(module, "multi_tensor_scale_impl", _scale_in_place)
    for name in ("Adam", "AdamW", "SGD"):
        owner = getattr(torch.optim, name)
        patched.set(owner, "step", fused(owner.step))
    patched.set(torch.nn.Module, "bfloat16", lambda m: kernels.in_type(m, torch.bfloat16))
    patched.set(torch.nn.Module, "half", lambda m: kernels.in_type(m, torch.float16))
    patched.set(torch.nn.functional, "dropout", kernels.dropout)
    if engine:
        buffer = type(parallel_state.get_global_memory_buffer())
        patched.set(buffer, "get_tensor", _fresh_tensor)
    if fused_rope:
        from megatron.core.transformer import attention as attention_module

        patched.set(attention_module, "apply_rotary_pos_emb", kernels.fused_rotary)
    patched.set(token_dispatcher, "maybe_move_tensor_to_cpu", _plain)
    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    patched.set(dispatcher, "preprocess", _balanced(dispatcher.preprocess, token_dispatcher))


def _scale_in_place(_chunk: int, _flag: Any, lists: Any, _scale: float) -> None:
    del lists


def _plain(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return sizes as the numbers that a copy to the host would give."""
    if not (as_numpy and torch.is_tensor(tensor)):
        return tensor
    with unset_fake_temporarily():
        return tensor.numpy()


class _Done:
    def wait(self) -> None:
        """Return at once: a fake collective is over when it has begun."""


@contextlib.contextmanager
def _one_by_one(*_args: Any, **_kwargs: Any) -> Iterator[_Done]:
    """Stand for torch's coalescing manager, whose collectives fake tensors cannot run."""
    yield _Done()


def _gather_own(objects: list[Any], own: Any, group: Any = None) -> None:
    objects[:] = [own] * len(objects)


def _fresh_tensor(_self: Any, shape: Any, dtype: Any, _name: str, *_a: Any, **_k: Any) -> Any:
    return torch.empty(tuple(shape), dtype=dtype)


def _balanced(original: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Give the dispatcher a real map in which every expert gets equally many tokens."""

    def preprocess(self: Any, routing_map: Any) -> Any:
        tokens, experts = routing_map.shape
        topk = self.config.moe_router_topk
        gather = module.gather_from_sequence_parallel_region
        with unset_fake_temporarily(), StorageTracker.one_kernel():
            first = torch.arange(tokens)[:, None] * topk + torch.arange(topk)[None, :]
            balanced = torch.zeros((tokens, experts), dtype=torch.bool)
            balanced.scatter_(1, first % experts, True)
            module.gather_from_sequence_parallel_region = _same_everywhere
            try:
                return original(self, balanced)
            finally:
                module.gather_from_sequence_parallel_region = gather

    return preprocess


def _same_everywhere(tensor: Any, group: Any, **_rest: Any) -> Any:
    return torch.cat([tensor] * group.size())


@contextlib.contextmanager
def fake_tensors(topk: int) -> Iterator[StorageTracker]:
    """Enter fake tensors, fixed answers and a tracker of live bytes."""
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        FixedAnswers(topk),
        StorageTracker() as tracker,
    ):
        yield tracker
