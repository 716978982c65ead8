"""``memx evaluate``: reading runs, putting them in the planner's terms, fitting, scoring."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_memx.cli.main import main
from megatron_memx.cost.efficiency import SPREAD, TIME_TERMS, assumed, moved
from megatron_memx.cost.pipeline import extrapolate, simulate
from megatron_memx.errors import BadInputError
from megatron_memx.evaluation.calibrate import Process, choose, fit
from megatron_memx.evaluation.cases import Setting, UnusableError, device_kind, make_case
from megatron_memx.evaluation.engine import Engine
from megatron_memx.evaluation.evaluate import calibrate, evaluate
from megatron_memx.evaluation.runs import COLUMNS, Run, read_runs
from megatron_memx.evaluation.scores import confusion, errors, ranking
from megatron_memx.evaluation.splits import stage_layers

ROW: Mapping[str, object] = {
    **{"source": "here", "model": "GPT", "layers": 8, "hidden": 1024, "ffn": 4096, "heads": 16},
    **{"kv_heads": 16, "seq": 1024, "vocab": 51200, "gpu": "A100-80GB", "num_gpus": 8},
    **{"gpus_per_node": 8, "tp": 1, "pp": 2, "dp": 4, "mbs": 1, "gbs": 32, "recompute": "none"},
    **{"seq_parallel": "false", "dist_opt": "false", "precision": "bf16", "flash": "flash"},
    **{"framework": "Megatron-LM", "iter_time_s": 1.0, "peak_mem_gib": 10.0},
}


def write(path: Path, *rows: Mapping[str, object]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows([{**ROW, **row} for row in rows])
    return path


def one(tmp_path: Path, **changes: object) -> Run:
    runs, skipped = read_runs(write(tmp_path / "one.csv", changes))
    assert not skipped
    return runs[0]


def sweep(seq: int = 1024) -> list[dict[str, object]]:
    """Sizes and micro-batches of one model on eight GPUs, as a team would sweep them."""
    return [
        {
            **{"tp": tp, "pp": pp, "dp": 8 // tp // pp, "mbs": mbs},
            **{"hidden": hidden, "ffn": 4 * hidden, "seq": seq},
        }
        for tp in (1, 2, 4)
        for pp in (1, 2)
        for mbs in (1, 2)
        for hidden in (1024, 2048, 3072)
    ]


def measured_by(tmp_path: Path, steps: Mapping[str, float], seq: int = 1024) -> list[Run]:
    """The sweep, 'measured' by the engine itself on a device with other efficiencies."""
    runs, _ = read_runs(write(tmp_path / "sweep.csv", *sweep(seq)))
    made = []
    for run in runs:
        engine = Engine(make_case(run, Setting()))
        value = moved(assumed(engine.case.cluster.kinds[engine.case.kind]), steps)
        made.append(
            {
                "iter_time_s": engine.time_s(value),
                "peak_mem_gib": engine.memory_bytes(value) / 2**30,
            }
        )
    rows = [{**row, **told} for row, told in zip(sweep(seq), made, strict=True)]
    return read_runs(write(tmp_path / "measured.csv", *rows))[0]


def test_blank_cells_stay_unknown_and_rows_that_tell_nothing_are_counted(tmp_path: Path) -> None:
    rows = [
        {"vocab": "", "recompute": ""},
        {"notes": "SUSPECT: the batch disagrees"},
        {"notes": "very low MFU, suspect run"},
        {"notes": "source inconsistency: 9 GPUs"},
        {"hidden": ""},
        {"iter_time_s": "", "peak_mem_gib": ""},
        {"mbs": "two"},
        {"notes": "FAILED", "iter_time_s": ""},
    ]
    runs, skipped = read_runs(write(tmp_path / "runs.csv", *rows))
    assert len(runs) == 2
    assert runs[0].vocab is None
    assert runs[0].recompute == ""
    assert runs[1].failed
    assert skipped == {
        "the notes call the run suspect": 2,
        "the notes say source inconsistency": 1,
        "hidden is not stated": 1,
        "neither time nor memory is stated": 1,
        "mbs cannot be read": 1,
    }


def test_a_time_follows_exactly_from_throughput_and_batch(tmp_path: Path) -> None:
    run = one(tmp_path, iter_time_s="", tokens_per_s_per_gpu=4096, gbs=32)
    assert run.iter_time_s == 32 * 1024 / (4096 * 8)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("a,b\n1,2\n", "no column layers"), (None, "cannot be read")],
)
def test_a_file_that_is_no_runs_file_is_one_error(
    tmp_path: Path, text: str | None, wrong: str
) -> None:
    path = tmp_path / "bad.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInputError, match=wrong):
        read_runs(path)


@pytest.mark.parametrize(
    ("printed", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("A100 40GB", "a100-40gb"),
        ("H100-80GB", "h100-80gb"),
        ("T4", "t4"),
    ],
)
def test_gpus_are_known_by_the_names_that_people_print(printed: str, kind: str) -> None:
    assert device_kind(printed) == kind


def test_an_unknown_gpu_is_a_reason() -> None:
    with pytest.raises(UnusableError, match="does not know the GPU 'Abacus'"):
        device_kind("Abacus")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"zero": "3"}, "ZeRO-3"),
        ({"precision": "fp8"}, "8-bit"),
        ({"tp": 3}, "is not the number of GPUs"),
        ({"mbs": ""}, "mbs is not stated"),
        ({"gbs": 30}, "gbs is not a multiple of mbs x dp"),
        ({"vpp": 2, "gbs": 12}, "virtual stages with micro-batches that are no multiple of pp"),
    ],
)
def test_what_is_not_modelled_is_a_reason(
    tmp_path: Path, changes: Mapping[str, object], reason: str
) -> None:
    with pytest.raises(UnusableError, match=reason):
        make_case(one(tmp_path, **changes), Setting())


def test_what_a_source_leaves_open_is_named(tmp_path: Path) -> None:
    assert make_case(one(tmp_path, pp=1, dp=8), Setting()).assumed == ()
    silent = one(tmp_path, vocab="", recompute="", flash="", seq_parallel="")
    assert set(make_case(silent, Setting()).assumed) == {
        "vocab",
        "recompute",
        "flash",
        "seq_parallel",
        "memory_of",
    }


def test_a_source_that_prints_the_last_rank_is_found_out(tmp_path: Path) -> None:
    """Megatron's own logs print the last pipeline rank's peak, which is not the fullest one's."""
    plain = [{**row, "vocab": 4096, "layers": 16} for row in sweep()]
    runs = read_runs(write(tmp_path / "plain.csv", *plain))[0]
    for told in ("last", "fullest"):
        rows = []
        for run, row in zip(runs, plain, strict=True):
            engine = Engine(make_case(run, Setting(memory_of=told)))
            value = assumed(engine.case.cluster.kinds[engine.case.kind])
            peak = engine.memory_bytes(value) / 2**30
            rows.append({**row, "iter_time_s": engine.time_s(value), "peak_mem_gib": peak})
        seen = read_runs(write(tmp_path / f"{told}.csv", *rows))[0]
        cases = [make_case(run, Setting()) for run in seen]
        assert calibrate(cases[0].kind, cases).setting.memory_of == told


def test_a_nearly_full_device_is_slow(tmp_path: Path) -> None:
    """The allocator's retries: where memory was calibrated and says 95 % and more is needed."""
    engine = Engine(make_case(one(tmp_path), Setting()))
    value = assumed(engine.case.cluster.kinds[engine.case.kind])
    need = engine.memory_bytes(value)

    def slower(share: float) -> float:
        spare = share * engine.case.memory_bytes - need
        memory = replace(value, reserved_bytes=value.reserved_bytes + spare)
        return Engine(engine.case, memory).time_s(value) / engine.time_s(value)

    assert slower(0.9) == pytest.approx(1.0, abs=0.01)
    assert slower(1.0) > 3
    # What ran although it was said to need far more than there is, needed less.
    assert slower(1.3) == 1.0


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"pp": 2}, ((4,), (4,))),
        ({"pp": 2, "vpp": 2}, ((2, 2), (2, 2))),
        ({"pp": 2, "notes": "layers per stage [5, 3]"}, ((5,), (3,))),
        ({"pp": 2, "notes": "s0: 6 layers, s1: 4 layers incl. embedding and head"}, ((5,), (3,))),
        ({"pp": 2, "notes": "layers per stage [5, 4]"}, ((4,), (4,))),
    ],
)
def test_stages_hold_what_the_row_says(
    tmp_path: Path, changes: Mapping[str, object], layers: tuple[tuple[int, ...], ...]
) -> None:
    run = one(tmp_path, **changes)
    case = make_case(run, Setting())
    assert stage_layers(run, case.job.model, case.outer.sizes) == layers


def test_a_fit_finds_the_terms_that_made_the_measurements(tmp_path: Path) -> None:
    """A device's own rate, link and start, told apart from a third of the rows."""
    runs = measured_by(tmp_path, {"matmul": -1.5, "intra_link": -1.0, "kernel_start_s": 1.0})
    before = evaluate(runs, budget=0)
    after = evaluate(runs, budget=12)
    assert before["fit_rows"] == 0
    assert before["time"]["mape"] > 0.15
    assert after["time"]["mape"] < 0.015
    assert after["fit_rows"] == 12
    assert after["test_rows"] == len(runs) - 12
    assert after["time"]["spearman"] > 0.99


def test_memory_terms_are_found_too(tmp_path: Path) -> None:
    runs = measured_by(tmp_path, {"activations": 2.0, "reserved_bytes": 2.0}, seq=8192)
    before = evaluate(runs, budget=0)["memory"]["mape"]
    assert evaluate(runs, budget=8)["memory"]["mape"] < 0.3 * before


def test_a_group_smaller_than_the_budget_fits_nothing_and_says_so(tmp_path: Path) -> None:
    runs = measured_by(tmp_path, {})[:5]
    result = evaluate(runs, budget=8)
    assert result["fit_rows"] == 0
    assert result["test_rows"] == 5
    assert "fewer rows than the budget of 8" in result["notes"][0]


def test_the_minimal_set_takes_no_row_twice_and_the_telling_one_first() -> None:
    jacobian = np.array([[0.1], [2.0], [0.1], [0.1]])
    features = np.arange(4.0)[:, None] * 50
    process = Process(blocks=(((0,), 0.05, 1.0),), noise=0.01)
    chosen = choose(jacobian, features, process, 3)
    assert chosen[0] == 1
    assert len(set(chosen)) == 3


def test_the_unexplained_part_fades_away_from_what_was_measured() -> None:
    features = np.array([[0.0], [1.0], [2.0]])
    off = np.array([0.1, 0.1, 0.1])
    process = Process(blocks=(((0,), 0.1, 1.0),), noise=0.01)
    found = fit(lambda z: 0 * z[:1].repeat(3), off, features, [np.zeros(1)], [process])
    mean, sigma = found.correction(np.array([[1.0], [50.0]]))
    assert mean[0] == pytest.approx(0.1, abs=0.01)
    assert mean[1] == pytest.approx(0.0, abs=1e-6)
    assert sigma[1] > 3 * sigma[0]


def test_a_row_that_the_others_contradict_loses_its_say() -> None:
    features = np.linspace(0, 3, 12)[:, None]
    measured = np.zeros(12)
    measured[5] = 2.0
    process = Process(blocks=(((0,), 0.02, 1.0),), noise=0.02)
    found = fit(lambda z: np.full(12, 0.1 * z[0]), measured, features, [np.zeros(1)], [process])
    assert found.contradicted == (5,)
    assert abs(found.z[0]) < 0.2


def test_errors_by_hand() -> None:
    found = errors(np.log([1.1, 1.8, 3.0]), np.log([1.0, 2.0, 3.0]), np.full(3, 0.2))
    assert found is not None
    assert found["mape"] == pytest.approx(0.2 / 3)
    assert found["bias"] == pytest.approx(0.0)
    assert found["median_ape"] == pytest.approx(0.1)
    assert found["spearman"] == pytest.approx(1.0)
    assert found["within_90"] == 1.0
    assert errors(np.array([]), np.array([]), np.array([])) is None


def test_ranking_by_hand() -> None:
    said = np.log([1.0, 2.0, 3.0, 5.0, 4.0, 6.0, 1.0])
    seen = np.log([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0])
    found = ranking(said, seen, [*"aaabbb", "c"])
    assert found == {
        "ranked_groups": 2,
        "top1": 0.5,
        "top5": 1.0,
        "regret": pytest.approx((0 + 0.25) / 2),
    }


def test_who_fits_is_told_by_model() -> None:
    rows = [(False, False, "a"), (False, True, "a"), (True, True, "a"), (True, False, "b")]
    assert confusion(rows) == {
        "ran": 2,
        "ran_called_fitting": 0.5,
        "failed": 2,
        "failed_called_oom": 0.5,
        "failed_called_oom_by_model": {"a": 1.0, "b": 0.0},
    }


@given(st.integers(1, 4), st.integers(1, 40), st.floats(0, 0.3))
def test_a_folded_iteration_is_nearly_the_whole_one(pp: int, rounds: int, p2p_s: float) -> None:
    forward = [[1.0 + 0.1 * rank] for rank in range(pp)]
    backward = [[2.0 + 0.1 * rank] for rank in range(pp)]
    sent = [p2p_s] * pp
    whole = simulate(forward, backward, sent, pp * rounds)
    folded = extrapolate(forward, backward, sent, pp * rounds)
    assert max(folded.finish_s) == pytest.approx(max(whole.finish_s), rel=0.02)


def test_every_time_term_moves_some_prediction(tmp_path: Path) -> None:
    """A term that nothing reads would be a knob that does nothing."""
    changes: dict[str, object] = {"num_gpus": 16, "tp": 2, "pp": 2, "dp": 4, "dist_opt": "true"}
    engine = Engine(make_case(one(tmp_path, **changes), Setting(overlap=True)))
    base = assumed(engine.case.cluster.kinds[engine.case.kind])
    still = [
        name
        for name in TIME_TERMS
        if engine.time_s(moved(base, {name: 1.0})) == engine.time_s(base)
    ]
    # On an even pipeline the reduction hides behind the first stage's backward pass.
    assert still in ([], ["exposed"])
    assert set(SPREAD) & set(TIME_TERMS)


def test_the_command_prints_the_documented_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_by(tmp_path, {"matmul": -1.0})
    path = str(tmp_path / "measured.csv")
    argv = ["evaluate", "--runs", path, "--budget", "6", "--by", "source,gpu", "--json"]
    assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    for name in ("fit_rows", "test_rows", "skipped", "top1", "top5", "regret", "fits", "groups"):
        assert name in result
    for name in ("mape", "median_ape", "p95_ape", "bias", "spearman"):
        assert name in result["time"]
        assert name in result["memory"]
    assert list(result["groups"]) == ["here, A100-80GB"]
    assert main(["evaluate", "--runs", path, "--fit-runs", path]) == 0
    assert "fitted on 36 measured rows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--budget", "3", "--fit-runs", "x.csv"], "both say what to fit on"),
        (["--budget", "-1"], "must be 0 or more"),
        (["--by", "colour"], "no column colour"),
    ],
)
def test_bad_options_are_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], wrong: str
) -> None:
    path = write(tmp_path / "runs.csv", {})
    assert main(["evaluate", "--runs", str(path), *words]) != 0
    assert wrong in capsys.readouterr().err
