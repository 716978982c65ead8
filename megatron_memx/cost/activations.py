"""Activations of each unit, tensor by tensor, as Megatron's modules keep and free them.

A unit's passes are written down as what each operator allocates and frees, in the order of the
forward and of the backward pass; the peak is what the ledger saw. It is checked against the real
modules under fake tensors by ``benchmarks/memory.py`` and by the integration tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from megatron_memx.cost.layer import Layer
from megatron_memx.cost.ledger import Footprint, Ledger
from megatron_memx.cost.passes import Passes
from megatron_memx.cost.units import CHUNK, EMBEDDING, HEAD, MASK, MTP, UnitKey
from megatron_memx.model import ModelShape

_INDEX = 8  # bytes of a token's number


@lru_cache(maxsize=65536)
def footprint(model: ModelShape, key: UnitKey, element_bytes: int) -> Footprint:
    """Return the bytes of ``key`` for ``model`` with activations of ``element_bytes``."""
    if key.unit == CHUNK:
        return Footprint(saved_bytes=0.0, forward_bytes=0.0, backward_bytes=0.0)
    if key.unit == MASK:
        return _mask(key)
    if key.unit == EMBEDDING:
        return _embedding(model, key, element_bytes)
    if key.unit == HEAD:
        return _head(model, key, element_bytes)
    layer = Passes(model, key, element_bytes)
    if key.unit == MTP:
        return _mtp(model, key, element_bytes, layer)
    return layer.footprint()


def _embedding(model: ModelShape, key: UnitKey, element: int) -> Footprint:
    tokens = key.micro_batch_size * key.seq_length
    rows = tokens / (key.tp if key.sequence_parallel else 1)
    whole, hidden = tokens * model.hidden_size * element, rows * model.hidden_size * element
    learned = model.position_embedding_type == "learned_absolute"
    saved = _INDEX * tokens * (1 + learned) + rows * model.hidden_size * (model.hidden_dropout > 0)
    if key.tp > 1:
        saved += tokens
    table = model.padded_vocab_size(key.tp) // key.tp * model.hidden_size * element
    backward = Ledger()
    backward.add(hidden)
    if model.hidden_dropout > 0:
        backward.swap(hidden, hidden)
    if key.sequence_parallel:
        backward.swap(whole, hidden)
    backward.add(table)
    return Footprint(
        saved_bytes=float(saved),
        forward_bytes=3 * whole,
        backward_bytes=backward.peak,
    )


def _head(model: ModelShape, key: UnitKey, element: int) -> Footprint:
    """Final norm, output layer and loss."""
    tokens = key.micro_batch_size * key.seq_length
    rows = tokens / (key.tp if key.sequence_parallel else 1)
    hidden = rows * model.hidden_size * element
    whole = tokens * model.hidden_size * element
    fresh = key.sequence_parallel and model.transformer_impl != "local"
    gathered = whole if fresh else 0.0
    statistics = rows * (4 if model.normalization == "RMSNorm" else 8)
    vocab = model.padded_vocab_size(key.tp) // key.tp
    logits, wide = tokens * vocab * element, tokens * vocab * 4.0
    small = tokens * (1 + _INDEX + 4)  # target mask, targets, loss
    saved = 2 * hidden + statistics + wide + small
    batch = tokens * (3 * _INDEX + 4.0)
    single = element == 4  # the loss then works on the logits themselves
    forward = 2 * hidden + statistics + batch + small + wide + logits * (not single)
    weight = vocab * model.hidden_size * element
    backward = Ledger()
    if not single:
        backward.add(logits)
        backward.drop(wide)
    backward.add(gathered, whole)
    if key.sequence_parallel:
        backward.add(hidden)
    backward.add(weight)
    return Footprint(
        saved_bytes=saved,
        forward_bytes=max(forward - saved, batch),
        backward_bytes=backward.peak,
    )


def _mtp(model: ModelShape, key: UnitKey, element: int, layer: Passes) -> Footprint:
    inner, head = layer.footprint(), _head(model, key, element)
    joined = 4 * layer.hidden + 2 * layer.statistics
    saved = inner.saved_bytes + joined + head.saved_bytes
    return Footprint(
        saved_bytes=saved,
        forward_bytes=head.forward_bytes,
        backward_bytes=max(head.backward_bytes, inner.backward_bytes),
    )


def buffer_bytes(model: ModelShape, key: UnitKey, element_bytes: int) -> float:
    """Return the bytes of Megatron's global memory buffer, which grows once and is never freed.

    Its own layers put attention scores and gathered sequences there; Transformer Engine's do not.
    """
    if model.transformer_impl != "local":
        return 0.0
    layer = Layer(model, key, element_bytes)
    return max(layer.scores, layer.gathered)


def tied_gradient_bytes(model: ModelShape, tp: int, element_bytes: int) -> float:
    """Return the bytes of the output layer's weight gradient where the embedding shares it.

    On one stage it waits, through all layers' backward passes, for the embedding's.
    """
    if model.untie_embeddings_and_output_weights:
        return 0.0
    return float(model.output_parameters(tp) * element_bytes)


def angles_bytes(model: ModelShape) -> float:
    """Return the bytes of the rotary embedding's angles, which all layers of a chunk share."""
    if model.position_embedding_type not in ("rope", "yarn", "mrope"):
        return 0.0
    return 4.0 * model.seq_length * model.kv_channels


def _mask(key: UnitKey) -> Footprint:
    """The attention mask: the batch's (kept by a checkpoint or not), or one that a layer makes."""
    if key.recompute == "selective":
        own = float(key.seq_length**2)
        # Made in single precision, twice, before it is one byte.
        return Footprint(saved_bytes=own, forward_bytes=8 * own, backward_bytes=0.0)
    mask = float(key.micro_batch_size * key.seq_length**2 * key.cp)
    if key.recompute == "full":
        return Footprint(saved_bytes=mask, forward_bytes=0.0, backward_bytes=0.0)
    # No layer keeps it, but it lives until the forward pass has ended.
    return Footprint(saved_bytes=0.0, forward_bytes=mask, backward_bytes=0.0)


def mask_units(model: ModelShape, layers: Mapping[UnitKey, int], *, batch: bool) -> dict[str, int]:
    """Return the MASK units of a chunk by class.

    Args:
        layers: Layers of the chunk by key.
        batch: Whether the chunk gets the batch, and the batch's mask with it.
    """
    if batch and model.attention_mask_in_dataloader:
        return {"full" if any(keeps_mask(model, one) for one in layers) else "none": 1}
    own = sum(
        count
        for one, count in layers.items()
        if one.recompute != "full" and masks_itself(model, one)
    )
    return {"selective": own} if own else {}


def masks_itself(model: ModelShape, key: UnitKey) -> bool:
    """Whether a layer's softmax fills scores by a mask that it then keeps."""
    return not (model.flash_attention or Layer(model, key, 2).fused_softmax)


def keeps_mask(model: ModelShape, key: UnitKey) -> bool:
    """Whether a layer under ``key`` keeps the batch's attention mask, where the stage has one.

    Checkpoints keep their inputs, and unfused softmax the mask that it filled by.
    """
    if key.recompute == "full" or "core_attn" in key.modules:
        return True
    return masks_itself(model, key)
