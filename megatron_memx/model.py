"""The shape of a GPT model, and exactly how many parameters each rank holds of it.

Counts follow Megatron-core's own modules (``GPTModel`` with the local or the Transformer Engine
layer specification) and are checked against real models by the integration tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from megatron_memx.errors import BadInputError


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEShape:
    """Mixture of experts.

    Args:
        num_experts: Routed experts of a layer.
        router_topk: Experts that each token visits.
        ffn_hidden_size: Hidden size of one expert.
        shared_expert_intermediate_size: Hidden size of the shared expert; 0: none.
        layer_pattern: For each decoder layer, True where it is a mixture of experts.
        expert_bias: Whether the router holds a load-balancing bias (a buffer, not a parameter).
    """

    num_experts: int
    router_topk: int
    ffn_hidden_size: int
    shared_expert_intermediate_size: int = 0
    layer_pattern: tuple[bool, ...] = ()
    shared_expert_gate: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MLAShape:
    """Multi-latent attention; sizes as Megatron's options of the same names."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerParameters:
    """Parameters of one layer on one rank: replicated over data parallel, and expert ones."""

    dense: int
    expert: int = 0

    @property
    def total(self) -> int:
        """Dense and expert parameters together."""
        return self.dense + self.expert


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder-only transformer in Megatron's terms. Sizes are counts of elements."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    seq_length: int
    max_position_embeddings: int
    vocab_size: int
    padded_vocab_size_given: int | None = None
    make_vocab_size_divisible_by: int = 128
    position_embedding_type: str = "learned_absolute"
    swiglu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    normalization: str = "LayerNorm"
    qk_layernorm: bool = False
    untie_embeddings_and_output_weights: bool = False
    transformer_impl: str = "transformer_engine"
    attention_backend: str = "auto"
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    mtp_num_layers: int = 0
    moe: MoEShape | None = None
    mla: MLAShape | None = None
    hybrid: bool = False
    masked_softmax_fusion: bool = True
    attention_softmax_in_fp32: bool = False
    activation_fusion: bool = True
    rope_fusion: bool = True
    attention_mask_in_dataloader: bool = True

    def __post_init__(self) -> None:
        """Refuse sizes that no GPT can have."""
        for name in [
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "seq_length",
            "max_position_embeddings",
            "vocab_size",
        ]:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BadInputError(
                    f"{name} is {value!r}: must be a whole number of 1 or more",
                    flag="--" + name.replace("_", "-"),
                )
        if self.num_attention_heads % self.num_query_groups:
            raise BadInputError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_query_groups {self.num_query_groups}",
                flag="--num-query-groups",
            )

    @property
    def flash_attention(self) -> bool:
        """Whether attention scores are never held in memory (fused or flash kernels)."""
        if self.transformer_impl == "local":
            return False
        return self.attention_backend in ("auto", "flash", "fused")

    def padded_vocab_size(self, tp: int) -> int:
        """Return the vocabulary as Megatron pads it for ``tp``."""
        if self.padded_vocab_size_given is not None:
            return self.padded_vocab_size_given
        multiple = self.make_vocab_size_divisible_by * tp
        return math.ceil(self.vocab_size / multiple) * multiple

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` (from 0) is a mixture of experts."""
        if self.moe is None:
            return False
        return self.moe.layer_pattern[layer] if self.moe.layer_pattern else True

    @property
    def norm_parameters(self) -> int:
        """Parameters of one normalisation over the hidden size."""
        return self._norm(self.hidden_size)

    def layer_parameters(
        self, layer: int, *, tp: int = 1, ep: int = 1, etp: int | None = None
    ) -> LayerParameters:
        """Return the parameters that one rank holds of decoder layer ``layer`` (from 0)."""
        attention = self._mla_parameters(tp) if self.mla else self._attention_parameters(tp)
        dense = attention + 2 * self.norm_parameters
        if not self.is_moe_layer(layer):
            return LayerParameters(dense=dense + self._mlp_parameters(self.ffn_hidden_size, tp))
        moe = self.moe
        assert moe is not None
        # The router is the same on every rank.
        dense += moe.num_experts * (self.hidden_size + self.add_bias_linear)
        if moe.shared_expert_intermediate_size:
            dense += self._mlp_parameters(moe.shared_expert_intermediate_size, tp)
            dense += self.hidden_size * moe.shared_expert_gate
        each = self._mlp_parameters(moe.ffn_hidden_size, etp or tp)
        return LayerParameters(dense=dense, expert=moe.num_experts // ep * each)

    def embedding_parameters(self, tp: int) -> int:
        """Return a rank's parameters of the word and learned position embeddings."""
        words = self.padded_vocab_size(tp) // tp * self.hidden_size
        learned = self.position_embedding_type == "learned_absolute"
        return words + learned * self.max_position_embeddings * self.hidden_size

    def output_parameters(self, tp: int) -> int:
        """Return a rank's parameters of the output layer's weight matrix."""
        return self.padded_vocab_size(tp) // tp * self.hidden_size

    def mtp_parameters(
        self, *, tp: int = 1, ep: int = 1, etp: int | None = None
    ) -> LayerParameters:
        """Return a rank's parameters of one multi-token-prediction layer.

        Two norms, a projection of two hidden states to one (split over tp), a transformer layer
        like the last decoder layer, and a final norm.
        """
        inner = self.layer_parameters(self.num_layers - 1, tp=tp, ep=ep, etp=etp)
        own = 2 * self.norm_parameters + 2 * self.hidden_size * self.hidden_size // tp
        return LayerParameters(dense=inner.dense + own + self.norm_parameters, expert=inner.expert)

    def total_parameters(self) -> int:
        """Return the parameters of the whole model, tied weights counted once."""
        total = sum(self.layer_parameters(i).total for i in range(self.num_layers))
        total += self.embedding_parameters(1) + self.norm_parameters
        total += self.mtp_num_layers * self.mtp_parameters().total
        if self.untie_embeddings_and_output_weights:
            total += self.output_parameters(1)
        return total

    def _norm(self, size: int) -> int:
        return size if self.normalization == "RMSNorm" else 2 * size

    def _attention_parameters(self, tp: int) -> int:
        h, bias = self.hidden_size, self.add_bias_linear
        query = self.num_attention_heads * self.kv_channels
        # With fewer query groups than ranks, Megatron (0.16+) still splits the columns evenly.
        columns = (query + 2 * self.num_query_groups * self.kv_channels) // tp
        total = h * columns + columns * (bias or self.add_qkv_bias)
        total += query // tp * h + h * bias
        if self.qk_layernorm:
            total += 2 * self._norm(self.kv_channels)
        return total

    def _mla_parameters(self, tp: int) -> int:
        mla, h = self.mla, self.hidden_size
        assert mla is not None
        heads = self.num_attention_heads // tp
        q_head = mla.qk_head_dim + mla.qk_pos_emb_head_dim
        # Transformer Engine's down projections are whole on every rank, the local ones are split.
        spread = tp if self.transformer_impl == "local" else 1
        total = 0
        if mla.q_lora_rank is None:
            total += h * heads * q_head
        else:
            total += h * mla.q_lora_rank // spread + mla.q_lora_rank * heads * q_head
            total += self._norm(mla.q_lora_rank) * self.qk_layernorm
        total += h * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim) // spread
        total += mla.kv_lora_rank * heads * (mla.qk_head_dim + mla.v_head_dim)
        total += self._norm(mla.kv_lora_rank) * self.qk_layernorm
        return total + heads * mla.v_head_dim * h + h * self.add_bias_linear

    def _mlp_parameters(self, ffn: int, tp: int) -> int:
        h, bias = self.hidden_size, self.add_bias_linear
        columns = (2 if self.swiglu else 1) * ffn // tp
        return h * columns + columns * bias + ffn // tp * h + h * bias

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        data = asdict(self)
        if self.moe is not None:
            data["moe"]["layer_pattern"] = list(self.moe.layer_pattern)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelShape:
        """Return the shape that :meth:`to_dict` wrote.

        Raises:
            BadInputError: A field is missing or unknown.
        """
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise BadInputError(f"model has unknown fields: {', '.join(unknown)}")
        values = dict(data)
        try:
            if values.get("moe"):
                moe = dict(values["moe"])
                moe["layer_pattern"] = tuple(moe.get("layer_pattern", ()))
                values["moe"] = MoEShape(**moe)
            if values.get("mla"):
                values["mla"] = MLAShape(**values["mla"])
            return cls(**values)
        except TypeError as error:
            raise BadInputError(f"model: {error}") from error
