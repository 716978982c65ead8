"""Installed in each way, the package imports the same, and no NCCL of the machine is touched."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow
PROBE = (
    "import megatron_memx, megatron_memx.patches.registry, megatron_memx.launch.torchrun_options\n"
    "import megatron_memx.patches.platform, megatron_memx.cluster_file as c\n"
    "from pathlib import Path\n"
    "assert c.catalogue() and c.schema()\n"
    "known = Path(megatron_memx.patches.registry.__file__).with_name('fingerprints.json')\n"
    "assert known.is_file()\n"
    "print(Path(megatron_memx.__file__).resolve())"
)


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Built from a copy: building writes beside the sources.
    source = tmp_path_factory.mktemp("source") / "checkout"
    run("git", "clone", "--quiet", ROOT, source)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, source)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """An environment with an NCCL of its own, into which the wheel is installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    found = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    nccl = site / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    nccl.parent.mkdir(parents=True)
    nccl.write_text("the machine's own")
    info = site / "nvidia_nccl_cu12-2.19.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nvidia-nccl-cu12\nVersion: 2.19.3\n"
    )
    (info / "RECORD").write_text("nvidia/nccl/lib/libnccl.so.2,,\n")
    (info / "INSTALLER").write_text("pip\n")
    run(found, "-m", "pip", "install", "--quiet", wheel)
    return found


def test_the_wheel_holds_nothing_beside_the_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"megatron_memx"}
    for wanted in ("patches/fingerprints.json", "launch/rank.py", "devices.yaml"):
        assert f"megatron_memx/{wanted}" in names
    assert "megatron_memx/patches/platform/cpu.py" in names


def test_nccl_is_left_alone(python: Path) -> None:
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    assert (site / "nvidia/nccl/lib/libnccl.so.2").read_text() == "the machine's own"
    listed = run(python, "-m", "pip", "list", "--format", "freeze").lower()
    assert [line for line in listed.splitlines() if "nccl" in line] == ["nvidia-nccl-cu12==2.19.3"]
    assert "xgboost-cpu" in listed
    assert run(python, "-c", "import xgboost; print(xgboost.__version__)")


def test_a_wheel_elsewhere(python: Path, tmp_path: Path) -> None:
    assert "site-packages" in run(python, "-c", PROBE, cwd=tmp_path)
    assert "memx 0." in run(python.with_name("memx"), "--version", cwd=tmp_path)
    assert "memx-torchrun 0." in run(python.with_name("memx-torchrun"), "--version", cwd=tmp_path)


def test_a_wheel_with_the_checkout_as_current_directory(python: Path) -> None:
    assert run(python, "-c", PROBE, cwd=ROOT) == str(ROOT / "megatron_memx" / "__init__.py")
    assert "memx 0." in run(python.with_name("memx"), "--version", cwd=ROOT)


def test_an_editable_install(tmp_path: Path) -> None:
    source = tmp_path / "checkout"
    run("git", "clone", "--quiet", ROOT, source)
    venv.create(tmp_path / "environment", with_pip=True)
    own = tmp_path / "environment" / "bin" / "python"
    run(own, "-m", "pip", "install", "--quiet", "setuptools>=70", "pyyaml", "jsonschema")
    run(own, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", source)
    found = run(own, "-c", PROBE, cwd=tmp_path)
    assert found == str(source / "megatron_memx" / "__init__.py")
