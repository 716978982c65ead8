"""Real torchrun ranks: their words, their places, and what is left when one dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, gone, memx_torchrun
from plans import make_plan

pytestmark = pytest.mark.megatron
SCRIPT = str(Path(__file__).with_name("show_argv.py"))
# Field reports 35 and 37: nothing of this may be split, quoted, expanded or taken by torchrun.
NASTY = [
    *("--r", "1", "--log", "x", "--mo", "y", "--load", "p", "--nnodes", "9", "-t", "3"),
    *("--prompt", "a b 'c' $HOME \"d\" ; e", "", '{"k": [1, "two"]}', "back\\", "*", "~", "\t"),
    *("--", "--standalone", "-m", "é", "`id`", "$(id)", "a=b", "--x=y z"),
]


def records(folder: Path) -> dict[int, dict[str, Any]]:
    return {
        int(file.stem.split("_")[1]): json.loads(file.read_text())
        for file in folder.glob("argv_*.json")
    }


@pytest.mark.parametrize("memx_words", [[], ["--memx-platform", "cpu"]], ids=["torchrun", "memx"])
def test_words_reach_every_rank_unchanged(memx_words: list[str], tmp_path: Path) -> None:
    done = memx_torchrun(
        *("--nproc-per-node", "2", SCRIPT, *memx_words, *NASTY),
        env={"TEST_RECORD_DIR": str(tmp_path)},
    )
    assert done.code == 0, done.text
    found = records(tmp_path)
    assert sorted(found) == [0, 1]
    for record in found.values():
        assert record["argv"] == [*memx_words, *NASTY]
        assert record["name"] == "__main__"
        assert record["path"] == str(Path(SCRIPT).parent)


def test_options_of_torchrun_pass_through(tmp_path: Path) -> None:
    done = memx_torchrun(
        *("--nproc_per_node=2", "--max-restarts=0", "--log-dir", str(tmp_path / "logs")),
        *("-r", "3", "--role", "a b", "--", SCRIPT, "--memx-platform", "cpu", "x"),
        env={"TEST_RECORD_DIR": str(tmp_path)},
    )
    assert done.code == 0, done.text
    assert len(records(tmp_path)) == 2
    assert list((tmp_path / "logs").rglob("stdout.log"))


def test_a_plan_places_the_ranks(tmp_path: Path) -> None:
    """Launcher rank 0 runs Megatron's rank 1 and the other way round; LOCAL_RANK stays."""
    plan = make_plan([[2], [2]], rank_order=[1, 0], global_batch_size=4)
    plan.save(tmp_path / "plan.json")
    done = memx_torchrun(
        *("--nproc-per-node", "2", SCRIPT, "--memx-platform", "cpu"),
        *("--memx-plan", str(tmp_path / "plan.json"), "--num-layers", "4", "--hidden-size", "64"),
        *("--num-attention-heads", "4", "--seq-length", "128", "--vocab-size", "64"),
        *("--global-batch-size", "4"),
        env={"TEST_RECORD_DIR": str(tmp_path)},
    )
    found = records(tmp_path)
    assert {rank: record["local_rank"] for rank, record in found.items()} == {0: 1, 1: 0}
    # The script never used Megatron, and that is not passed over.
    assert done.code == 2
    assert "never ran" in done.err


def test_single_node_jobs_never_collide_on_a_port(tmp_path: Path) -> None:
    """Field report 42: with 29500 taken, two jobs at once."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # somebody holds it already, which will do
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        jobs = []
        for index in range(2):
            folder = tmp_path / str(index)
            folder.mkdir()
            jobs.append(
                subprocess.Popen(
                    [sys.executable, "-m", "megatron_memx.launch.torchrun"]
                    + ["--nproc-per-node", "1", SCRIPT, "--memx-platform", "cpu"],
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(
                            [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
                        ),
                        "TEST_RECORD_DIR": str(folder),
                    },
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        assert [job.wait(timeout=90) for job in jobs] == [0, 0]
    ports = [records(tmp_path / str(index))[0]["port"] for index in range(2)]
    assert len(set(ports)) == 2
    assert "29500" not in ports


def two_nodes(tmp_path: Path, words: list[list[str]]) -> list[tuple[int, str]]:
    """Run one launcher for each of two nodes of this host; return their codes and outputs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "megatron_memx.launch.torchrun", "--nnodes", "2"]
            + ["--node-rank", str(index), "--master-addr", "127.0.0.1"]
            + ["--master-port", str(port), "--nproc-per-node", "1", SCRIPT, *more],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "TEST_RECORD_DIR": str(tmp_path),
                "MEMX_CACHE_DIR": str(tmp_path / f"cache{index}"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index, more in enumerate(words)
    ]
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    return [(node.returncode, output) for node, output in zip(nodes, outputs, strict=True)]


def test_words_reach_the_ranks_of_two_nodes_unchanged(tmp_path: Path) -> None:
    """Field report 35, over more than one node."""
    words = ["--memx-platform", "cpu", *NASTY]
    for code, output in two_nodes(tmp_path, [words, words]):
        assert code == 0, output
    assert {rank: record["argv"] for rank, record in records(tmp_path).items()} == {
        0: words,
        1: words,
    }


def test_nodes_that_plan_differently_stop_before_anything_else(tmp_path: Path) -> None:
    model = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"]
    model += ["--seq-length", "128", "--vocab-size", "64", "--global-batch-size", "4"]
    model += ["--memx-platform", "cpu", "--auto-parallel", "--memx-profile", "never"]
    found = two_nodes(
        tmp_path, [[*model, "--memx-memory-margin", margin] for margin in ("0.1", "0.2")]
    )
    for code, output in found:
        assert code == 2, output
        assert "the ranks run different plans" in output
    assert records(tmp_path) == {}


def started(tmp_path: Path, mode: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_memx.launch.torchrun"]
        + ["--nproc-per-node", "2", "--shutdown-timeout", "2", SCRIPT, "--memx-platform", "cpu"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "TEST_RECORD_DIR": str(tmp_path),
            "TEST_MODE": mode,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 90
    while len(records(tmp_path)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [pid for record in records(tmp_path).values() for pid in record["pids"]]
    assert len(pids) == 4
    return process, pids


@pytest.mark.parametrize(
    ("mode", "number", "code"),
    [("waits", signal.SIGINT, 130), ("stubborn", signal.SIGTERM, 143)],
)
def test_an_interrupt_leaves_nothing(mode: str, number: int, code: int, tmp_path: Path) -> None:
    """Field report 47: ranks that wait, that ignore TERM, with children of their own."""
    process, pids = started(tmp_path, mode)
    process.send_signal(number)
    assert process.wait(timeout=90) == code
    assert gone(pids)


def test_a_dying_rank_ends_the_job_and_is_named(tmp_path: Path) -> None:
    process, pids = started(tmp_path, "dies")
    _, err = process.communicate(timeout=90)
    assert process.returncode == 4
    assert "rank 1 ended with exit code 3 first" in err
    assert gone(pids)


def test_a_killed_launcher_leaves_no_rank(tmp_path: Path) -> None:
    process, _ = started(tmp_path, "waits")
    ranks = [record["pids"][0] for record in records(tmp_path).values()]
    process.kill()
    process.wait(timeout=10)
    assert gone(ranks, patience_s=60)
    for record in records(tmp_path).values():
        for pid in record["pids"][1:]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
