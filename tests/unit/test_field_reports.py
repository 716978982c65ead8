"""Field reports about predictions: what users were told wrongly elsewhere, and is right here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from jobs import cluster, facts, job, kind, words
from test_evaluation import write
from test_profile import POINTS, row

from megatron_memx.cli.main import main
from megatron_memx.cost.coverage import gaps
from megatron_memx.cost.prior import CatalogueProvider
from megatron_memx.cost.units import UnitKey
from megatron_memx.errors import BadInputError, InfeasibleError
from megatron_memx.evaluation.cases import Setting, make_case
from megatron_memx.evaluation.evaluate import calibrate, evaluate, predict
from megatron_memx.evaluation.runs import read_runs
from megatron_memx.options import MemXOptions
from megatron_memx.planner import make_plan, make_request
from megatron_memx.predictor.model import FittedProvider
from megatron_memx.profile.store import ProfileRow

LARGE = {
    **{"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 4096},
    **{"max_position_embeddings": 4096, "bf16": True, "attention_backend": "flash"},
    **{"hidden_dropout": 0, "attention_dropout": 0},
}


def predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str], **more: Any) -> dict[str, Any]:
    world = str(ROOT / "examples" / "clusters" / "one_node.yaml")
    code = main(["predict", "--json", "--cluster", world, "--", *words(**LARGE, **more)])
    told = capsys.readouterr()
    assert code == 0, told.err
    return json.loads(told.out)


def plan_of(gib: float, count: int, **more: Any):
    return make_plan(
        make_request(
            job(**{**LARGE, **more}),
            cluster(("gpu", count), kinds=[kind(memory_gib=gib)]),
            MemXOptions(),
            facts=facts(),
            versions={},
        ),
        {"gpu": []},
    )


def test_12_outer_stages_need_more_and_get_fewer_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}
    more = {"vocab_size": 128256, "micro_batch_size": 2, "global_batch_size": 32}
    even = [
        stage["peak_memory_bytes"]
        for stage in predicted(tmp_path, capsys, **sizes, **more)["stages"]
    ]
    assert even[0] > max(even[1:3])
    assert even[3] > even[2]
    plan = plan_of(24, 8, **sizes, **more)
    layers = [sum(chunk.num_layers for chunk in stage.chunks) for stage in plan.stages]
    assert sum(layers) == 32
    assert max(layers[0], layers[3]) < max(layers[1:3])


def test_13_quadratic_growth_is_recognised_from_three_points(tmp_path: Path) -> None:
    """4,026, 12,110 and 43,931 MB at 4k, 8k and 16k: 32k does not fit 96 GB."""
    shape = {
        **{"layers": 1, "hidden": 5120, "ffn": 13824, "heads": 40, "kv_heads": 8},
        **{"vocab": 152064, "gpu": "H20", "num_gpus": 4, "gpus_per_node": 4, "tp": 4, "pp": 1},
        **{"dp": 1, "gbs": 1, "recompute": "", "seq_parallel": "", "flash": "", "dist_opt": ""},
        **{"iter_time_s": "", "peak_mem_gib": ""},
    }
    points = ((4096, 4026), (8192, 12110), (16384, 43931))
    seen = [{**shape, "seq": s, "peak_mem_gib": mb * 1e6 / 2**30} for s, mb in points]
    fit = read_runs(write(tmp_path / "seen.csv", *seen))[0]
    cases = [make_case(run, Setting()) for run in fit]
    asked = {**shape, "seq": 32768, "notes": "OOM"}
    test = read_runs(write(tmp_path / "asked.csv", asked))[0]
    calibrated = calibrate(cases[0].kind, cases)
    said = predict(calibrated, [make_case(test[0], Setting())])[0]
    assert not calibrated.setting.flash
    # In proportion to the last point it would be 88,000 MB, and look as if it fits.
    assert np.exp(said.said["memory"][0]) > 120e9
    result = evaluate(test, budget=8, fit_runs=fit)
    assert result["fits"]["failed_called_oom"] == 1.0


def test_16_memory_from_the_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """7.5 bytes for each of 6.7 B parameters, and 31 GB of activations and more: over 80 GB."""
    flags = {
        **{"ffn_hidden_size": 11008, "vocab_size": 32000, "swiglu": True},
        **{"untie_embeddings_and_output_weights": True, "disable_bias_linear": True},
        **{"normalization": "RMSNorm", "position_embedding_type": "rope"},
        **{"micro_batch_size": 2, "global_batch_size": 128, "use_distributed_optimizer": True},
        **{"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
    }
    found = predicted(tmp_path, capsys, **flags)
    parts = found["stages"][0]["memory_breakdown_bytes"]
    assert parts["parameters"] + parts["gradients"] + parts["optimizer"] == pytest.approx(
        50.5e9, rel=0.01
    )
    assert parts["activations"] > 31e9
    assert not found["fits"]
    # Offered in its place, with the numbers: recomputation.
    plan = plan_of(80, 8, **flags)
    assert plan.stages[0].chunks[0].recompute.label != "none"
    assert plan.prediction is not None
    assert plan.prediction.peak_utilisation < 0.95


def test_18_an_unmeasured_recompute_mode_is_no_silent_extrapolation() -> None:
    """Measured without recomputation; asked with it, on 93 layers over 8 stages."""
    measured = [row(point) for point in POINTS if point.recompute == "none"]
    read = job(num_layers=93)
    provider = FittedProvider(read, cluster(("gpu", 8)), {"gpu": measured})
    shape = {"kind": "gpu", "tp": 1, "micro_batch_size": 1, "seq_length": 128}
    plain = UnitKey(unit="layer", **shape)
    full = UnitKey(unit="layer", recompute="full", **shape)
    assert provider.unit(plain).measured
    assert not provider.unit(full).measured
    assert provider.unit(full) == CatalogueProvider(read, cluster(("gpu", 8))).unit(full)
    assert gaps([plain, full], provider) == [
        "gpu: layer under full recomputation at tp 1 from the catalogue, not measured"
    ]


def test_26_a_profile_row_says_what_it_was_measured_on() -> None:
    good = row(POINTS[0]).to_dict()
    assert ProfileRow.from_dict(good)
    for name in ("device_kind", "layer_signature", "platform"):
        with pytest.raises(BadInputError, match=name):
            ProfileRow.from_dict({key: value for key, value in good.items() if key != name})
    # A shape that does not fit is a row too, and teaches no cost.
    failed = replace(row(POINTS[0]), status="oom", forward_s=0.0, seq_length=131072)
    rows = [*(row(point) for point in POINTS), failed]
    one = FittedProvider(job(), cluster(("gpu", 2)), {"gpu": rows})
    other = FittedProvider(job(), cluster(("gpu", 2)), {"gpu": rows[:-1]})
    key = UnitKey(kind="gpu", unit="layer", tp=1, micro_batch_size=1, seq_length=128)
    assert one.unit(key) == other.unit(key)


def test_28_an_infeasible_job_is_no_plan_of_zero_throughput() -> None:
    """8 B parameters on 32 x 5 GB: what is short, where, and by how much."""
    with pytest.raises(InfeasibleError) as error:
        plan_of(5, 32, vocab_size=128256, ffn_hidden_size=14336, swiglu=True)
    assert "short" in str(error.value)
    assert "GiB" in str(error.value)
    assert error.value.exit_code == 3


def test_29_outside_what_was_measured_confidence_falls_and_is_named() -> None:
    rows = [row(point) for point in POINTS]
    provider = FittedProvider(job(), cluster(("gpu", 2)), {"gpu": rows})
    shape = {"kind": "gpu", "unit": "layer", "tp": 1, "seq_length": 128}
    inside = UnitKey(micro_batch_size=1, **shape)
    outside = UnitKey(micro_batch_size=64, **shape)
    assert provider.unit(outside).log_sigma > provider.unit(inside).log_sigma
    assert gaps([inside, outside], provider) == [
        "gpu: layer extrapolated to micro-batch 64, sequence 128"
    ]
