"""The minimal set, its store, and the predictor that learns from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from jobs import cluster, job

from megatron_memx.cost.units import UnitKey
from megatron_memx.errors import BadInputError
from megatron_memx.parallel import Recompute
from megatron_memx.planner import with_measured_links
from megatron_memx.predictor.core import fit_core, observe
from megatron_memx.predictor.model import FittedProvider
from megatron_memx.predictor.residual import FEATURES, Residual
from megatron_memx.profile.augment import AUGMENTED_WEIGHT, Sample, augment
from megatron_memx.profile.design import (
    LINK,
    OPTIMIZER,
    ProfilePoint,
    full_grid_size,
    minimal_set,
    shapes,
)
from megatron_memx.profile.store import (
    OOM,
    ProfileRow,
    ProfileStore,
    digest,
    export_rows,
    import_rows,
    layer_signature,
    read_rows,
)

POLICIES = [Recompute(), Recompute.selective("core_attn"), Recompute.full("block", 3)]
POINTS = minimal_set(
    tps=[(1, False), (2, False)], micro_batch_sizes=[1, 2, 4], seq_length=128, policies=POLICIES
)
# What a device really does: start-up, tokens, attention, for (forward, backward, saved, working).
TRUTH = {
    "layer": {
        "none": ((1e-4, 2e-6, 1e-9), (2e-4, 4e-6, 2e-9), (0, 3000, 20), (5000, 900, 2)),
        "selective": ((1e-4, 2e-6, 1e-9), (2e-4, 4e-6, 3e-9), (0, 3000, 0), (5000, 900, 22)),
        "full": ((1e-4, 2e-6, 1e-9), (3e-4, 6e-6, 3e-9), (0, 256, 0), (5000, 3600, 22)),
    },
    "embedding": {"none": ((1e-5, 1e-7, 0), (1e-5, 1e-7, 0), (0, 72, 0), (0, 0, 0))},
    "head": {"none": ((1e-5, 9e-6, 0), (1e-5, 1.8e-5, 0), (0, 4000, 0), (0, 9000, 0))},
}


def value(coefficients: tuple[float, float, float], mbs: int, seq: int) -> float:
    a, b, c = coefficients
    return a + b * mbs * seq + c * mbs * seq * seq


def row(point: ProfilePoint, **more: object) -> ProfileRow:
    """Return what a device of TRUTH would measure at ``point``."""
    layer = TRUTH["layer"][point.recompute]
    extra = {"first": "embedding", "last": "head"}.get(point.part)
    totals = []
    for index in range(4):
        own = point.num_layers * value(layer[index], point.micro_batch_size, point.seq_length)
        other = (
            value(TRUTH[extra]["none"][index], point.micro_batch_size, point.seq_length)
            if extra
            else 0.0
        )
        totals.append(max(own / point.num_layers, other) if index == 3 else own + other)
    return ProfileRow(
        device_kind="gpu",
        platform="cuda",
        layer_signature="s",
        part=point.part,
        num_layers=point.num_layers,
        tp=point.tp,
        micro_batch_size=point.micro_batch_size,
        seq_length=point.seq_length,
        recompute=point.recompute,
        modules=point.modules,
        forward_s=totals[0],
        backward_s=totals[1],
        saved_bytes=round(totals[2]),
        transient_bytes=round(totals[3]),
        repeats=5,
        **more,
    )


def rows(points: Sequence[ProfilePoint] = POINTS) -> list[ProfileRow]:
    return [row(point) for point in points]


def key(unit: str, **more: object) -> UnitKey:
    values = {"kind": "gpu", "unit": unit, "tp": 1, "micro_batch_size": 2, "seq_length": 128}
    return UnitKey(**{**values, **more})


def test_the_minimal_set_is_small_and_says_why() -> None:
    assert len(POINTS) == len({point.key for point in POINTS}) == 32
    assert all(point.reason for point in POINTS)
    assert len(POINTS) < full_grid_size(tps=2, micro_batch_sizes=3, policies=12, num_layers=32) / 10


def test_three_shapes_identify_the_three_terms_and_two_do_not() -> None:
    found = shapes([1, 2, 4], 128)
    columns = np.array([[1.0, m * s, m * s * s] for m, s, _ in found])
    assert np.linalg.matrix_rank(columns) == 3
    for left_out in range(3):
        fewer = np.delete(columns, left_out, axis=0)
        assert np.linalg.matrix_rank(fewer) < 3


def test_no_run_of_the_set_can_be_left_out() -> None:
    """Every run's time is a sum of terms; without any one run, some terms have no solution left."""
    names: dict[tuple[object, ...], int] = {}

    def terms(point: ProfilePoint) -> dict[int, float]:
        tokens = point.micro_batch_size * point.seq_length
        columns = (1.0, float(tokens), float(tokens * point.seq_length))
        found: dict[int, float] = {}

        def add(unit: tuple[object, ...], times: int, values: Sequence[float]) -> None:
            for index, value in enumerate(values):
                found[names.setdefault((*unit, index), len(names))] = times * value

        add(("chunk", point.tp), 1, (1.0,))
        add(("layer", point.tp, point.recompute, point.modules), point.num_layers, columns)
        if point.part in ("first", "last"):
            add((point.part, point.tp), 1, columns)
        return found

    found = [terms(point) for point in POINTS]
    matrix = np.zeros((len(POINTS), len(names)))
    for line, entries in zip(matrix, found, strict=True):
        for column, value in entries.items():
            line[column] = value
    matrix /= np.abs(matrix).max(axis=0)
    assert np.linalg.matrix_rank(matrix) == len(names) == len(POINTS)
    for left_out in range(len(POINTS)):
        assert np.linalg.matrix_rank(np.delete(matrix, left_out, axis=0)) < len(names)


def test_the_core_finds_the_truth_of_unseen_shapes() -> None:
    core = fit_core(observe(rows()))
    for unit, classes in TRUTH.items():
        for recompute, truth in classes.items():
            modules = ("core_attn",) if recompute == "selective" else ()
            found = next(
                item
                for item in core.coefficients
                if (item.unit, item.tp, item.recompute) == (unit, 1, recompute)
            )
            assert found.modules == modules
            for index, name in enumerate(("forward_s", "backward_s", "saved_bytes")):
                expected = value(truth[index], 2, 96)
                assert core.value(found, name, 2, 96) == pytest.approx(expected, rel=0.02)


def test_what_a_chunk_costs_by_itself_is_charged_once() -> None:
    from dataclasses import replace

    with_overhead = [
        replace(item, forward_s=item.forward_s + 5e-5)
        if item.part in ("middle", "first", "last")
        else item
        for item in rows()
    ]
    core = fit_core(observe(with_overhead))
    layer = next(item for item in core.coefficients if item.unit == "layer" and item.tp == 1)
    expected = value(TRUTH["layer"]["none"][0], 1, 128)
    assert core.value(layer, "forward_s", 1, 128) == pytest.approx(expected, rel=0.02)
    chunk = next(item for item in core.coefficients if item.unit == "chunk" and item.tp == 1)
    assert core.value(chunk, "forward_s", 4, 64) == pytest.approx(5e-5, rel=0.02)


def test_the_provider_is_measured_inside_and_says_when_outside() -> None:
    read = job(transformer_impl="local")
    provider = FittedProvider(read, cluster(("gpu", 2)), {"gpu": rows()})
    inside = provider.unit(key("layer"))
    assert inside.measured
    assert inside.in_range
    assert inside.forward_s == pytest.approx(value(TRUTH["layer"]["none"][0], 2, 128), rel=0.05)
    outside = provider.unit(key("layer", micro_batch_size=32))
    assert outside.measured
    assert not outside.in_range
    assert outside.log_sigma > inside.log_sigma
    assert outside.saved_bytes == pytest.approx(value(TRUTH["layer"]["none"][2], 32, 128), rel=0.02)
    unknown = provider.unit(key("layer", tp=4))
    assert not unknown.measured
    assert "measured units" in provider.basis


def test_memory_grows_with_micro_batch_and_sequence() -> None:
    read = job(transformer_impl="local")
    provider = FittedProvider(read, cluster(("gpu", 2)), {"gpu": rows()})
    by_batch = [provider.unit(key("layer", micro_batch_size=m)).saved_bytes for m in (1, 2, 4, 8)]
    assert by_batch == sorted(by_batch)
    by_length = [provider.unit(key("layer", seq_length=s)).saved_bytes for s in (64, 96, 128)]
    assert by_length == sorted(by_length)


def test_without_rows_the_catalogue_answers_and_says_so() -> None:
    provider = FittedProvider(job(), cluster(("gpu", 2)), {"gpu": []})
    assert not provider.unit(key("layer")).measured
    assert "nothing was measured" in provider.basis


def test_failed_rows_teach_nothing_but_do_not_hurt() -> None:
    spoiled = [*rows(), row(POINTS[0], status=OOM)]
    assert len(observe(spoiled)) == len(observe(rows()))


def test_large_micro_batches_never_look_free() -> None:
    """Noise that makes two micro-batches cost as much as one must not be believed beyond them."""
    from dataclasses import replace

    flat = [
        replace(item, forward_s=1e-3, backward_s=2e-3) if item.part == "middle" else item
        for item in rows()
    ]
    core = fit_core(observe(flat))
    layer = next(item for item in core.coefficients if item.unit == "layer" and item.tp == 1)
    at_two = core.value(layer, "forward_s", 2, 128)
    assert core.value(layer, "forward_s", 16, 128) == pytest.approx(8 * at_two)


def test_disturbed_rows_are_used_where_there_is_nothing_better() -> None:
    from dataclasses import replace

    disturbed = [replace(item, status="contended", spread=1.0) for item in rows()]
    assert len(observe(disturbed)) == len(observe(rows()))
    both = [*disturbed, *rows()]
    assert {item.spread for item in observe(both)} == {0.0}


def test_one_shape_alone_grows_with_its_tokens() -> None:
    base = [
        row(point) for point in POINTS if (point.micro_batch_size, point.seq_length) == (1, 128)
    ]
    core = fit_core(observe(base))
    layer = next(item for item in core.coefficients if item.unit == "layer" and item.tp == 1)
    one = core.value(layer, "saved_bytes", 1, 128)
    assert one == pytest.approx(value(TRUTH["layer"]["none"][2], 1, 128), rel=0.01)
    assert core.value(layer, "saved_bytes", 4, 128) == pytest.approx(4 * one)


def test_the_optimizer_is_a_line_in_parameters() -> None:
    measured = [
        ProfileRow(
            device_kind="gpu",
            platform="cuda",
            layer_signature="s",
            part=OPTIMIZER,
            num_layers=n,
            tp=1,
            micro_batch_size=1,
            seq_length=128,
            forward_s=1e-3 + n * 2e-3,
            transient_bytes=400 + 8 * n * 1000,
            num_parameters=n * 1000,
        )
        for n in (1, 2)
    ]
    provider = FittedProvider(job(), cluster(("gpu", 2)), {"gpu": [*rows(), *measured]})
    step = provider.step("gpu")
    assert step.optimizer_s_per_parameter == pytest.approx(2e-6)
    assert step.optimizer_s == pytest.approx(1e-3)
    assert (step.optimizer_bytes_per_parameter, step.optimizer_bytes) == (8, 400)


def test_measured_links_replace_the_catalogue() -> None:
    world = cluster(("gpu", 2))
    sent = [
        ProfileRow(
            device_kind="gpu",
            platform="cuda",
            layer_signature="s",
            part=LINK,
            num_layers=0,
            tp=1,
            micro_batch_size=0,
            seq_length=0,
            forward_s=1e-5 + size / 2e9,
            size_bytes=size,
            peer_kind="gpu",
            where="intra-node",
        )
        for size in (1000, 1_000_000)
    ]
    link = with_measured_links(world, {"gpu": sent}).link(0, 1)
    assert link.source == "measured"
    assert link.bandwidth_bytes_per_s == pytest.approx(2e9)
    assert link.latency_s == pytest.approx(1e-5, rel=1e-3)


def test_augmented_rows_lie_between_their_origins() -> None:
    samples = [
        Sample(
            features=np.array([float(i), 2.0 * i]),
            targets=np.array([0.1 * i, 0.0]),
            group="a" if i < 3 else "b",
            origin=(i,),
        )
        for i in range(4)
    ]
    made = [sample for sample in augment(samples) if len(sample.origin) == 2]
    assert len(made) == 9
    for sample in made:
        left, right = (samples[i] for i in sample.origin)
        assert left.group == right.group == sample.group == "a"
        assert left.features[0] < sample.features[0] < right.features[0]
        assert sample.weight == AUGMENTED_WEIGHT


def test_the_residual_has_two_outputs_and_a_safe_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(60, len(FEATURES)))
    samples = [
        Sample(
            features=line,
            targets=np.array([0.3 if line[0] > 0 else -0.3, 0.1 if line[1] > 0 else -0.1]),
            group="a",
            origin=(index,),
        )
        for index, line in enumerate(features)
    ]
    residual = Residual.fit(samples)
    said = residual.predict(features)
    assert said.shape == (60, 2)
    truth = np.stack([sample.targets for sample in samples])
    assert float(np.abs(said - truth).mean()) < 0.1
    file = tmp_path / "residual.json"
    residual.save(file)
    assert np.array_equal(Residual.load(file).predict(features), said)
    data = json.loads(file.read_text())
    data["features"][0], data["features"][1] = data["features"][1], data["features"][0]
    file.write_text(json.dumps(data))
    with pytest.raises(BadInputError, match="ln_moved_bytes for ln_flops"):
        Residual.load(file)
    file.write_text(json.dumps({**data, "schema": 99}))
    with pytest.raises(BadInputError, match="schema 99"):
        Residual.load(file)


def test_the_store_resumes_and_survives_torn_lines(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    store.append(rows()[:3])
    path = store.path_of("gpu", "s")
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"schema": 1, "device_ki')
    found, warnings = store.read("gpu", "s")
    assert len(found) == 3
    assert "1 line(s) cannot be read" in warnings[0]
    store.append([row(POINTS[0], date="later")])
    again, _ = store.read("gpu", "s")
    assert len(again) <= 4


def test_a_profile_of_another_device_is_not_used(tmp_path: Path) -> None:
    store = ProfileStore(tmp_path)
    store.append(rows()[:2])
    found, warnings = read_rows(store.path_of("gpu", "s"), kind="other")
    assert found == []
    assert "another device" in warnings[0]


def test_a_profile_travels_and_another_device_refuses_it(tmp_path: Path) -> None:
    here, there = ProfileStore(tmp_path / "here"), ProfileStore(tmp_path / "there")
    with pytest.raises(BadInputError, match="no measured rows"):
        export_rows(here, tmp_path / "rows.jsonl", None)
    here.append(rows())
    assert export_rows(here, tmp_path / "rows.jsonl", "gpu") == (len(rows()), ["gpu"])
    with pytest.raises(BadInputError, match="rows of gpu: they say nothing of other"):
        import_rows(there, tmp_path / "rows.jsonl", "other")
    assert not there.folder.exists()
    assert import_rows(there, tmp_path / "rows.jsonl", "gpu")[0] == len(rows())
    layer = rows()[0].layer_signature
    assert digest(there.read("gpu", layer)[0]) == digest(here.read("gpu", layer)[0])
    (tmp_path / "rows.jsonl").write_text("no row\n")
    with pytest.raises(BadInputError, match="cannot be read"):
        import_rows(there, tmp_path / "rows.jsonl", "gpu")


def test_rows_are_validated() -> None:
    good = rows()[0].to_dict()
    assert ProfileRow.from_dict(good) == rows()[0]
    for bad in ({**good, "schema": 9}, {**good, "extra": 1}, {**good, "forward_s": -1.0}):
        with pytest.raises(BadInputError):
            ProfileRow.from_dict(bad)


def test_digest_ignores_order_and_layer_signature_ignores_depth() -> None:
    assert digest(rows()) == digest(rows()[::-1])
    assert digest([]) == ""
    first = layer_signature(job(num_layers=8), megatron="0.19.2")
    assert layer_signature(job(num_layers=24, seq_length=64), megatron="0.19.2") == first
    assert layer_signature(job(hidden_size=128), megatron="0.19.2") != first
    assert layer_signature(job(), megatron="0.18.2") != first
    assert layer_signature(job(bf16=True), megatron="0.19.2") != first
