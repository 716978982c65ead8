"""Megatron's arguments as a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import job, words

from megatron_memx.errors import BadInputError
from megatron_memx.job import moe_pattern, parse_job
from megatron_memx.model import ModelShape


def test_defaults_follow_megatron() -> None:
    model = job().model
    assert model.ffn_hidden_size == 256
    assert (model.num_query_groups, model.kv_channels) == (8, 8)
    assert model.normalization == "LayerNorm"
    assert model.add_bias_linear
    assert not model.untie_embeddings_and_output_weights
    assert job(swiglu=True).model.ffn_hidden_size == int(4 * 64 * 2 / 3 / 64) * 64


def test_shape_round_trips() -> None:
    shape = job(
        num_experts=4,
        moe_layer_freq="([0]*1+[1]*7)",
        moe_ffn_hidden_size=96,
        multi_latent_attention=True,
        mtp_num_layers=1,
    ).model
    assert ModelShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape
    with pytest.raises(BadInputError, match="wrong_field"):
        ModelShape.from_dict({**shape.to_dict(), "wrong_field": 1})


def test_pins_are_what_the_user_wrote() -> None:
    pins = job(
        tensor_model_parallel_size=2,
        recompute_granularity="selective",
        recompute_modules="core_attn mlp",
        sequence_parallel=True,
    ).pins
    assert pins == {
        "tensor_model_parallel_size": 2,
        "recompute_granularity": "selective",
        "sequence_parallel": True,
        "recompute_modules": ["core_attn", "mlp"],
    }
    assert job().pins == {}


@pytest.mark.parametrize(
    ("more", "flag"),
    [
        ({"num_layers": None}, "--num-layers"),
        ({"global_batch_size": None}, "--global-batch-size"),
        ({"hidden_size": "many"}, "--hidden-size"),
        ({"hidden_size": 65}, "--hidden-size"),
        ({"num_attention_heads": 0}, "--num-attention-heads"),
        ({"global_batch_size": 0}, "--global-batch-size"),
        ({"num_layers": -4}, "--num-layers"),
        ({"bf16": True, "fp16": True}, "--fp16"),
        ({"yaml_cfg": "a.yaml"}, "--yaml-cfg"),
        ({"rampup_batch_size": "8 8 100"}, "--rampup-batch-size"),
        ({"micro_batch_size": 0}, "--micro-batch-size"),
        ({"vocab_size": None, "tokenizer_type": "GPT2BPETokenizer"}, "--vocab-size"),
        ({"hybrid_layer_pattern": "M*-M"}, "--hybrid-layer-pattern"),
    ],
)
def test_bad_arguments_name_their_flag(more: dict[str, object], flag: str) -> None:
    with pytest.raises(BadInputError) as error:
        job(**more)
    assert error.value.flag == flag


def test_vocabulary_is_read_from_the_tokenizer_files(tmp_path: Path) -> None:
    vocab = tmp_path / "vocab.json"
    vocab.write_text(json.dumps({f"t{i}": i for i in range(77)}))
    read = job(vocab_size=None, tokenizer_type="GPT2BPETokenizer", vocab_file=vocab)
    assert read.model.vocab_size == 77
    assert any("77" in note for note in read.notes)
    folder = tmp_path / "hf"
    folder.mkdir()
    data = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<eos>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    read = job(vocab_size=None, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=folder)
    assert read.model.vocab_size == 3


def test_padded_vocabulary() -> None:
    """Field report 10: 151,669 over tp 4 in units of 128 is 152,064."""
    model = job(vocab_size=151669).model
    assert model.padded_vocab_size(4) == 152064
    assert model.embedding_parameters(4) >= 152064 // 4 * 64


def test_moe_patterns() -> None:
    assert moe_pattern("2", 4) == (True, False, True, False)
    assert moe_pattern("([0]*1+[1]*3)", 4) == (False, True, True, True)
    assert moe_pattern("[1,0]*2", 4) == (True, False, True, False)
    for text in ("[1]*3", "__import__('os')", "[2]*4", ""):
        with pytest.raises(BadInputError, match="moe-layer-freq"):
            moe_pattern(text, 4)


def test_hybrid_pattern_counts_pairs() -> None:
    read = parse_job([*words(num_layers=None), "--hybrid-layer-pattern", "*-*-|*-"])
    assert read.model.num_layers == 3
    assert read.model.hybrid


def test_relevant_options_leave_out_paths_and_logging() -> None:
    read = job(lr="1e-3", save="/x", log_interval=1, use_flash_attn=True)
    assert "use_flash_attn" in read.relevant
    assert not {"lr", "save", "log_interval"} & set(read.relevant)
