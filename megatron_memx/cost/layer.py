"""One transformer layer on one rank, tensor by tensor: sizes, and what its passes keep."""

from __future__ import annotations

from megatron_memx.cost.units import MOE_LAYER, MTP, UnitKey
from megatron_memx.model import ModelShape


class Layer:
    """Sizes of one transformer layer on one rank, and what its forward pass keeps."""

    def __init__(self, model: ModelShape, key: UnitKey, element: int) -> None:
        self.model, self.key, self.element = model, key, element
        b, s, tp = key.micro_batch_size, key.seq_length, key.tp
        self.tokens = tokens = b * s
        h = model.hidden_size
        rows = tokens / (tp if key.sequence_parallel else 1)
        self.hidden = rows * h * element
        self.gathered = tokens * h * element if key.sequence_parallel else 0.0
        # Megatron's own layers gather into a buffer that is never freed.
        self.fresh_gathered = self.gathered * (model.transformer_impl != "local")
        self.whole = tokens * h * element
        self.statistics = rows * (4 if model.normalization == "RMSNorm" else 8)
        self.dropout_mask = rows * h * (model.hidden_dropout > 0)
        heads = model.num_attention_heads / tp
        groups = max(model.num_query_groups / tp, 1.0)
        self.several_groups = groups > 1
        self.grouped = model.num_attention_heads > model.num_query_groups and heads > groups
        self.query = tokens * heads * model.kv_channels * element
        self.key_value = tokens * groups * model.kv_channels * element
        self.rows_sum = b * heads * s * 4
        self.scores = b * heads * s * (s * key.cp) * element
        moe = model.moe if key.unit in (MOE_LAYER, MTP) else None
        self.moe = moe
        # Balanced routing: each rank gets as many tokens as it sends; expert tensor parallelism
        # gathers those of its group.
        self.routed = rows * moe.router_topk * key.etp if moe else 0.0
        self.rotary = model.position_embedding_type in ("rope", "yarn", "mrope")
        self.angles = 0.0
        if self.rotary and not model.rope_fusion:
            self.angles = 4.0 * s * model.kv_channels * element

    # Forward: what each part keeps.

    def norm_saved(self) -> float:
        """A norm keeps its input and its statistics."""
        return self.hidden + self.statistics

    @property
    def projected(self) -> float:
        """Queries, keys and values in one tensor, as the projection makes them."""
        return self.query + 2 * self.key_value

    def attention_inputs(self) -> float:
        """What queries, keys and values keep alive outside the attention itself."""
        if self.rotary:
            # Rotated queries and keys are new; the values are a view of the projection.
            return self.query + self.key_value + self.projected
        # Queries of several groups are copied out of the projection; those of one are a view.
        return self.projected + self.query * (self.grouped and self.several_groups)

    def core_saved(self) -> float:
        """What the attention keeps, its inputs and output included."""
        if self.model.flash_attention:
            copied = self.key.micro_batch_size > 1
            return self.projected + self.query + self.rows_sum + self.query * copied
        expanded = self.query if self.grouped else self.key_value
        if self.model.transformer_impl == "local" and not self.grouped:
            inputs = self.attention_inputs()
        else:
            inputs = self.query + 2 * expanded
        return inputs + self.score_saved() + self.query

    def score_saved(self) -> float:
        """Score-sized tensors that unfused attention keeps."""
        saved = self.scores * self.softmax_width
        if self.model.attention_dropout > 0:
            saved += self.scores / self.element + self.scores
        elif self.softmax_width > 1:
            saved += self.scores  # back in the model's type
        return saved

    @property
    def fused_softmax(self) -> bool:
        """Whether Megatron's fused softmax takes these shapes."""
        s, b = self.key.seq_length, self.key.micro_batch_size
        rows = b * self.model.num_attention_heads // self.key.tp
        return (
            self.model.masked_softmax_fusion
            and self.element == 2
            and 16 < s <= 4096
            and s % 4 == 0
            and rows % 4 == 0
        )

    @property
    def softmax_width(self) -> float:
        """Bytes of a kept probability over the model's bytes of an element."""
        wide = self.model.attention_softmax_in_fp32 and not self.fused_softmax
        return 4 / self.element if wide else 1.0

    def mlp_sizes(self) -> tuple[float, float]:
        """Return bytes of the first product's output and of the activation's."""
        ffn = self.tokens * self.model.ffn_hidden_size / self.key.tp * self.element
        if self.moe is not None:
            ffn = self.routed * self.moe.ffn_hidden_size / self.key.etp * self.element
        return ffn * self.halves, ffn

    @property
    def halves(self) -> int:
        """2 where a gate stands beside the first product."""
        return 2 if self.model.swiglu else 1

    @property
    def sent(self) -> float:
        """Bytes of the tokens that a rank sends to experts."""
        return self.routed * self.model.hidden_size * self.element

    def shared_saved(self) -> float:
        """What a shared expert keeps: it is a dense MLP beside the routed ones."""
        if self.moe is None or not self.moe.shared_expert_intermediate_size:
            return 0.0
        ffn = self.tokens * self.moe.shared_expert_intermediate_size / self.key.tp * self.element
        unfused = self.model.swiglu and not self.model.activation_fusion
        return ffn * (self.halves + 1 + 2 * unfused)

    def router_saved(self) -> float:
        """Scores, maps and orders of the router, and the shared expert's part."""
        if self.moe is None:
            return 0.0
        rows = self.routed / (self.moe.router_topk * self.key.etp)
        scores = rows * self.moe.num_experts * (2 * self.element + 8)
        return scores + 16.0 * self.routed + self.shared_saved()

    def activation_saved(self) -> float:
        """What the activation function keeps beside its input."""
        _, out = self.mlp_sizes()
        fused = self.model.swiglu and self.model.activation_fusion
        saved = 2 * out if self.model.swiglu and not fused else 0.0
        if self.moe is not None and not fused:
            saved += out  # the product with the router's weights comes after it
        return saved

    def attention_saved(self) -> float:
        """Norm, projection, attention, output projection and residual."""
        return self.norm_saved() + self.hidden + self.angles + self.core_saved() + self.dropout_mask

    def mlp_saved(self) -> float:
        """Norm, two products, activation and residual."""
        wide, out = self.mlp_sizes()
        return (
            self.norm_saved()
            + self.hidden
            + self.sent
            + self.router_saved()
            + wide
            + self.activation_saved()
            + out
            + self.dropout_mask
        )

    def recomputed(self, modules: tuple[str, ...]) -> float:
        """Bytes that selective recomputation of ``modules`` does not keep."""
        freed = 0.0
        if "core_attn" in modules:
            freed += self.core_saved() - self.query - self.attention_inputs()
        if "mlp" in modules:
            wide, out = self.mlp_sizes()
            freed += wide + out + self.activation_saved()
        if "layernorm" in modules:
            freed += 2 * self.hidden
        return freed
