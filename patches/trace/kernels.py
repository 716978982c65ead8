"""Stand-ins for kernels that need a GPU: what they keep, what they need, and nothing computed.

A trace counts bytes, so that a kernel is described by the tensors that its forward pass keeps and
its passes allocate. Each class names the kernel that it stands for. Everything else in a trace is
Megatron's own code.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        tokens = x.shape[:-1]
        statistics = [torch.empty(tokens, dtype=torch.float32)]
        if bias is not None:
            statistics.append(torch.empty(tokens, dtype=torch.float32))
        ctx.save_for_backward(x, weight, bias, *statistics)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *_ = ctx.saved_tensors
        grad_bias = None if bias is None else torch.empty_like(bias)
        return torch.empty_like(x), torch.empty_like(weight), grad_bias


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm of Apex or Transformer Engine.

    Keeps its input and, in single precision, the inverse deviation (and the mean) of each token.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_rest: Any) -> None:
        super().__init__()
        self.eps = eps
        layer_norm = config.normalization == "LayerNorm"

        def parameter() -> torch.nn.Parameter:
            made = torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
            made.sequence_parallel = config.sequence_parallel
            return made

        self.weight = parameter()
        self.bias = parameter() if layer_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like ``x``."""
        result: Tensor = _NormFunction.apply(x, self.weight, self.bias)
        return result


class _FlashFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # The kernel keeps its inputs, its output and the log-sum-exp of each row.
        out = torch.empty((*query.shape[:3], value.shape[-1]), dtype=query.dtype)
        rows = torch.empty((query.shape[0], *query.shape[1:3]), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, rows = ctx.saved_tensors
        # Gradients of the queries are summed in single precision, beside a sum for each row.
        sums = torch.empty(query.shape, dtype=torch.float32), torch.empty_like(rows)
        result = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del sums
        return result


class FlashAttention(torch.nn.Module):
    """Flash attention under Transformer Engine: scores are never held.

    Transformer Engine lays queries, keys and values out as (b, s, heads, channels) and the output
    back as (s, b, heads, channels); with a micro-batch of 1 that moves nothing.
    """

    def __init__(self, config: Any, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()
        self.config = config

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_a: Any, **_k: Any) -> Tensor:
        """Return the context, [s, b, heads of this rank x channels]."""
        laid = [item.transpose(0, 1).contiguous() for item in (query, key, value)]
        out: Tensor = _FlashFunction.apply(*laid)
        out = out.transpose(0, 1).contiguous()
        return out.reshape(*out.shape[:2], -1)


class UnfusedAttention(DotProductAttention):
    """Transformer Engine's unfused attention: as Megatron's, on contiguous inputs."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> Any:
        """Return the context, [s, b, heads of this rank x channels]."""
        laid = [item.contiguous() for item in (query, key, value)]
        return super().forward(*laid, *rest, **kwargs)


class _CausalSoftmaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: Any) -> Tensor:
        result = torch.empty_like(scores)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # The kernel writes the gradient over the one that it gets.
        return grads[0], None


class FusedCausalSoftmax:
    """Megatron's (and Transformer Engine's) scaled upper-triangular masked softmax."""

    @staticmethod
    def apply(scores: Tensor, scale: Any) -> Tensor:
        """Return probabilities; they are kept, the scores are not."""
        result: Tensor = _CausalSoftmaxFunction.apply(scores, scale)
        return result


class _RotaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(grads[0])


def fused_rotary(x: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """The fused rotary embedding: keeps the angles only, which all layers share."""
    result: Tensor = _RotaryFunction.apply(x)
    return result


class _DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty(x.shape, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(grads[0])


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """The fused dropout of CUDA: keeps one byte an element."""
    if p == 0 or not training:
        return x
    result: Tensor = _DropoutFunction.apply(x)
    return result


def in_type(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Convert a module's floating-point parameters and buffers, as ``module.to(dtype)`` does.

    Fake parameters cannot be swapped in place while anything refers to them.
    """
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None or not parameter.is_floating_point() or parameter.dtype == dtype:
                continue
            made = torch.nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            part._parameters[name] = made
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
    return module


class WeightGradients:
    """Apex's fused_weight_gradient_mlp_cuda: adds a product to the accumulated gradient."""

    @staticmethod
    def wgrad_gemm_accum_fp32(*_args: Any) -> None:
        """Allocate nothing."""

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
