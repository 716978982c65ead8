"""A training job read from Megatron's command line: model, training settings, the user's pins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_memx.errors import BadInputError
from megatron_memx.megatron_args import REPLACED_BY_LAYOUT, expand_layout, typed_options
from megatron_memx.model import MLAShape, ModelShape, MoEShape
from megatron_memx.options import OPTIONS

_INTEGER_PINS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "recompute_num_layers",
)
_TEXT_PINS = ("pipeline_model_parallel_layout", "recompute_granularity", "recompute_method")
_SWITCH_PINS = (
    "recompute_activations",
    "sequence_parallel",
    "use_distributed_optimizer",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
# Options that change neither time nor memory nor legality: they stay out of the signature.
IRRELEVANT = frozenset(
    (
        "load save save_interval data_path train_data_path valid_data_path test_data_path "
        "mock_data split data_cache_path lr min_lr lr_decay_iters lr_decay_style lr_warmup_iters "
        "lr_warmup_fraction lr_decay_samples lr_warmup_samples weight_decay clip_grad adam_beta1 "
        "adam_beta2 adam_eps init_method_std seed train_iters train_samples eval_iters "
        "eval_interval log_interval log_throughput log_params_norm log_num_zeros_in_grad "
        "log_timers_to_tensorboard log_memory_to_tensorboard tensorboard_dir "
        "tensorboard_queue_size tensorboard_log_interval wandb_project wandb_exp_name "
        "wandb_save_dir timing_log_level timing_log_option vocab_file merge_file tokenizer_model "
        "no_load_optim no_load_rng no_save_optim no_save_rng finetune exit_interval "
        "exit_duration_in_mins exit_signal_handler num_workers distributed_timeout_minutes "
        "rerun_mode no_mmap_bin_files override_opt_param_scheduler "
        "use_checkpoint_opt_param_scheduler"
    ).split()
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """How the model is trained, as far as it costs time or memory."""

    global_batch_size: int
    precision: str = "fp32"
    optimizer: str = "adam"
    accumulate_allreduce_grads_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    load: str | None = None
    save: str | None = None
    ckpt_format: str = "torch_dist"
    fully_reshardable: bool = False

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one parameter as the layers hold it."""
        return 4 if self.precision == "fp32" else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one accumulated gradient."""
        if self.precision == "fp32" or self.accumulate_allreduce_grads_in_fp32:
            return 4
        return 4 if self.precision == "bf16" else 2

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state of one parameter: moments, and a master copy below fp32."""
        moments = {"adam": 8, "sgd": 4}.get(self.optimizer, 8)
        return moments + (0 if self.precision == "fp32" else 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Everything about a job that the planner reads.

    Args:
        pins: Parallel and recompute options that the user wrote; the search keeps them.
        typed: Every option that the user wrote, as text.
        relevant: Those of ``typed`` that may change a prediction or legality, for signatures.
        notes: Things that people should know about how the arguments were read.
    """

    model: ModelShape
    train: TrainSettings
    pins: Mapping[str, Any] = field(default_factory=dict)
    typed: Mapping[str, str] = field(default_factory=dict)
    relevant: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Whether the user wrote the option called ``name``."""
        return name in self.typed


class _Reader:
    def __init__(self, typed: Mapping[str, str]) -> None:
        self.typed = typed

    def integer(self, name: str, default: int | None = None) -> int | None:
        if name not in self.typed:
            return default
        try:
            return int(self.typed[name])
        except ValueError:
            raise BadInputError(
                f"--{name.replace('_', '-')} {self.typed[name]!r} is not a whole number",
                flag="--" + name.replace("_", "-"),
            ) from None

    def needed(self, name: str) -> int:
        value = self.integer(name)
        if value is None:
            flag = "--" + name.replace("_", "-")
            raise BadInputError(
                f"{flag} is missing: planning needs the model's size and the global batch",
                fix=f"{flag} N",
                flag=flag,
            )
        if value < 1:
            flag = "--" + name.replace("_", "-")
            raise BadInputError(f"{flag} {value}: must be 1 or more", fix=f"{flag} 1", flag=flag)
        return value

    def number(self, name: str, default: float) -> float:
        try:
            return float(self.typed.get(name, default))
        except ValueError:
            raise BadInputError(
                f"--{name.replace('_', '-')} {self.typed[name]!r} is not a number",
                flag="--" + name.replace("_", "-"),
            ) from None

    def on(self, name: str) -> bool:
        return name in self.typed

    def text(self, name: str, default: str) -> str:
        return self.typed.get(name, default)


def parse_job(words: Sequence[str]) -> Job:
    """Read a job from a Megatron script's arguments.

    Raises:
        BadInputError: A value that planning needs is missing or not of its type.
    """
    own = {option.dest for option in OPTIONS}
    typed = {name: value for name, value in typed_options(words).items() if name not in own}
    read = _Reader(typed)
    if "yaml_cfg" in typed:
        raise BadInputError(
            "--yaml-cfg makes Megatron ignore the command line, so a plan could not reach it",
            fix="write the settings as Megatron arguments",
            flag="--yaml-cfg",
        )
    if "rampup_batch_size" in typed:
        raise BadInputError(
            "--rampup-batch-size with --auto-parallel: a plan is made for one global batch size",
            fix="leave it out, or plan for the final size and give --memx-plan with it",
            flag="--rampup-batch-size",
        )
    notes: list[str] = []
    model = _model(read, notes)
    train = _train(read)
    return Job(
        model=model,
        train=train,
        pins=_pins(read),
        typed=typed,
        relevant={k: v for k, v in sorted(typed.items()) if k not in IRRELEVANT},
        notes=tuple(notes),
    )


def _pins(read: _Reader) -> dict[str, Any]:
    pins: dict[str, Any] = {}
    for name in _INTEGER_PINS:
        value = read.integer(name)
        if value is not None:
            least = 0 if name == "recompute_num_layers" else 1
            if value < least:
                raise BadInputError(
                    f"--{name.replace('_', '-')} {value}: must be {least} or more",
                    fix=str(max(1, least)),
                    flag="--" + name.replace("_", "-"),
                )
            pins[name] = value
    for name in _TEXT_PINS:
        if read.on(name):
            pins[name] = read.typed[name]
    for name in _SWITCH_PINS:
        if read.on(name):
            pins[name] = True
    if read.on("recompute_modules"):
        pins["recompute_modules"] = read.typed["recompute_modules"].split()
    if "pipeline_model_parallel_layout" in pins:
        pins["pipeline_model_parallel_layout"] = expand_layout(
            pins["pipeline_model_parallel_layout"]
        )
        both = sorted(REPLACED_BY_LAYOUT & pins.keys())
        if both:
            flag = "--" + both[0].replace("_", "-")
            raise BadInputError(
                f"--pipeline-model-parallel-layout and {flag} both say which stage holds which "
                "layers; Megatron takes one",
                fix=f"leave {flag} out",
                flag=flag,
            )
    return pins


def _train(read: _Reader) -> TrainSettings:
    if read.on("bf16") and read.on("fp16"):
        raise BadInputError("--bf16 and --fp16 exclude each other", fix="--bf16", flag="--fp16")
    return TrainSettings(
        global_batch_size=read.needed("global_batch_size"),
        precision="bf16" if read.on("bf16") else "fp16" if read.on("fp16") else "fp32",
        optimizer=read.text("optimizer", "adam"),
        # Megatron turns it on by itself with bf16.
        accumulate_allreduce_grads_in_fp32=read.on("accumulate_allreduce_grads_in_fp32"),
        overlap_grad_reduce=read.on("overlap_grad_reduce"),
        overlap_param_gather=read.on("overlap_param_gather"),
        load=read.typed.get("load"),
        save=read.typed.get("save"),
        ckpt_format=read.text("ckpt_format", "torch_dist"),
        fully_reshardable=read.on("dist_ckpt_optim_fully_reshardable"),
    )


def _model(read: _Reader, notes: list[str]) -> ModelShape:
    hybrid = read.on("hybrid_layer_pattern") or read.on("hybrid_override_pattern")
    layers = _hybrid_layers(read) if hybrid else read.needed("num_layers")
    hidden = read.needed("hidden_size")
    heads = read.needed("num_attention_heads")
    channels = read.integer("kv_channels")
    if channels is None:
        if hidden % heads:
            raise BadInputError(
                f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}",
                fix=f"{hidden // heads * heads or heads} or {(hidden // heads + 1) * heads}",
                flag="--hidden-size",
            )
        channels = hidden // heads
    swiglu = read.on("swiglu")
    ffn = read.integer("ffn_hidden_size")
    if ffn is None:
        ffn = int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden
    groups = read.integer("num_query_groups") if read.on("group_query_attention") else None
    seq = read.needed("seq_length")
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups or heads,
        kv_channels=channels,
        seq_length=seq,
        max_position_embeddings=read.integer("max_position_embeddings", seq) or seq,
        vocab_size=_vocab_size(read, notes),
        padded_vocab_size_given=read.integer("padded_vocab_size"),
        make_vocab_size_divisible_by=read.integer("make_vocab_size_divisible_by", 128) or 128,
        position_embedding_type=read.text("position_embedding_type", "learned_absolute"),
        swiglu=swiglu,
        add_bias_linear=not read.on("disable_bias_linear"),
        add_qkv_bias=read.on("add_qkv_bias"),
        normalization=read.text("normalization", "LayerNorm"),
        qk_layernorm=read.on("qk_layernorm"),
        untie_embeddings_and_output_weights=read.on("untie_embeddings_and_output_weights"),
        transformer_impl=read.text("transformer_impl", "transformer_engine"),
        attention_backend=read.text("attention_backend", "auto"),
        hidden_dropout=read.number("hidden_dropout", 0.1),
        attention_dropout=read.number("attention_dropout", 0.1),
        mtp_num_layers=read.integer("mtp_num_layers", 0) or 0,
        moe=_moe(read, ffn, layers),
        mla=_mla(read),
        hybrid=hybrid,
        masked_softmax_fusion=not read.on("no_masked_softmax_fusion"),
        attention_softmax_in_fp32=read.on("attention_softmax_in_fp32")
        or read.on("apply_query_key_layer_scaling"),
        activation_fusion=not read.on("no_bias_swiglu_fusion" if swiglu else "no_bias_gelu_fusion"),
        rope_fusion=not read.on("no_rope_fusion"),
        attention_mask_in_dataloader=not read.on("no_create_attention_mask_in_dataloader"),
    )


def _hybrid_layers(read: _Reader) -> int:
    name = "hybrid_layer_pattern" if read.on("hybrid_layer_pattern") else "hybrid_override_pattern"
    pattern = read.typed[name].replace("|", "")
    if not pattern or pattern.replace("*-", ""):
        raise BadInputError(
            f"--{name.replace('_', '-')} {read.typed[name]!r}: MemX plans patterns that repeat "
            "attention and MLP (*-), as a GPT does",
            fix="'*-*-*-*-', or --memx-plan without --auto-parallel",
            flag="--" + name.replace("_", "-"),
        )
    return len(pattern) // 2


def _moe(read: _Reader, ffn: int, layers: int) -> MoEShape | None:
    experts = read.integer("num_experts")
    if experts is None:
        return None
    return MoEShape(
        num_experts=experts,
        router_topk=read.integer("moe_router_topk", 2) or 2,
        ffn_hidden_size=read.integer("moe_ffn_hidden_size", ffn) or ffn,
        shared_expert_intermediate_size=read.integer("moe_shared_expert_intermediate_size", 0) or 0,
        shared_expert_gate=read.on("moe_shared_expert_gate"),
        layer_pattern=moe_pattern(read.text("moe_layer_freq", "1"), layers),
    )


def moe_pattern(text: str, layers: int) -> tuple[bool, ...]:
    """Return which layers are mixtures: ``N`` (every N-th) or a list such as ``([0]*3+[1]*58)``.

    Raises:
        BadInputError: Neither form, or a list of another length than the model.
    """
    flag = "--moe-layer-freq"
    stripped = text.replace(" ", "")
    if stripped.isdigit() and int(stripped) > 0:
        return tuple(i % int(stripped) == 0 for i in range(layers))
    if stripped.startswith("(") and stripped.endswith(")"):
        stripped = stripped[1:-1]
    pattern: list[bool] = []
    for term in stripped.split("+"):
        items, _, times = term.partition("*")
        if not (items.startswith("[") and items.endswith("]")) or not (times or "1").isdigit():
            raise BadInputError(
                f"{flag} {text!r} is neither a number nor a list of 0 and 1",
                fix="1, or a list as ([0]*1+[1]*23)",
                flag=flag,
            )
        values = [item for item in items[1:-1].split(",") if item]
        if set(values) - {"0", "1"}:
            raise BadInputError(f"{flag} {text!r}: only 0 and 1 may stand in the list", flag=flag)
        pattern += [value == "1" for value in values] * int(times or "1")
    if len(pattern) != layers:
        raise BadInputError(
            f"{flag} {text!r} lists {len(pattern)} layers, the model has {layers}", flag=flag
        )
    return tuple(pattern)


def _mla(read: _Reader) -> MLAShape | None:
    if not read.on("multi_latent_attention"):
        return None
    return MLAShape(
        q_lora_rank=read.integer("q_lora_rank"),
        kv_lora_rank=read.integer("kv_lora_rank", 32) or 32,
        qk_head_dim=read.integer("qk_head_dim", 128) or 128,
        qk_pos_emb_head_dim=read.integer("qk_pos_emb_head_dim", 64) or 64,
        v_head_dim=read.integer("v_head_dim", 128) or 128,
    )


def _vocab_size(read: _Reader, notes: list[str]) -> int:
    """Return the vocabulary's size from the option or the tokenizer's own files."""
    given = read.integer("vocab_size")
    if given is not None:
        return given
    padded = read.integer("padded_vocab_size")
    if padded is not None:
        return padded
    kind = read.text("tokenizer_type", "(none)")
    found = _vocab_of_files(kind, read)
    if found is None:
        raise BadInputError(
            f"the vocabulary size of tokenizer {kind} cannot be read from its files here",
            fix="--vocab-size N",
            flag="--vocab-size",
        )
    notes.append(f"vocabulary of {found} entries read from the files of {kind}")
    return found


def _vocab_of_files(kind: str, read: _Reader) -> int | None:
    try:
        if kind == "GPT2BPETokenizer" and read.on("vocab_file"):
            return len(json.loads(Path(read.typed["vocab_file"]).read_text(encoding="utf-8")))
        if kind == "HuggingFaceTokenizer" and read.on("tokenizer_model"):
            file = Path(read.typed["tokenizer_model"]) / "tokenizer.json"
            data = json.loads(file.read_text(encoding="utf-8"))
            added = {item["content"] for item in data.get("added_tokens", ())}
            return len(set(data["model"]["vocab"]) | added)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None
