"""The architecture as a test: imports flow one way, and importing costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

# Each layer may import itself and those before it.
LAYERS = (
    ("errors", "units", "versions", "options", "platforms", "typed"),
    ("parallel", "plan", "model", "cluster", "cluster_file", "megatron_args"),
    ("job", "resume", "conflicts"),
    ("legality", "pins"),
    ("cache",),
    ("cost",),
    ("profile", "predictor"),
    ("objective", "search"),
    ("planner", "evaluation"),
    ("report", "cli"),
    ("patches",),
    ("launch",),
)
# The rank process and the profile's workers are where launching meets the patches.
RANK_SIDE = {
    *("launch/rank.py", "launch/profile_worker.py", "launch/profile_piece.py"),
    "launch/trace_worker.py",
}
HEAVY = {"torch", "megatron", "apex", "transformer_engine"}


def files() -> list[Path]:
    return sorted(
        path
        for folder in ("megatron_memx", "patches", "launch")
        for path in (ROOT / folder).rglob("*.py")
    )


def room_of(path: Path) -> str | None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("patches", "launch"):
        return parts[0]
    return None if parts[1] == "__init__" else parts[1]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer_of(room: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if room in layer)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_flow_one_way(path: Path) -> None:
    room = room_of(path)
    if room is None:
        return
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "megatron_memx" or len(parts) < 2 or parts[1].startswith("__"):
            continue
        other = parts[1]
        if not any(other in layer for layer in LAYERS):
            continue  # a name of the package itself
        if other == "patches" and room == "launch":
            assert str(path.relative_to(ROOT)) in RANK_SIDE
        assert layer_of(other) <= layer_of(room), f"{path} imports {name}"


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_planner_never_imports_torch_or_megatron(path: Path) -> None:
    if room_of(path) in ("patches", "launch"):
        return
    assert not {name.split(".")[0] for name in imported(path)} & HEAVY


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('loaded:')\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    return {name.split(".")[0] for name in done.stdout.rpartition("loaded:")[2].split()}


@pytest.mark.parametrize(
    "code",
    [
        "import megatron_memx",
        "from megatron_memx.cli.main import main\nmain(['--help'])",
        "from megatron_memx.launch.torchrun import main\nmain(['--help'])",
    ],
)
def test_importing_and_help_load_nothing_heavy(code: str) -> None:
    assert not loaded_after(code) & {"torch", "megatron", "numpy", "xgboost", "scipy", "rich"}


def test_a_cached_launch_plans_without_numpy() -> None:
    """What a second run imports before its ranks start."""
    loaded = loaded_after("import megatron_memx.launch.prelaunch, megatron_memx.report.terminal")
    assert not loaded & {"torch", "megatron", "numpy", "xgboost", "scipy"}


def test_modules_keep_to_their_size() -> None:
    """One reason to exist each: nobody above 600 lines."""
    large = {
        str(path.relative_to(ROOT)): lines
        for path in files()
        if (lines := len(path.read_text().splitlines())) > 600
    }
    assert large == {}
