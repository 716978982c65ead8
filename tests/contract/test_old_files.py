"""Files written by released versions are read for ever: one of each, kept as it was written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from conftest import ROOT

from megatron_memx.cache.store import PlanCache
from megatron_memx.plan import Plan
from megatron_memx.profile.store import read_rows

GOLDEN = ROOT / "tests" / "golden"


def test_plan_of_0_1() -> None:
    plan = Plan.load(GOLDEN / "plan_0.1.json")
    assert plan.layout == "Ett|tttttt|tttttttL"
    assert plan.to_dict() == json.loads((GOLDEN / "plan_0.1.json").read_text())


def test_cache_entry_of_0_1(tmp_path: Path) -> None:
    (tmp_path / "plans").mkdir()
    (file,) = GOLDEN.glob("cache_0.1/*.json")
    shutil.copy(file, tmp_path / "plans")
    entries, warnings = PlanCache(tmp_path).entries()
    assert warnings == []
    assert PlanCache(tmp_path).lookup(entries[0].fields).plan == entries[0].plan


def test_profile_of_0_1() -> None:
    rows, warnings = read_rows(GOLDEN / "profile_0.1.jsonl")
    assert warnings == []
    assert {row.part for row in rows} == {"first", "middle", "last", "optimizer", "link"}
