"""Operators of each unit: floating-point operations, bytes moved, activations kept.

Counts per micro-batch on one rank. The activation counts follow the tensors that Megatron's layers
keep for their backward pass (Korthikanti et al. 2022, table 2, with group-query attention, gated
MLPs and unfused or fused attention told apart); profiles correct them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_memx.cost.units import CHUNK, EMBEDDING, HEAD, LAYER, MASK, MOE_LAYER, MTP, UnitKey
from megatron_memx.model import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitWork:
    """Work of one unit.

    Args:
        matmul_flops: Operations of matrix products in the forward pass; the backward pass has
            twice as many.
        moved_bytes: Bytes that element-wise operators read and write in the forward pass.
        recomputed_flops: Matrix operations that the backward pass repeats.
        recomputed_bytes: Bytes that it moves again.
        operators: Kernels of the forward pass.
        linear_saved_bytes: Kept bytes that grow with the tokens.
        quadratic_saved_bytes: Kept bytes that grow with the square of the sequence.
        input_bytes: Bytes of the unit's input.
        working_bytes: Largest temporary tensors alive at once.
        reduced_bytes: Bytes that tensor parallelism reduces in the forward pass.
    """

    matmul_flops: float
    moved_bytes: float
    recomputed_flops: float
    recomputed_bytes: float
    operators: int
    linear_saved_bytes: float
    quadratic_saved_bytes: float
    input_bytes: float
    working_bytes: float
    reduced_bytes: float


_CHUNK_WORK = UnitWork(
    matmul_flops=0.0,
    moved_bytes=0.0,
    recomputed_flops=0.0,
    recomputed_bytes=0.0,
    operators=4,
    linear_saved_bytes=0.0,
    quadratic_saved_bytes=0.0,
    input_bytes=0.0,
    working_bytes=0.0,
    reduced_bytes=0.0,
)


_NO_WORK = replace(_CHUNK_WORK, operators=0)


def unit_work(model: ModelShape, key: UnitKey, *, element_bytes: int) -> UnitWork:
    """Return the work of ``key`` for ``model`` with activations of ``element_bytes``."""
    if key.unit == CHUNK:
        return _CHUNK_WORK
    if key.unit == MASK:
        return _NO_WORK
    if key.unit == EMBEDDING:
        return _embedding(model, key, element_bytes)
    if key.unit == HEAD:
        return _head(model, key, element_bytes)
    layer = _layer(model, key, element_bytes)
    if key.unit != MTP:
        return layer
    head = _head(model, key, element_bytes)
    tokens = key.micro_batch_size * key.seq_length
    joined = 4.0 * tokens * model.hidden_size**2 / key.tp
    return UnitWork(
        matmul_flops=layer.matmul_flops + head.matmul_flops + joined,
        moved_bytes=layer.moved_bytes + head.moved_bytes,
        recomputed_flops=layer.recomputed_flops,
        recomputed_bytes=layer.recomputed_bytes,
        operators=layer.operators + head.operators + 4,
        linear_saved_bytes=layer.linear_saved_bytes
        + head.linear_saved_bytes
        + 4 * layer.input_bytes,
        quadratic_saved_bytes=layer.quadratic_saved_bytes,
        input_bytes=layer.input_bytes,
        working_bytes=max(layer.working_bytes, head.working_bytes),
        reduced_bytes=layer.reduced_bytes,
    )


def _embedding(model: ModelShape, key: UnitKey, element: int) -> UnitWork:
    tokens = key.micro_batch_size * key.seq_length
    hidden_bytes = tokens * model.hidden_size * element
    dropout = tokens * model.hidden_size * (model.hidden_dropout > 0)
    return UnitWork(
        matmul_flops=0.0,
        moved_bytes=4.0 * hidden_bytes,
        recomputed_flops=0.0,
        recomputed_bytes=0.0,
        operators=4,
        linear_saved_bytes=float(dropout + 8 * tokens),
        quadratic_saved_bytes=0.0,
        input_bytes=8.0 * tokens,
        # The backward pass fills a gradient of the whole table.
        working_bytes=float(
            hidden_bytes + model.padded_vocab_size(key.tp) // key.tp * model.hidden_size * element
        ),
        reduced_bytes=float(hidden_bytes * (key.tp > 1)),
    )


def _head(model: ModelShape, key: UnitKey, element: int) -> UnitWork:
    tokens = key.micro_batch_size * key.seq_length
    vocab = model.padded_vocab_size(key.tp) // key.tp
    hidden_bytes = tokens * model.hidden_size * element
    logits = tokens * vocab
    return UnitWork(
        matmul_flops=2.0 * tokens * model.hidden_size * vocab,
        moved_bytes=4.0 * hidden_bytes + 5.0 * logits * 4,
        recomputed_flops=0.0,
        recomputed_bytes=0.0,
        operators=12,
        # Norm input and output, and the softmax that the loss keeps in single precision.
        linear_saved_bytes=2.0 * hidden_bytes + logits * (4.0 + (element == 2) * 0.0),
        quadratic_saved_bytes=0.0,
        input_bytes=float(hidden_bytes),
        working_bytes=logits * (element + 4.0),
        reduced_bytes=float(hidden_bytes * (key.tp > 1)),
    )


def _layer(model: ModelShape, key: UnitKey, element: int) -> UnitWork:
    b, s, tp = key.micro_batch_size, key.seq_length, key.tp
    tokens, h = b * s, model.hidden_size
    spread = tp if key.sequence_parallel else 1
    if model.mla is not None:
        head_q = model.mla.qk_head_dim + model.mla.qk_pos_emb_head_dim
        query = model.num_attention_heads * head_q
        value = model.num_attention_heads * model.mla.v_head_dim
        key_value = query + value
        projections = model.layer_parameters(0).dense - _mlp_weights(model, model.ffn_hidden_size)
    else:
        query = value = model.num_attention_heads * model.kv_channels
        key_value = 2 * model.num_query_groups * model.kv_channels
        projections = h * (query + key_value) + query * h
    heads = model.num_attention_heads / tp
    full_sequence = s * key.cp
    scores = b * heads * s * full_sequence
    attention_flops = 2.0 * scores * (query + value) / model.num_attention_heads
    flash = model.flash_attention
    ffn, expert_tokens, router = _ffn(model, key, tokens)
    gated = 2 if model.swiglu else 1
    mlp_flops = 2.0 * expert_tokens * h * ffn * (gated + 1)
    flops = 2.0 * tokens * projections / tp + attention_flops + mlp_flops + router
    # Score-sized tensors: product, scaled and masked, softmax, dropout; a fused kernel keeps none.
    score_passes = 0.0 if flash else 8.0
    moved = (
        12.0 * tokens * h * element / spread
        + 4.0 * expert_tokens * ffn * (gated + 1) * element
        + score_passes * scores * element
    )
    hidden = tokens * h * element / spread
    masks = 2.0 * tokens * h / spread * (model.hidden_dropout > 0)
    attention_saved = tokens * (query + key_value + value) / tp * element
    mlp_saved = expert_tokens * ffn * (gated + 1) * element
    # Both norms' inputs and outputs; the outputs are gathered for the products without SP.
    linear = 4.0 * hidden + masks + attention_saved + mlp_saved
    if key.unit == MOE_LAYER:
        linear += 2.0 * expert_tokens * h * element  # tokens as sent to and returned by experts
    score_saved = 0.0 if flash else scores * (2.0 * element + (model.attention_dropout > 0))
    recompute_flops, recompute_bytes = 0.0, 0.0
    if key.recompute == "full":
        recompute_flops, recompute_bytes = flops, moved
        saved_linear, saved_scores = tokens * h * element / spread, 0.0
    elif key.recompute == "selective":
        saved_linear, saved_scores = linear, score_saved
        if "core_attn" in key.modules:
            recompute_flops += attention_flops
            recompute_bytes += score_passes * scores * element
            saved_scores = 0.0
        if "mlp" in key.modules or "moe" in key.modules:
            recompute_flops += mlp_flops
            saved_linear -= mlp_saved
    else:
        saved_linear, saved_scores = linear, score_saved
    working = max(2.0 * hidden, 2.0 * scores * element * (not flash), mlp_saved)
    if key.recompute == "full":
        working += linear + score_saved
    elif "core_attn" in key.modules:
        working += score_saved
    return UnitWork(
        matmul_flops=flops,
        moved_bytes=moved,
        recomputed_flops=recompute_flops,
        recomputed_bytes=recompute_bytes,
        operators=24 if flash else 34,
        linear_saved_bytes=saved_linear,
        quadratic_saved_bytes=saved_scores,
        input_bytes=tokens * h * element / spread,
        working_bytes=working,
        reduced_bytes=2.0 * tokens * h * element * (tp > 1),
    )


def _mlp_weights(model: ModelShape, ffn: int) -> int:
    return model.hidden_size * ffn * (3 if model.swiglu else 2)


def _ffn(model: ModelShape, key: UnitKey, tokens: int) -> tuple[float, float, float]:
    """Return (hidden size on this rank, tokens that pass it, router operations)."""
    moe = model.moe
    if key.unit not in (MOE_LAYER, MTP) or moe is None:
        return model.ffn_hidden_size / key.tp, float(tokens), 0.0
    # Routed activations do not shrink with ep: a rank gets tokens of ep ranks for 1/ep of experts.
    routed = float(tokens * moe.router_topk)
    shared = moe.shared_expert_intermediate_size / moe.ffn_hidden_size
    router = 2.0 * tokens * model.hidden_size * moe.num_experts
    return moe.ffn_hidden_size / key.etp, routed + shared * tokens, router


def layer_unit(model: ModelShape, layer: int) -> str:
    """Return the unit name of decoder layer ``layer``."""
    return MOE_LAYER if model.is_moe_layer(layer) else LAYER
