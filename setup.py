"""Packaging: ``patches/`` and ``launch/`` stand at the top level and install inside the package."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
PACKAGE = "megatron_memx"


def version() -> str:
    """Read the version without importing the package."""
    for line in (HERE / PACKAGE / "__init__.py").read_text(encoding="utf-8").splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise RuntimeError("no __version__ in megatron_memx/__init__.py")


def packages() -> list[str]:
    """Return every package under its import name."""
    found = [PACKAGE, *(f"{PACKAGE}.{name}" for name in find_packages(PACKAGE))]
    for folder in ("patches", "launch"):
        found.append(f"{PACKAGE}.{folder}")
        found += [f"{PACKAGE}.{folder}.{name}" for name in find_packages(folder)]
    return found


setup(
    name="megatron-memx",
    version=version(),
    description="Plan and launch Megatron-LM pre-training on mixed GPU clusters",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=packages(),
    package_dir={
        PACKAGE: PACKAGE,
        f"{PACKAGE}.patches": "patches",
        f"{PACKAGE}.launch": "launch",
    },
    package_data={
        PACKAGE: ["*.yaml", "*.json"],
        f"{PACKAGE}.patches": ["*.json"],
    },
    install_requires=[
        "numpy>=1.26",
        "pyyaml>=6",
        "rich>=13",
        "jsonschema>=4.18",
        "scipy>=1.11",
        # The official build without GPU code: plain xgboost brings an NCCL of its own, which would
        # stand beside, or over, the one that torch was built with.
        "xgboost-cpu>=2.1",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]"],
        "train": ["torch>=2.6", "megatron-core>=0.17,<0.20", "psutil"],
        "dev": [
            "torch>=2.6",
            "megatron-core>=0.17,<0.20",
            "psutil",
            "pytest>=8",
            "pytest-timeout",
            "hypothesis",
            "ruff==0.17.*",
            "mypy>=1.13",
            "build",
            "types-PyYAML",
            "types-jsonschema",
            "scipy-stubs",
        ],
    },
    entry_points={
        "console_scripts": [
            "memx = megatron_memx.cli.main:main",
            "memx-torchrun = megatron_memx.launch.torchrun:main",
        ]
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
