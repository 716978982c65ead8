"""What runs said of a device kind, as a file that plans rest on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from jobs import cluster, facts, job, words
from test_evaluation import sweep, write

from megatron_memx.cache.signature import signature
from megatron_memx.cli.main import main
from megatron_memx.cost.calibration import (
    Calibration,
    is_calibration,
    read_calibrations,
    save_calibrations,
)
from megatron_memx.cost.efficiency import Efficiency
from megatron_memx.cost.prior import CatalogueProvider
from megatron_memx.errors import BadInputError
from megatron_memx.options import MemXOptions
from megatron_memx.planner import make_plan, make_request

KNOWN = Calibration(
    device_kind="gpu",
    efficiency=Efficiency(matmul=0.4),
    log_sigma=0.05,
    basis="8 runs of here.csv",
    reserved_bytes=2e9,
)
WORLD = str(ROOT / "examples" / "clusters" / "one_node.yaml")


def planned(calibrations: dict[str, Calibration]) -> Any:
    request = make_request(
        job(bf16=True),
        cluster(("gpu", 4)),
        MemXOptions(),
        facts=facts(),
        versions={},
        calibrations=calibrations,
    )
    return make_plan(request, {"gpu": []}), signature(request.fields({"gpu": []}))


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    save_calibrations(tmp_path / "c.json", [KNOWN])
    assert is_calibration(tmp_path / "c.json")
    assert read_calibrations(tmp_path / "c.json", ["gpu", "other"]) == {"gpu": KNOWN}


def test_a_calibration_of_another_device_is_refused(tmp_path: Path) -> None:
    save_calibrations(tmp_path / "c.json", [KNOWN])
    with pytest.raises(BadInputError, match="is of gpu; the cluster has h100"):
        read_calibrations(tmp_path / "c.json", ["h100"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"terms": {"speed": 1.0}}, "unknown terms speed"),
        ({"terms": {"matmul": -0.5}}, "matmul -0.5 is outside"),
        ({"terms": {"matmul": "fast"}}, "no number"),
        ({"log_sigma": None}, "no number"),
        ({"terms": {"fixed_s": float("inf")}}, "not finite"),
    ],
)
def test_what_cannot_be_a_calibration_is_named(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    data = {"schema": 1, "calibrations": [{**KNOWN.to_dict(), **change}]}
    (tmp_path / "c.json").write_text(json.dumps(data))
    with pytest.raises(BadInputError, match=said):
        read_calibrations(tmp_path / "c.json", ["gpu"])


def test_other_files_are_no_calibrations(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"schema": 1}\n{"schema": 1}\n')
    assert not is_calibration(tmp_path / "rows.jsonl")
    assert not is_calibration(tmp_path / "nowhere")
    (tmp_path / "other.json").write_text('{"schema": 7}')
    with pytest.raises(BadInputError, match="no calibration file of schema"):
        read_calibrations(tmp_path / "other.json", ["gpu"])


def test_plans_rest_on_it_and_say_so() -> None:
    plain, plain_signature = planned({})
    made, made_signature = planned({"gpu": KNOWN})
    assert plain_signature != made_signature
    assert "gpu: calibrated on 8 runs of here.csv" in made.prediction.basis
    assert made.prediction.iteration_time_s != plain.prediction.iteration_time_s
    wide = plain.prediction.iteration_time_high_s / plain.prediction.iteration_time_low_s
    narrow = made.prediction.iteration_time_high_s / made.prediction.iteration_time_low_s
    assert narrow < wide
    for stage in made.stages:
        assert stage.prediction.memory_breakdown_bytes["reserve"] == int(2e9)
        total = sum(stage.prediction.memory_breakdown_bytes.values())
        assert total == pytest.approx(stage.prediction.peak_memory_bytes, rel=1e-3)


def test_kinds_without_one_keep_the_catalogue() -> None:
    from jobs import kind

    world = cluster(("gpu", 2), ("other", 2), kinds=[kind(), kind("other")])
    provider = CatalogueProvider(job(), world, calibrations={"gpu": KNOWN})
    assert provider.basis == "gpu: calibrated on 8 runs of here.csv; other: catalogue"
    assert provider.step("other").reserved_bytes == 0


def test_evaluate_saves_what_plan_and_predict_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {**row, "iter_time_s": 0.1 * (1 + index), "peak_mem_gib": 5 + index}
        for index, row in enumerate(sweep())
    ]
    runs = write(tmp_path / "runs.csv", *rows)
    saved = str(tmp_path / "c.json")
    assert main(["evaluate", "--runs", str(runs), "--save", saved]) == 0
    assert main(["evaluate", "--runs", str(runs), "--save", saved, "--by", "model"]) == 2
    capsys.readouterr()
    asked = words(bf16=True, micro_batch_size=1)
    for command in ("plan", "predict"):
        code = main([command, "--json", "--cluster", WORLD, "--calibration", saved, "--", *asked])
        told = capsys.readouterr()
        assert code == 0, told.err
        assert "a100-80gb: calibrated on 8 runs of runs.csv" in told.out


def test_the_published_one_fits_its_device() -> None:
    path = ROOT / "examples" / "calibrations" / "a100-80gb.json"
    found = read_calibrations(path, ["a100-80gb"])["a100-80gb"]
    assert found.basis == "28 runs of vtrain.csv"
    assert 0.5 < found.efficiency.matmul < 1
