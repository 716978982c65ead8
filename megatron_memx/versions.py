"""Which releases are installed, found without importing them."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_memx.errors import BadInputError


def megatron_version(folders: Sequence[str | os.PathLike[str]] = ()) -> str | None:
    """Return the release of the megatron-core that a script would import, or None.

    Args:
        folders: Searched before ``sys.path``: the script's own folder, as Python does.
    """
    for folder in [*folders, *sys.path]:
        info = Path(folder or ".") / "megatron" / "core" / "package_info.py"
        if info.is_file():
            return _version_of(info)
    return None


def _version_of(info: Path) -> str | None:
    numbers: dict[str, object] = {}
    for node in ast.parse(info.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    numbers[target.id] = node.value.value
    if "MAJOR" not in numbers:
        return None
    return f"{numbers['MAJOR']}.{numbers['MINOR']}.{numbers['PATCH']}"


def require_megatron(folders: Sequence[str | os.PathLike[str]] = ()) -> str:
    """Return :func:`megatron_version`.

    Raises:
        BadInputError: There is none.
    """
    found = megatron_version(folders)
    if found is None:
        raise BadInputError(
            "megatron.core is not installed in this environment and not beside the script",
            fix="pip install 'megatron-core>=0.17,<0.20', or run from a Megatron-LM checkout",
        )
    return found


def release(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as ``0.19.2`` or ``0.20.0rc0``."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
