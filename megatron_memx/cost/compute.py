"""Operators of each unit, for one micro-batch on a rank: matrix products, bytes moved, kernels."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_memx.cost.units import (
    CHUNK,
    EMBEDDING,
    HEAD,
    LAYER,
    MASK,
    MOE_LAYER,
    MTP,
    UnitKey,
)
from megatron_memx.model import ModelShape


@dataclass(frozen=True, slots=True)
class Product:
    """``count`` matrix products of (rows x inner) by (inner x columns).

    Args:
        fused: Whether it is part of an attention kernel that keeps its scores on chip.
    """

    rows: float
    inner: float
    columns: float
    count: float = 1.0
    fused: bool = False

    @property
    def flops(self) -> float:
        """Operations of the forward pass."""
        return 2.0 * self.count * self.rows * self.inner * self.columns


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitWork:
    """Work of one unit.

    Args:
        products: Matrix products of the forward pass; the backward pass has two for each.
        moved_bytes: Bytes that element-wise operators read and write in the forward pass.
        recomputed: Products that the backward pass repeats.
        recomputed_bytes: Bytes that it moves again.
        operators: Kernels of the forward pass.
        reduced_bytes: Bytes that tensor parallelism reduces in the forward pass.
        collectives: Collectives in which it does so.
    """

    products: tuple[Product, ...] = ()
    moved_bytes: float = 0.0
    recomputed: tuple[Product, ...] = ()
    recomputed_bytes: float = 0.0
    operators: int = 0
    reduced_bytes: float = 0.0
    collectives: int = 1

    @property
    def matmul_flops(self) -> float:
        """Operations of matrix products in the forward pass."""
        return sum(product.flops for product in self.products)

    @property
    def recomputed_flops(self) -> float:
        """Matrix operations that the backward pass repeats."""
        return sum(product.flops for product in self.recomputed)


def unit_work(model: ModelShape, key: UnitKey, *, element_bytes: int) -> UnitWork:
    """Return the work of ``key`` for ``model`` with activations of ``element_bytes``."""
    if key.unit == CHUNK:
        return UnitWork(operators=4)
    if key.unit == MASK:
        return UnitWork()
    if key.unit == EMBEDDING:
        return _embedding(model, key, element_bytes)
    if key.unit == HEAD:
        return _head(model, key, element_bytes)
    layer = _layer(model, key, element_bytes)
    if key.unit != MTP:
        return layer
    head = _head(model, key, element_bytes)
    joined = Product(
        key.micro_batch_size * key.seq_length, 2.0 * model.hidden_size, model.hidden_size / key.tp
    )
    return UnitWork(
        products=(*layer.products, *head.products, joined),
        moved_bytes=layer.moved_bytes + head.moved_bytes,
        recomputed=layer.recomputed,
        recomputed_bytes=layer.recomputed_bytes,
        operators=layer.operators + head.operators + 4,
        reduced_bytes=layer.reduced_bytes,
        collectives=layer.collectives,
    )


def _embedding(model: ModelShape, key: UnitKey, element: int) -> UnitWork:
    hidden_bytes = key.micro_batch_size * key.seq_length * model.hidden_size * element
    return UnitWork(
        moved_bytes=4.0 * hidden_bytes,
        operators=4,
        reduced_bytes=float(hidden_bytes * (key.tp > 1)),
    )


def _head(model: ModelShape, key: UnitKey, element: int) -> UnitWork:
    tokens = key.micro_batch_size * key.seq_length
    vocab = model.padded_vocab_size(key.tp) // key.tp
    hidden_bytes = tokens * model.hidden_size * element
    return UnitWork(
        products=(Product(tokens, model.hidden_size, vocab),),
        # Logits in single precision: read and written by the loss's maximum, exponent and sum.
        moved_bytes=4.0 * hidden_bytes + 5.0 * tokens * vocab * 4,
        operators=12,
        reduced_bytes=float(hidden_bytes * (key.tp > 1)),
    )


def _layer(model: ModelShape, key: UnitKey, element: int) -> UnitWork:
    b, s, tp = key.micro_batch_size, key.seq_length, key.tp
    tokens, h = b * s, model.hidden_size
    spread = tp if key.sequence_parallel else 1
    projections, query, value = _projections(model, key)
    heads = model.num_attention_heads / tp
    whole = s * key.cp
    flash = model.flash_attention
    # A fused kernel leaves out the half of the scores that the causal mask hides.
    seen = whole / 2 if flash else whole
    attention = (
        Product(s, query / model.num_attention_heads, seen, b * heads, flash),
        Product(s, seen, value / model.num_attention_heads, b * heads, flash),
    )
    mlp, wide_tokens, ffn = _mlp(model, key, tokens)
    # Score-sized tensors: product, scaled and masked, softmax, dropout; a fused kernel keeps none.
    scores = 0.0 if flash else 6.5 * b * heads * s * whole * element
    # Norms read and write, residual sums read twice; the activation reads its halves and writes.
    moved = (
        11.0 * tokens * h * element / spread
        + wide_tokens * ffn * (3 if model.swiglu else 2) * element
        + scores
    )
    products = (*projections, *attention, *mlp)
    recomputed: tuple[Product, ...] = ()
    again = 0.0
    if key.recompute == "full":
        recomputed, again = products, moved
    elif key.recompute == "selective":
        if "core_attn" in key.modules:
            recomputed, again = (*recomputed, *attention), again + scores
        if "mlp" in key.modules or "moe" in key.modules:
            recomputed = (*recomputed, *mlp)
    return UnitWork(
        products=products,
        moved_bytes=moved,
        recomputed=recomputed,
        recomputed_bytes=again,
        operators=24 if flash else 34,
        reduced_bytes=2.0 * tokens * h * element * (tp > 1),
        collectives=2,
    )


def _projections(model: ModelShape, key: UnitKey) -> tuple[tuple[Product, ...], float, float]:
    """Return the projections around attention, and the widths of all heads' queries and values."""
    tokens, h, tp = key.micro_batch_size * key.seq_length, model.hidden_size, key.tp
    mla = model.mla
    if mla is None:
        query = model.num_attention_heads * model.kv_channels
        key_value = 2 * model.num_query_groups * model.kv_channels
        into = Product(tokens, h, (query + key_value) / tp)
        return (into, Product(tokens, query / tp, h)), query, query
    query = model.num_attention_heads * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    value = model.num_attention_heads * mla.v_head_dim
    up = model.num_attention_heads * (mla.qk_head_dim + mla.v_head_dim)
    low = mla.q_lora_rank
    made = [Product(tokens, h, query / tp)]
    if low is not None:
        made = [Product(tokens, h, low), Product(tokens, low, query / tp)]
    made += [
        Product(tokens, h, mla.kv_lora_rank + mla.qk_pos_emb_head_dim),
        Product(tokens, mla.kv_lora_rank, up / tp),
        Product(tokens, value / tp, h),
    ]
    return tuple(made), query, value


def _mlp(model: ModelShape, key: UnitKey, tokens: int) -> tuple[tuple[Product, ...], float, float]:
    """Return the products of the MLP or of a rank's experts, the rows that pass it, its width."""
    h, halves = model.hidden_size, 2 if model.swiglu else 1

    def pair(rows: float, ffn: float, count: float = 1.0) -> tuple[Product, ...]:
        return Product(rows, h, ffn * halves, count), Product(rows, ffn, h, count)

    moe = model.moe
    if key.unit not in (MOE_LAYER, MTP) or moe is None:
        ffn = model.ffn_hidden_size / key.tp
        return pair(tokens, ffn), float(tokens), ffn
    # Routed activations do not shrink with ep: a rank gets tokens of ep ranks for 1/ep of experts.
    routed = float(tokens * moe.router_topk)
    local = moe.num_experts / key.ep
    ffn = moe.ffn_hidden_size / key.etp
    products = (
        Product(tokens, h, moe.num_experts),
        *pair(routed / local, ffn, local),
    )
    shared = moe.shared_expert_intermediate_size
    if shared:
        products = (*products, *pair(tokens, shared / key.tp))
    return products, routed + tokens * shared / moe.ffn_hidden_size, ffn


def layer_unit(model: ModelShape, layer: int) -> str:
    """Return the unit name of decoder layer ``layer``."""
    return MOE_LAYER if model.is_moe_layer(layer) else LAYER
