"""The launcher's parts without torch: words, devices, processes, the handshake, resuming."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import ROOT, gone
from jobs import job
from megatron_memx.launch import discover, handshake, prelaunch
from megatron_memx.launch.supervisor import descendants
from megatron_memx.launch.torchrun_options import SWITCHES, WITH_VALUE, split
from plans import make_plan

from megatron_memx.errors import BadInputError
from megatron_memx.options import MemXOptions
from megatron_memx.planner import check_plan_fits
from megatron_memx.resume import STAMP, check_resume, stamp_of


def test_words_behind_the_script_are_not_torchruns() -> None:
    """Field report 37: --r, --log, --mo and --load arrive untouched."""
    words = ["--nproc-per-node", "2", "-r3", "--rdzv-conf=a=1", "train.py"]
    script = ["--r", "1", "--log", "x", "--mo", "y", "--load", "p", "--nnodes", "9", "--", "z"]
    found = split([*words, *script])
    assert found.script == "train.py"
    assert list(found.arguments) == script
    assert list(found.launcher) == words[:-1]
    assert found.values == {"nproc_per_node": "2", "redirects": "3", "rdzv_conf": "a=1"}


def test_a_double_dash_before_the_script_is_taken() -> None:
    found = split(["--standalone", "--", "train.py", "--x"])
    assert (found.script, found.arguments) == ("train.py", ("--x",))
    assert found.on("standalone")
    assert split(["-m", "package.train", "a"]).on("module")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nproc", "2", "t.py"], "--nproc-per-node"),
        (["--nproc-per-node"], "needs a value"),
        (["--auto-parallel", "t.py"], "stands before the script"),
        (["--memx-plan", "p", "t.py"], "stands before the script"),
    ],
)
def test_bad_launcher_words(words: list[str], text: str) -> None:
    with pytest.raises(BadInputError) as error:
        split(words)
    assert text in str(error.value)


@pytest.mark.megatron
def test_the_table_is_torchruns_own() -> None:
    """A canary: a new torchrun option must be added to the table."""
    from torch.distributed.run import get_args_parser

    theirs = {}
    for action in get_args_parser()._actions:
        if action.option_strings and action.dest != "help":
            theirs[action.dest] = action.nargs == 0
    assert {name for name, switch in theirs.items() if switch} <= SWITCHES
    assert {name for name, switch in theirs.items() if not switch} <= WITH_VALUE


def fake_smi(folder: Path, lines: list[str]) -> None:
    tool = folder / "nvidia-smi"
    body = "\n".join(f"echo '{line}'" for line in lines)
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)


@pytest.fixture
def eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, ["NVIDIA A100-SXM4-80GB, 81920, 80000"] * 8)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("eight_gpus")
def test_the_world_is_the_ranks_that_are_launched() -> None:
    """Field report 43: eight devices visible, two ranks: the plan is for two."""
    cluster, notes = discover.local_cluster(platform=None, num_nodes=1, nproc=2)
    assert cluster.num_devices == 2
    assert notes == ["6 of 8 devices stay unused"]
    kind = cluster.kind_of(0)
    assert kind.name == "a100-80gb"
    assert kind.capacity_bytes == 78 * 1024**3  # what is free, in whole GiB


@pytest.mark.usefixtures("eight_gpus")
def test_more_ranks_than_devices_shows_all_three_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    with pytest.raises(BadInputError) as error:
        discover.local_cluster(platform=None, num_nodes=1, nproc=8)
    message = str(error.value)
    assert "8 ranks a node are launched" in message
    assert "2 devices are visible" in message
    assert "CUDA_VISIBLE_DEVICES=2,3" in message
    assert "--nproc-per-node 2" in message


def test_no_accelerator_is_never_silently_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadInputError, match="no accelerator"):
        discover.local_cluster(platform=None, num_nodes=1, nproc=2)
    cluster, _ = discover.local_cluster(platform="cpu", num_nodes=1, nproc=2)
    assert cluster.kind_of(0).platform == "cpu"
    assert cluster.kind_of(0).free_bytes is None


def test_a_platform_that_is_not_here_plans_but_does_not_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadInputError, match="torch_npu, which is not installed"):
        discover.require_here("npu")
    with pytest.raises(BadInputError, match="nvidia-smi reports none"):
        discover.require_here("cuda")
    discover.require_here("cpu")


def test_the_cluster_file_must_match_the_launch() -> None:
    file = str(ROOT / "examples/clusters/one_node.yaml")
    with pytest.raises(BadInputError) as error:
        prelaunch.find_cluster(
            split(["--nproc-per-node", "2", "t.py"]), MemXOptions(memx_cluster=file)
        )
    assert "8 devices" in error.value.message
    assert "= 2 ranks" in error.value.message


def test_a_plan_for_another_size_or_model_is_refused() -> None:
    plan = make_plan([[2], [2]])
    with pytest.raises(BadInputError, match="for 2 ranks .* 6 are launched"):
        check_plan_fits(plan, world_size=6)
    with pytest.raises(BadInputError, match="num_layers 4, the job has 8"):
        check_plan_fits(plan, world_size=2, job=job())


class FakeStore(dict[str, str]):
    """A store that fails instead of waiting."""

    def set(self, name: str, value: str) -> None:
        self[name] = value

    def get(self, name: str) -> bytes:
        if name not in self:
            raise RuntimeError("time out")
        return self[name].encode()


def test_ranks_with_different_plans_stop() -> None:
    store = FakeStore()
    store.set("megatron_memx/plan/0/1", "b" * 32)
    store.set("megatron_memx/plan/0/2", "a" * 32)
    with pytest.raises(BadInputError) as error:
        handshake.check("a" * 32, rank=0, world_size=3, store=store)
    assert "aaaaaaaaaaaa on rank(s) 0, 2" in error.value.message
    assert "bbbbbbbbbbbb on rank(s) 1" in error.value.message


def test_a_silent_rank_is_named() -> None:
    store = FakeStore()
    with pytest.raises(BadInputError, match="rank 1 did not say"):
        handshake.check("a" * 32, rank=0, world_size=2, store=store)


CHILD = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(os.getpid(), child.pid, flush=True)
if sys.argv[1] == "fails":
    sys.exit(7)
time.sleep(600)
"""
SUPERVISOR = """
import sys, os
from megatron_memx.launch.supervisor import run
sys.exit(run([sys.executable, "-c", sys.argv[1], sys.argv[2]], os.environ, grace_s=1.0))
"""


def supervised(mode: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, CHILD, mode],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    return process, pids


@pytest.mark.parametrize(
    ("mode", "number", "code"),
    [
        ("plain", signal.SIGINT, 130),
        ("plain", signal.SIGTERM, 143),
        ("stubborn", signal.SIGINT, 130),
        ("fails", None, 7),
    ],
)
def test_nothing_is_left_behind(mode: str, number: int | None, code: int) -> None:
    """Field report 47: also a child that ignores TERM, and grandchildren in other sessions."""
    process, pids = supervised(mode)
    assert len(pids) == 2
    if number is not None:
        process.send_signal(number)
    assert process.wait(timeout=30) == code
    assert gone(pids)


def test_a_killed_supervisor_takes_its_child_along() -> None:
    process, pids = supervised("plain")
    process.kill()
    process.wait(timeout=10)
    assert gone(pids[:1])
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)


def test_only_our_own_processes_are_ours() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    try:
        assert other.pid in descendants(os.getpid())
        assert other.pid not in descendants(other.pid)
    finally:
        other.kill()
        other.wait()


def test_run_folders_are_fresh_and_few(tmp_path: Path) -> None:
    made = [prelaunch.new_run_dir(tmp_path) for _ in range(23)]
    assert len(set(made)) == 23
    assert len(list((tmp_path / "runs").iterdir())) <= 21


def test_an_unwritable_cache_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError) as error:
        prelaunch.new_run_dir(tmp_path / "file")
    assert error.value.flag == "--memx-cache-dir"


def checkpoint(folder: Path, *, stamp: dict[str, object] | None, sharded: bool = True) -> None:
    step = folder / "iter_0000005"
    step.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    if sharded:
        (step / "metadata.json").write_text("{}")
    if stamp is not None:
        (step / STAMP).write_text(json.dumps(stamp))


def test_resuming_under_another_layout(tmp_path: Path) -> None:
    plan, other = make_plan([[2], [2]]), make_plan([[3], [1]])
    plain = stamp_of(other, fully_reshardable=False, sound_optimizer=True)
    checkpoint(tmp_path / "plain", stamp=plain)
    check_resume(plan, job(load=tmp_path / "plain"))
    sharded = {**plain, "use_distributed_optimizer": True}
    checkpoint(tmp_path / "sharded", stamp=sharded)
    with pytest.raises(BadInputError) as error:
        check_resume(plan, job(load=tmp_path / "sharded"))
    assert "Ettt|tL" in error.value.message
    assert "Ett|ttL" in error.value.message
    check_resume(plan, job(load=tmp_path / "sharded", no_load_optim=True))
    check_resume(other, job(load=tmp_path / "sharded"))
    free = {**sharded, "fully_reshardable": True}
    checkpoint(tmp_path / "free", stamp=free)
    check_resume(plan, job(load=tmp_path / "free"))
    checkpoint(tmp_path / "damaged", stamp={**free, "sound_optimizer": False})
    with pytest.raises(BadInputError, match="damages"):
        check_resume(plan, job(load=tmp_path / "damaged"))
    checkpoint(tmp_path / "old", stamp=plain, sharded=False)
    with pytest.raises(BadInputError, match="old torch format"):
        check_resume(plan, job(load=tmp_path / "old"))
    check_resume(plan, job(load=tmp_path / "nothing"))


def test_saving_needs_an_interval() -> None:
    with pytest.raises(BadInputError, match="--save-interval"):
        check_resume(make_plan([[8]]), job(save="/x"))


def test_the_store_of_torch_is_shared_with_torch_distributed() -> None:
    """open_store hosts for rank 0 where no agent does."""
    pytest.importorskip("torch")
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    base = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    results: list[str] = []
    both = threading.Barrier(2, timeout=30)

    def rank(number: int) -> None:
        store, release = handshake.open_store({**base, "RANK": str(number)})
        handshake.check("c" * 32, rank=number, world_size=2, store=store)
        results.append("agreed")
        both.wait()  # the store lives as long as the run
        release()

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == ["agreed", "agreed"]
