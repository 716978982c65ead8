"""Seam: the dataset helper that wheels ship compiled, without the Makefile that builds it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from megatron_memx.patches.registry import Context, Patch, Replacer, fired

_TARGET = "megatron.core.datasets.utils:compile_helpers"


def _apply(_context: Context, replacer: Replacer) -> None:
    from megatron.core.datasets import utils

    def compile_helpers(*_args: Any, **_kwargs: Any) -> None:
        """Do nothing: the compiled helper is already there."""
        fired("dataset")

    replacer.replace(utils, "compile_helpers", compile_helpers)


def _needed(context: Context) -> str | None:
    if context.plan is None and context.platform is None:
        return "no plan and no platform shim"
    spec = importlib.util.find_spec("megatron.core.datasets")
    if spec is None or not spec.submodule_search_locations:
        return "megatron.core.datasets is not installed"
    folder = Path(next(iter(spec.submodule_search_locations)))
    if (folder / "Makefile").exists():
        return "this Megatron can compile its helper"
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        return "there is no compiled helper"
    return None


PATCH = Patch(
    id="dataset",
    why="Megatron's wheel has a compiled dataset helper but nothing to compile it with",
    targets=(_TARGET,),
    needed=_needed,
    apply=_apply,
)
