"""Shared helpers: no test writes to the user's cache, and every run has a time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# The same examples each time; HYPOTHESIS_PROFILE=search looks for new ones.
settings.register_profile("stable", derandomize=True, database=None)
settings.register_profile("search", derandomize=False, max_examples=5000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "stable"))

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

TINY_MODEL = [
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--vocab-size", "128"),
]
TINY_TRAINING = [
    *("--tokenizer-type", "NullTokenizer", "--mock-data", "--train-iters", "3"),
    *("--lr", "1e-3", "--lr-decay-iters", "10", "--global-batch-size", "4"),
    *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1"),
    *("--num-workers", "0"),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMX_CACHE_DIR", str(tmp_path / "memx-cache"))


@dataclass(frozen=True)
class Finished:
    """A command that ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def run_command(
    command: list[str], *, timeout_s: float = 180, env: dict[str, str] | None = None
) -> Finished:
    """Run a command to its end; the process group is killed when the time is up."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        pytest.fail(f"{command[:6]} did not end in {timeout_s} s:\n{out[-3000:]}\n{err[-3000:]}")
    return Finished(process.returncode, out, err)


def memx_torchrun(
    *words: str, timeout_s: float = 180, env: dict[str, str] | None = None
) -> Finished:
    """Run memx-torchrun of this checkout."""
    command = [sys.executable, "-m", "megatron_memx.launch.torchrun", *words]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return run_command(
        command, timeout_s=timeout_s, env={"PYTHONPATH": os.pathsep.join(paths), **(env or {})}
    )


def memx(*words: str, env: dict[str, str] | None = None) -> Finished:
    """Run the memx command of this checkout."""
    command = [sys.executable, "-m", "megatron_memx.cli.main", *words]
    return run_command(command, env={"PYTHONPATH": str(ROOT), **(env or {})})


def read_steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what tests/integration/recorded.py wrote: Megatron rank -> record."""
    return {
        int(file.stem.split("_")[1]): json.loads(file.read_text())
        for file in folder.glob("steps_*.json")
    }


def gone(pids: list[int], patience_s: float = 15.0) -> bool:
    """Whether all of these processes end in time."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite the files of tests/golden"
    )
