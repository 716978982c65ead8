"""One transformer layer, tensor by tensor: what its passes keep, allocate and free, in order.

The order is that of Megatron 0.17 to 0.19 and, where Transformer Engine replaces a module, of its
kernels.
"""

from __future__ import annotations

from megatron_memx.cost.ledger import Footprint, Ledger
from megatron_memx.cost.units import MOE_LAYER, MTP, UnitKey
from megatron_memx.model import ModelShape


class Layer:
    """Sizes and passes of one transformer layer on one rank."""

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

    def footprint(self) -> Footprint:
        """Return the layer's bytes under its recompute class."""
        both = self.attention_saved() + self.mlp_saved()
        modules = self.key.modules if self.key.recompute == "selective" else ()
        forward, ledger = Ledger(), Ledger()
        self.attention_forward(forward, modules)
        self.mlp_forward(forward, modules)
        full = self.key.recompute == "full"
        saved = self.hidden if full else both - self.recomputed(modules)
        ledger.add(self.hidden)  # the gradient from behind
        if full:
            # The forward pass runs again on the input that was kept, and its output is held.
            ledger.add(forward.peak - self.hidden)
            ledger.drop(forward.peak - both - self.hidden)
        self.mlp_backward(ledger, modules)
        self.attention_backward(ledger, modules)
        return Footprint(
            saved_bytes=saved,
            # Under a checkpoint the backward pass, which runs this one again, needs more.
            forward_bytes=0.0 if full else forward.peak - saved,
            backward_bytes=ledger.peak,
        )

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

    # Passes: what each operator allocates and frees.

    def attention_forward(self, ledger: Ledger, modules: tuple[str, ...]) -> None:
        """Run the forward pass of norm and attention on ``ledger``."""
        ledger.add(self.norm_saved(), self.hidden, self.angles)
        ledger.add(self.fresh_gathered, self.projected)
        if self.model.add_bias_linear or self.model.add_qkv_bias:
            ledger.swap(self.projected, self.projected)
        ledger.drop(self.fresh_gathered)
        inputs = self.attention_inputs()
        ledger.add(inputs - self.projected)
        if self.model.flash_attention:
            ledger.add(self.core_saved())
            ledger.drop(inputs)
        else:
            self._unfused_forward(ledger, inputs)
        if "core_attn" in modules:
            ledger.drop(self.core_saved() - self.query - inputs)
        self._row_forward(ledger)
        if "layernorm" in modules:
            ledger.drop(self.hidden)

    def mlp_forward(self, ledger: Ledger, modules: tuple[str, ...]) -> None:
        """Run the forward pass of norm and MLP on ``ledger``."""
        wide, out = self.mlp_sizes()
        ledger.add(self.norm_saved() - self.hidden, self.hidden)
        gathered = self.fresh_gathered if self.moe is None else 0.0
        ledger.add(gathered, wide)
        ledger.drop(gathered)
        if self.model.add_bias_linear and not self.model.activation_fusion:
            ledger.swap(wide, wide)
        ledger.add(out, self.activation_saved())
        if self.moe is not None:
            alive = self._dispatched()
            ledger.add(self.router_saved(), alive)
            ledger.drop(alive - self.sent)
        self._row_forward(ledger)
        if "mlp" in modules:
            ledger.drop(wide, out, self.activation_saved())
        if "layernorm" in modules:
            ledger.drop(self.hidden)

    def _dispatched(self) -> float:
        """Bytes of the tokens' copies that live when the experts' output is on its way back.

        Sent; received, where others send; sorted by expert, which is kept, after a gather among
        the ranks of an expert; the output; sorted back; reduced among those ranks.
        """
        assert self.moe is not None
        sorting = self.moe.num_experts > self.key.ep
        own = self.sent / self.key.etp
        copies = 1 + sorting + (sorting or self.key.etp > 1)
        return own * (1 + (self.key.ep > 1) + (self.key.etp > 1)) + self.sent * copies

    def _row_forward(self, ledger: Ledger) -> None:
        """Product, reduction, bias, dropout and residual; the sum is the next norm's input."""
        ledger.add(self.whole)
        if self.key.sequence_parallel:
            ledger.swap(self.hidden, self.whole)
        # One fused kernel: the mask and the sum are all that it leaves.
        ledger.add(self.dropout_mask)
        ledger.swap(self.hidden, self.hidden)

    def _unfused_forward(self, ledger: Ledger, inputs: float) -> None:
        scores, engine = self.scores, self.model.transformer_impl != "local"
        kept = self.core_saved() - self.score_saved() - self.query
        ledger.add(kept - (inputs if kept == inputs else 0.0))
        temporary = scores * (1 + engine)  # the product, and where it was to be added to
        ledger.add(temporary)
        wide = scores * self.softmax_width
        if self.softmax_width > 1:
            ledger.add(2 * wide, scores)
            ledger.drop(wide)
        else:
            ledger.add(wide)
        if self.model.attention_dropout > 0:
            ledger.add(scores / self.element, scores)
            if self.softmax_width > 1:
                ledger.drop(scores)
        ledger.add(2 * self.query)
        ledger.drop(self.query, temporary, 0.0 if kept == inputs else inputs)

    def mlp_backward(self, ledger: Ledger, modules: tuple[str, ...]) -> None:
        """Run the backward pass of norm and MLP on ``ledger``."""
        if self.moe is not None:
            self._experts_backward(ledger)
            return
        wide, out = self.mlp_sizes()
        model, h, tp, e = self.model, self.model.hidden_size, self.key.tp, self.element
        first = h * model.ffn_hidden_size * (2 if model.swiglu else 1) / tp * e
        second = model.ffn_hidden_size * h / tp * e
        if "mlp" in modules:
            ledger.add(wide + out + self.activation_saved() + self.hidden)
        gradient = self._through_dropout(ledger)
        ledger.add(out)
        ledger.swap(second, second, out, gradient)
        ledger.swap(wide, out, wide, self.activation_saved())
        self._column_backward(ledger, wide, first)
        self._norm_backward(ledger)

    def _experts_backward(self, ledger: Ledger) -> None:
        """Undo the combination, then each expert in turn, then the dispatch."""
        moe, wide, out = self.moe, *self.mlp_sizes()
        assert moe is not None
        local = moe.num_experts / self.key.ep
        each = self.model.hidden_size * moe.ffn_hidden_size / self.key.etp * self.element
        gradient = self.hidden * (self.model.hidden_dropout > 0)
        ledger.swap(gradient, self.dropout_mask)
        ledger.add(self.sent)
        ledger.swap(self.sent, self.sent)
        # The experts' input gradients gather while what they kept is freed, one by one.
        kept, rest = wide + out + self.activation_saved(), 1 - 1 / local
        ledger.add(out / local, each)
        ledger.drop(each, out / local)
        ledger.swap(wide / local, out / local, (kept - out) / local)
        ledger.add(self.sent / local, each * self.halves)
        ledger.drop(wide / local, each * self.halves)
        ledger.drop(rest * kept)
        ledger.add(rest * self.sent)
        ledger.drop(self.sent)
        ledger.swap(self.sent, self.sent, self.sent)
        ledger.swap(self.sent, self.sent)
        ledger.swap(self.whole, self.sent)
        ledger.drop(self.whole - self.hidden, gradient, self.router_saved(), self.hidden)
        self._norm_backward(ledger)

    def attention_backward(self, ledger: Ledger, modules: tuple[str, ...]) -> None:
        """Run the backward pass of norm and attention on ``ledger``."""
        model, h, tp, e = self.model, self.model.hidden_size, self.key.tp, self.element
        heads = model.num_attention_heads * model.kv_channels / tp
        groups = max(model.num_query_groups / tp, 1.0) * model.kv_channels
        gradient = self._through_dropout(ledger)
        ledger.add(self.query)
        ledger.swap(heads * h * e, heads * h * e, gradient)
        if model.flash_attention:
            ledger.add(self.query * 4 / e, self.rows_sum, self.projected)
            ledger.drop(self.query * 4 / e, self.rows_sum, self.query)
            ledger.drop(self.core_saved())
        else:
            if "core_attn" in modules:
                ledger.add(self.core_saved() - self.attention_inputs())
            self._unfused_backward(ledger)
        ledger.swap(self.projected, self.projected)
        ledger.drop(self.angles)
        self._column_backward(ledger, self.projected, h * (heads + 2 * groups) * e)
        self._norm_backward(ledger)

    def _through_dropout(self, ledger: Ledger) -> float:
        """Pass the gradient through dropout and, under sequence parallelism, gather it."""
        size = 0.0
        if self.model.hidden_dropout > 0:
            size = self.hidden
            ledger.swap(size, self.dropout_mask)
        if self.key.sequence_parallel:
            ledger.swap(self.gathered, size)
            size = self.gathered
        return size

    def _column_backward(self, ledger: Ledger, gradient: float, weight: float) -> None:
        """Input gradient, weight gradient; what the product kept is freed."""
        ledger.add(self.fresh_gathered, self.whole)
        if self.key.sequence_parallel:
            ledger.add(self.hidden)
        ledger.add(weight)
        ledger.drop(weight, gradient, self.hidden, self.fresh_gathered, self.whole)
        if not self.key.sequence_parallel:
            ledger.add(self.whole)

    def _norm_backward(self, ledger: Ledger) -> None:
        """Norm, then the sum with the residual's gradient."""
        ledger.swap(self.hidden, self.hidden, self.norm_saved())
        ledger.swap(self.hidden, self.hidden, self.hidden)

    def _unfused_backward(self, ledger: Ledger) -> None:
        """From the context's gradient, of the size of the queries, to that of the projection."""
        expanded = self.query if self.grouped else self.key_value
        scores, wide = self.scores, self.scores * self.softmax_width
        dropout = self.model.attention_dropout > 0
        ledger.add(scores, expanded)
        ledger.drop(self.query)
        if dropout or self.softmax_width > 1:
            ledger.drop(scores)  # what the product with the values kept
        if dropout:
            ledger.swap(scores, scores, scores / self.element)
        if self.softmax_width > 1:
            ledger.swap(wide, scores)
        if self.fused_softmax:
            ledger.drop(scores)
        elif self.softmax_width > 1:
            ledger.swap(wide, wide, wide)
            ledger.swap(wide, wide)
            ledger.swap(scores, wide)
        else:
            ledger.swap(wide, wide, wide)
            # The mask was filled into a view: its gradient is copied twice over.
            ledger.add(3 * wide)
            ledger.drop(3 * wide)
        ledger.add(2 * self.query)
        ledger.drop(self.query)
        ledger.add(2 * expanded)
        ledger.drop(expanded, scores)
        ledger.drop(self.core_saved() - self.score_saved())
        if self.grouped:
            ledger.swap(self.key_value, expanded)
            ledger.swap(self.key_value, expanded)
