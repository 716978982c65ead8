"""The registry on the real Megatron, and canaries for the traps that legality refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from megatron_memx.patches import registry
from megatron_memx.patches.registry import Context, Patch, Replacer
from plans import make_plan

from megatron_memx.errors import UpstreamChangedError
from megatron_memx.versions import megatron_version, release

HERE = Path(__file__).parent


def run_python(code: str, *words: str) -> str:
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "TORCHDYNAMO_DISABLE": "1",
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


class Target:
    def method(self) -> str:
        return "stock"


def patch(**more: object) -> Patch:
    def apply(_context: Context, replacer: Replacer) -> None:
        def method(_self: Target) -> str:
            registry.fired("test")
            return "patched"

        replacer.replace(Target, "method", method)

    values = {
        "id": "test",
        "why": "to test",
        "targets": (f"{__name__}:Target.method",),
        "needed": lambda context: None if context.plan else "no plan",
        "apply": apply,
        "must_fire": True,
    }
    return Patch(**{**values, **more})


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, list[str]]]:
    """Let the registry know the test's own target."""
    marks = {f"{__name__}:Target.method": {registry.fingerprint(Target.method): ["1.0"]}}
    monkeypatch.setattr(registry, "known_fingerprints", lambda: marks)
    yield marks
    registry.undo_all()


@pytest.mark.usefixtures("known")
def test_patches_apply_once_count_and_undo() -> None:
    context = Context(plan=make_plan([[4]]))
    stock = Target.method
    registry.apply_all((patch(),), context)
    registry.apply_all((patch(),), context)
    assert registry.never_fired((patch(),)) == ["test"]
    assert Target().method() == "patched"
    assert registry.report()["fired"] == {"test": 1}
    assert registry.never_fired((patch(),)) == []
    registry.undo_all()
    assert Target.method is stock
    assert Target().method() == "stock"


@pytest.mark.usefixtures("known")
def test_a_patch_that_is_not_needed_says_why() -> None:
    registry.apply_all((patch(),), Context())
    assert registry.report()["skipped"] == {"test": "no plan"}
    assert Target().method() == "stock"


def test_unknown_code_is_refused_unless_asked_for(
    known: dict[str, dict[str, list[str]]],
) -> None:
    known.clear()
    known[f"{__name__}:Target.method"] = {"0" * 16: ["0.5"]}
    context = Context(plan=make_plan([[4]]))
    with pytest.raises(UpstreamChangedError) as error:
        registry.apply_all((patch(),), context)
    assert "unknown fingerprint" in error.value.message
    assert "0.5" in error.value.message
    assert error.value.flag == "--memx-allow-unknown-megatron"
    assert Target().method() == "stock"
    allowed = Context(plan=make_plan([[4]]), allow_unknown=True)
    registry.apply_all((patch(),), allowed)
    assert Target().method() == "patched"


@pytest.mark.usefixtures("known")
def test_a_missing_target_is_refused_even_then() -> None:
    gone = patch(targets=(f"{__name__}:Target.gone",))
    context = Context(plan=make_plan([[4]]), allow_unknown=True)
    with pytest.raises(UpstreamChangedError, match="is not there"):
        registry.apply_all((gone,), context)


def test_the_fingerprint_sees_code_and_nothing_else() -> None:
    def one(x: int) -> int:
        """Say something."""
        return x + 1  # a comment

    def two(x: int) -> int:
        return x + 2

    first = registry.fingerprint(one)
    assert first == registry.fingerprint(one)
    assert first != registry.fingerprint(two)


@pytest.mark.megatron
def test_every_target_of_this_release_is_known() -> None:
    """Also that each supported release stands in the file."""
    found = json.loads(
        run_python(
            "import json\n"
            "from megatron_memx.patches import platform, fingerprint\n"
            "platform.install('cpu')\n"
            "print(json.dumps(fingerprint.current()))"
        )
    )
    version = megatron_version()
    known = registry.known_fingerprints()
    for target, mark in found.items():
        assert version in known[target].get(mark, []), f"{target} of {version}"
    releases = {r for marks in known.values() for listed in marks.values() for r in listed}
    assert {"0.17.1", "0.18.2", "0.19.2"} <= releases


@pytest.mark.megatron
def test_without_a_plan_megatron_is_untouched() -> None:
    code = (
        "import megatron.training.arguments as a, megatron.core.pipeline_parallel.schedules as s\n"
        "from megatron.core.transformer.transformer_block import TransformerBlock as B\n"
        "before = (a.parse_args, s.forward_step, B.__init__, B.forward)\n"
        "from megatron_memx import patches\n"
        "from megatron_memx.patches.registry import Context, report\n"
        "patches.apply(Context())\n"
        "assert before == (a.parse_args, s.forward_step, B.__init__, B.forward)\n"
        "assert report()['fired'] == {}\n"
        "print('untouched')"
    )
    shim = "from megatron_memx.patches.platform import cpu\ncpu.install()\n"
    assert run_python(shim + code) == "untouched"


@pytest.mark.megatron
def test_the_cpu_shim_comes_off_again() -> None:
    code = (
        "import torch\n"
        "names = ['is_available', 'Stream', 'synchronize', 'get_rng_state', 'memory_allocated']\n"
        "before = [getattr(torch.cuda, n) for n in names] + [torch.zeros, torch.Tensor.to]\n"
        "from megatron_memx.patches.platform import cpu\n"
        "cpu.install(); cpu.install()\n"
        "assert torch.cuda.is_available()\n"
        "assert torch.zeros(2, device='cuda').device.type == 'cpu'\n"
        "cpu.uninstall()\n"
        "after = [getattr(torch.cuda, n) for n in names] + [torch.zeros, torch.Tensor.to]\n"
        "assert all(a is b for a, b in zip(before, after))\n"
        "print('off')"
    )
    assert run_python(code) == "off"


@pytest.mark.megatron
def test_arguments_take_the_plan_and_keep_pins_plain(tmp_path: Path) -> None:
    """The plan's values land before validation; a contradiction is refused, with both values."""
    plan = make_plan([[3], [1]], global_batch_size=4)
    plan.save(tmp_path / "plan.json")
    code = (
        "import sys, json, os\n"
        "os.environ.update(RANK='0', WORLD_SIZE='2')\n"
        "from megatron_memx.patches.platform import cpu\n"
        "cpu.install()\n"
        "from megatron_memx import patches\n"
        "from megatron_memx.patches.registry import Context\n"
        "from megatron_memx.plan import Plan\n"
        "from megatron_memx.errors import BadInputError\n"
        "patches.apply(Context(plan=Plan.load(sys.argv.pop(1)), platform='cpu'))\n"
        "import megatron.training.arguments as a\n"
        "before = list(sys.argv)\n"
        "for _ in range(3):\n"
        "    args = a.parse_args(ignore_unknown_args=True)\n"
        "assert sys.argv == before\n"
        "plain = (str, int, float, bool, type(None), list, tuple)\n"
        "new = [args.pipeline_model_parallel_layout, args.memx_plan_signature]\n"
        "assert all(type(v) is str for v in new), new\n"
        "sys.argv += ['--pipeline-model-parallel-size', '4']\n"
        "try:\n"
        "    a.parse_args(ignore_unknown_args=True)\n"
        "except BadInputError as error:\n"
        "    refused = str(error)\n"
        "print(json.dumps([args.pipeline_model_parallel_layout, args.micro_batch_size,\n"
        "                  args.transformer_impl, refused]))"
    )
    words = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4"]
    layout, mbs, impl, refused = json.loads(
        run_python(code, str(tmp_path / "plan.json"), *words, "--auto-parallel")
    )
    assert (layout, mbs, impl) == ("Ettt|tL", 1, "local")
    assert "--pipeline-model-parallel-size is 4 but the plan says 2" in refused


# What the legality rules were written for, by the first release that mends it (None: none yet).
STILL_SO = {
    "uniform-0": ("hangs", None),
    "mlp-bias": ("hangs", None),
    "mlp-no-bias": ("accepted", None),
    "layernorm-without-te": ("NameError", None),
    "core-attention": ("accepted", None),
    "edge-larger-than-model": ("accepted", None),
    "sequence-parallel-norm": ("AssertionError", None),
    "selective-with-method": ("accepted", None),
    "nested-parentheses": ("AssertionError", None),
    "empty-first-slot": ("accepted", None),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(HERE / "canaries.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.megatron
@pytest.mark.parametrize("name", STILL_SO)
def test_canary(name: str, outcomes: dict[str, str]) -> None:
    expected, mended = STILL_SO[name]
    if mended is not None and release(megatron_version() or "0.0") >= release(mended):
        assert outcomes[name] == "accepted"
        return
    assert outcomes[name] == expected, "upstream changed: look at the legality rule again"
