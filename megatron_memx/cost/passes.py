"""A layer's passes: what each operator allocates and frees, in order.

The order is that of Megatron 0.17 to 0.19 and, where Transformer Engine replaces a module, of its
kernels.
"""

from __future__ import annotations

from megatron_memx.cost.layer import Layer
from megatron_memx.cost.ledger import Footprint, Ledger


class Passes(Layer):
    """Forward and backward pass of a layer on a ledger of live bytes."""

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
