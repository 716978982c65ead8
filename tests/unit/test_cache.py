"""Plan cache: hits, misses that name the differing field, broken files, concurrent writers."""

from __future__ import annotations

import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plans import make_plan

from megatron_memx.cache.signature import differences, signature
from megatron_memx.cache.store import PlanCache, default_cache_dir
from megatron_memx.errors import BadInputError
from megatron_memx.plan import Plan

FIELDS: dict[str, Any] = {
    "model": {"num_layers": 4, "seq_length": 32768},
    "cluster": {"kinds": {"a": {"memory_bytes": 141}}, "num_devices": 8},
    "pins": {"tensor_model_parallel_size": 4},
}


def signed(fields: dict[str, Any]) -> Plan:
    return replace(make_plan([[3], [1]]), signature=signature(fields))


def test_hit_returns_the_plan(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    cache.put(FIELDS, signed(FIELDS))
    found = cache.lookup(json.loads(json.dumps(FIELDS)))
    assert found.plan == signed(FIELDS) and not found.why_miss and not found.warnings


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "seq_length"), 1024),
        (("pins", "tensor_model_parallel_size"), 1),
        (("cluster", "num_devices"), 6),
        (("cluster", "kinds", "a", "memory_bytes"), 80),
    ],
)
def test_any_change_is_a_miss_that_names_the_field(
    tmp_path: Path, path: tuple[str, ...], value: int
) -> None:
    cache = PlanCache(tmp_path)
    cache.put(FIELDS, signed(FIELDS))
    other = json.loads(json.dumps(FIELDS))
    place = other
    for name in path[:-1]:
        place = place[name]
    old = place[path[-1]]
    place[path[-1]] = value
    found = cache.lookup(other)
    assert found.plan is None
    assert found.why_miss == ((".".join(path), value, old),)


def test_missing_field_differs_from_every_value() -> None:
    assert differences({"a": 1}, {}) == [("a", 1, "(absent)")]


def test_nearest_entry_is_the_one_with_fewest_differences(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    far = {**FIELDS, "pins": {"a": 1, "b": 2, "c": 3}}
    for fields in (FIELDS, far):
        cache.put(fields, signed(fields))
    wanted = {**FIELDS, "pins": {}}
    found = cache.lookup(wanted)
    assert found.nearest == signature(FIELDS)
    assert [name for name, _, _ in found.why_miss] == ["pins.tensor_model_parallel_size"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 1}', '{"schema": 2}', "[" * 99999])
def test_broken_entry_is_set_aside_with_a_warning(tmp_path: Path, content: str) -> None:
    cache = PlanCache(tmp_path)
    path = cache.put(FIELDS, signed(FIELDS))
    path.write_text(content)
    found = cache.lookup(FIELDS)
    assert found.plan is None
    assert any(path.name in warning for warning in found.warnings)
    assert path.with_suffix(".broken").read_text() == content
    cache.put(FIELDS, signed(FIELDS))
    assert cache.lookup(FIELDS).plan is not None


def test_entry_whose_fields_were_edited_is_not_trusted(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    path = cache.put(FIELDS, signed(FIELDS))
    data = json.loads(path.read_text())
    data["fields"]["model"]["seq_length"] = 1
    path.write_text(json.dumps(data))
    found = cache.lookup(FIELDS)
    assert found.plan is None and "signature" in found.warnings[0]


def test_prune_keeps_the_newest_and_drops_leftovers(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    keys = []
    for number in range(3):
        fields = {**FIELDS, "pins": {"n": number}}
        path = cache.put(fields, signed(fields))
        os.utime(path, (number, number))
        keys.append(path.stem)
    leftover = cache.folder / ".x.tmp"
    leftover.write_text("half")
    assert sorted(cache.prune(keep=1, now_s=leftover.stat().st_mtime + 7200)) == sorted(keys[:2])
    assert [file.name for file in cache.folder.iterdir()] == [f"{keys[2]}.json"]


def _write(folder: str, number: int) -> None:
    cache = PlanCache(folder)
    for turn in range(5):
        fields = {**FIELDS, "pins": {"n": (number + turn) % 4}}
        cache.put(fields, signed(fields))
        assert cache.lookup(fields).plan is not None


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write, args=(str(tmp_path), n)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    entries, warnings = PlanCache(tmp_path).entries()
    assert len(entries) == 4 and not warnings
    assert all(file.suffix == ".json" for file in PlanCache(tmp_path).folder.iterdir())


def test_unwritable_folder_names_the_flag(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(BadInputError) as caught:
        PlanCache(blocker).put(FIELDS, signed(FIELDS))
    assert caught.value.flag == "--memx-cache-dir"


def test_cache_dir_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEMX_CACHE_DIR", str(tmp_path / "env"))
    assert default_cache_dir("given") == Path("given")
    assert default_cache_dir() == tmp_path / "env"
    monkeypatch.delenv("MEMX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "megatron_memx"
