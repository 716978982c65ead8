"""The command line as users see it: options, exit codes, one clear error each."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, memx, memx_torchrun
from jobs import words
from megatron_memx.launch.torchrun import help_text as torchrun_help

from megatron_memx.cli.main import help_text as memx_help

SNAPSHOTS = ROOT / "tests" / "golden"
CLUSTERS = ROOT / "examples" / "clusters"
JOB = words(bf16=True)


@pytest.mark.parametrize(
    ("name", "text"), [("memx_help", memx_help()), ("memx_torchrun_help", torchrun_help())]
)
def test_help_is_the_documented_one(name: str, text: str, request: pytest.FixtureRequest) -> None:
    """Run with --update-golden to accept a change, and read the difference."""
    file = SNAPSHOTS / f"{name}.txt"
    if request.config.getoption("--update-golden"):
        file.write_text(text + "\n")
    assert text + "\n" == file.read_text()


def test_every_documented_option_is_there() -> None:
    for flag in [
        "--auto-parallel",
        "--memx-cluster",
        "--memx-alpha",
        "--memx-beta",
        "--memx-gamma",
        "--memx-objective",
        "--memx-balance",
        "--memx-memory-margin",
        "--memx-plan",
        "--memx-save-plan",
        "--memx-cache-dir",
        "--memx-replan",
        "--memx-dry-run",
        "--memx-profile",
        "--memx-platform",
    ]:
        assert flag in torchrun_help()


def test_plan_of_a_cluster_that_is_not_here(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = memx(
        *("plan", "--cluster", str(CLUSTERS / "three_vendors.yaml"), "--megatron", "0.19.2"),
        *("--save", str(file), "--json", "--"),
        *words(num_layers=12, hidden_size=1024, bf16=True, global_batch_size=32),
    )
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert plan == json.loads(file.read_text())
    assert sum(len(stage["ranks"]) for stage in plan["stages"]) == 20
    assert {stage["device_kind"] for stage in plan["stages"]} == {
        "a100-80gb",
        "vendor-b",
        "vendor-c",
    }
    assert plan["prediction"]["rung"] == "predicted"
    assert "nothing was measured" in plan["prediction"]["basis"]
    exported = memx("export", str(file), "--to", "megatron-args")
    policies = {c["recompute"]["granularity"] for s in plan["stages"] for c in s["chunks"]}
    assert exported.code == (0 if len(policies) == 1 else 2)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nothing"], 2, "is not a command"),
        (["plan", "--cluster", "no.yaml", "--", *JOB], 2, "cannot be read"),
        (["plan", "--cluster", str(CLUSTERS / "one_node.yaml")], 2, "behind --"),
        (["plan", "--cluster", str(CLUSTERS / "one_node.yaml"), "--", "--memx-q"], 2, "--memx-q"),
        (["plan", "--clu", "x", "--", *JOB], 2, "--cluster"),
        (
            ["plan", "--cluster", str(CLUSTERS / "one_node.yaml"), "--megatron", "0.19.2", "--"]
            + words(num_layers=90, hidden_size=16384, num_attention_heads=64, bf16=True),
            3,
            "short by",
        ),
        (["cluster", "no.yaml"], 2, "cannot be read"),
        (["cache", "show", "abc"], 2, "0 plans"),
        (["export", "no.json"], 2, "cannot be read"),
    ],
)
def test_bad_input_is_one_clear_error(
    arguments: list[str], code: int, text: str, tmp_path: Path
) -> None:
    done = memx(*arguments, env={"MEMX_CACHE_DIR": str(tmp_path)})
    assert done.code == code, done.text
    assert text in done.err
    assert "Traceback" not in done.text


def test_cluster_shows_what_it_understood() -> None:
    done = memx("cluster", str(CLUSTERS / "unequal_nodes.yaml"))
    assert "14 devices on 3 node(s)" in done.out
    assert "large: ranks 6-13" in done.out
    data = json.loads(memx("cluster", str(CLUSTERS / "unequal_nodes.yaml"), "--json").out)
    assert len(data["nodes"]) == 3


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.txt")), ids=lambda path: path.stem)
def test_the_output_beside_an_example_is_what_its_command_prints(
    path: Path, request: pytest.FixtureRequest
) -> None:
    """All but its signature, which names the installed versions, and the time it took."""
    lines = path.read_text().splitlines()
    count = next(i for i, line in enumerate(lines) if line.startswith("MemX plan"))
    shown = " ".join(line.strip().removesuffix("\\") for line in lines[:count])
    assert shown.startswith("$ memx ")
    done = memx(*shlex.split(shown)[2:])
    assert done.code == 0, done.err
    printed = done.out.splitlines()
    if request.config.getoption("--update-golden"):
        path.write_text("\n".join([*lines[:count], *printed]) + "\n")
        return
    assert printed[1:] == lines[count + 1 :]


SCRIPT = str(ROOT / "examples" / "pretrain_gpt.py")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("more", "code", "text"),
    [
        (["--memx-cluster", "no.yaml"], 2, "cannot be read"),
        (["--memx-platform", "abacus"], 2, "platform 'abacus' is unknown"),
        (["--memx-objective", "fast"], 2, "invalid choice"),
        (["--memx-memory-margin", "2"], 2, "--memx-memory-margin 2.0"),
        (["--tensor-model-parallel-size", "3"], 2, "does not divide the 2 ranks"),
        (["--memx-profile", "no.jsonl"], 2, "there is no such file"),
        (["--memx-plan", "no.json"], 2, "cannot be read"),
        (["--memx-unknown", "1"], 2, "--memx-unknown"),
        (["--memx-alpha", "1"], 2, "all three"),
        (["--memx-memory-margin", "0.999999"], 3, "short by"),
    ],
)
def test_a_bad_launch_starts_nothing(more: list[str], code: int, text: str, tmp_path: Path) -> None:
    platform = [] if "--memx-platform" in more else ["--memx-platform", "cpu"]
    done = memx_torchrun(
        *("--nproc-per-node", "2", SCRIPT, "--auto-parallel", *platform),
        *words(num_layers=4),
        *more,
        *([] if "--memx-profile" in more else ["--memx-profile", "never"]),
        timeout_s=30,
    )
    assert done.code == code, done.text
    assert text in done.err
    assert "Traceback" not in done.text
    assert "iteration" not in done.out


def test_a_missing_script_is_an_error() -> None:
    done = memx_torchrun("no_script.py", "--auto-parallel", timeout_s=20)
    assert done.code == 2
    assert "no such script" in done.err


def test_plan_files_of_other_kinds(tmp_path: Path) -> None:
    for content, reason in (
        ('{"schema": 99}', "schema 99"),
        ("{", "not JSON"),
        ('{"schema": 1}', "not a valid plan"),
    ):
        file = write(tmp_path / "plan.json", content)
        done = memx_torchrun(
            *("--nproc-per-node", "2", SCRIPT, "--memx-platform", "cpu", "--memx-plan", file),
            *words(num_layers=4),
            timeout_s=20,
        )
        assert done.code == 2
        assert reason in done.err
