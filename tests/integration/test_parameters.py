"""Parameter counts of ModelShape against the real GPTModel of the installed release."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from jobs import words

from megatron_memx.job import parse_job
from megatron_memx.platforms import default_words

pytestmark = pytest.mark.megatron

BASE: dict[str, Any] = {"num_layers": 2, "mock_data": True, "tokenizer_type": "NullTokenizer"}
MODERN = {"swiglu": True, "disable_bias_linear": True, "normalization": "RMSNorm"}
CASES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "dense": ({}, 1, 1, 1),
    "dense-tp2": ({}, 2, 1, 2),
    "untied-rope": (
        {"untie_embeddings_and_output_weights": True, "position_embedding_type": "rope"},
        2,
        1,
        2,
    ),
    "gqa-swiglu-rmsnorm": (
        {**MODERN, "group_query_attention": True, "num_query_groups": 2},
        2,
        1,
        2,
    ),
    "gqa-fewer-groups-than-tp": (
        {**MODERN, "group_query_attention": True, "num_query_groups": 1},
        2,
        1,
        2,
    ),
    "qkv-bias-qk-layernorm": ({**MODERN, "add_qkv_bias": True, "qk_layernorm": True}, 1, 1, 1),
    "kv-channels": ({"kv_channels": 24}, 2, 1, 2),
    "odd-vocabulary": ({"vocab_size": 1337}, 2, 1, 2),
    "moe": ({**MODERN, "num_experts": 4}, 1, 1, 1),
    "moe-ep2": ({**MODERN, "num_experts": 4, "moe_ffn_hidden_size": 48}, 1, 2, 1),
    "moe-bias": ({"num_experts": 2}, 1, 1, 1),
    "moe-shared": (
        {**MODERN, "num_experts": 4, "moe_shared_expert_intermediate_size": 96},
        1,
        2,
        1,
    ),
    "moe-every-other": ({**MODERN, "num_experts": 4, "moe_layer_freq": "([0]*1+[1]*1)"}, 1, 1, 1),
    "mla": ({**MODERN, "multi_latent_attention": True}, 1, 1, 1),
    "mla-q-lora-tp2": (
        {
            **MODERN,
            "multi_latent_attention": True,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_head_dim": 16,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 16,
            "qk_layernorm": True,
        },
        2,
        1,
        2,
    ),
    "mtp": ({**MODERN, "mtp_num_layers": 1, "position_embedding_type": "rope"}, 1, 1, 1),
    "mtp-tp2": (
        {
            **MODERN,
            "mtp_num_layers": 1,
            "position_embedding_type": "rope",
            "untie_embeddings_and_output_weights": True,
        },
        2,
        1,
        2,
    ),
}


def case_words(more: dict[str, Any]) -> list[str]:
    found = [*words(**{**BASE, **more}), "--lr", "1e-3", "--train-iters", "1"]
    return [*found, *default_words("cpu", found)]


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, int]]:
    """One process builds every model."""
    tasks = []
    for more, tp, ep, etp in CASES.values():
        model = parse_job(case_words(more)).model
        tasks.append(
            {
                "words": case_words(more),
                "tp": tp,
                "ep": ep,
                "etp": etp,
                "padded_vocab_size": model.padded_vocab_size(tp),
            }
        )
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("count_parameters.py"))],
        input=json.dumps(tasks),
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_counts_are_exact(name: str, counted: dict[str, dict[str, int]]) -> None:
    more, tp, ep, etp = CASES[name]
    model, real = parse_job(case_words(more)).model, counted[name]
    layers = [model.layer_parameters(i, tp=tp, ep=ep, etp=etp) for i in range(model.num_layers)]
    for index, layer in enumerate(layers):
        assert layer.total == real[f"layer{index}"], f"layer {index}"
    mtp = model.mtp_parameters(tp=tp, ep=ep, etp=etp)
    assert model.mtp_num_layers * mtp.total == real.get("mtp", 0)
    experts = sum(layer.expert for layer in layers) + model.mtp_num_layers * mtp.expert
    if ep > 1:
        assert experts == real["expert"]
    total = sum(layer.total for layer in layers) + model.mtp_num_layers * mtp.total
    total += model.embedding_parameters(tp) + model.norm_parameters
    if model.untie_embeddings_and_output_weights:
        total += model.output_parameters(tp)
    assert total == real["total"]
    if tp == ep == 1:
        assert model.total_parameters() == real["total"]
