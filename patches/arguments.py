"""Seam: Megatron's argument parser. MemX's options join it and the plan's values land in it.

The plan's values are added behind the user's own words for the time of the parse, so that every
release parses, derives and validates them as if the user had typed them. ``sys.argv`` is left as
it was. The namespace stays the same on every rank and holds plain types only.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron_memx.patches.registry import Context, Patch, Replacer, fired, resolve

from megatron_memx import platforms
from megatron_memx.conflicts import refuse_conflicts
from megatron_memx.megatron_args import (
    REPLACED_BY_LAYOUT,
    overrides_to_argv,
    plan_overrides,
    without_options,
)
from megatron_memx.options import add_options


@contextmanager
def _with_words(drop: Collection[str], more: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = [before[0], *without_options(before[1:], drop), *more]
    try:
        yield
    finally:
        sys.argv = before


def _known_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Drop flags that this release does not have (and their values)."""
    kept: list[str] = []
    keep = True
    for word in words:
        if word.startswith("--"):
            keep = word.partition("=")[0] in parser._option_string_actions
        if keep:
            kept.append(word)
    return kept


def _apply(context: Context, replacer: Replacer) -> None:
    from megatron.training import arguments

    original_add = arguments.add_megatron_arguments
    original_parse = arguments.parse_args
    built: list[argparse.ArgumentParser] = []

    @functools.wraps(original_add)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> Any:
        parser = original_add(parser)
        if "--auto-parallel" not in parser._option_string_actions:
            add_options(parser)
        built[:] = [parser]
        return parser

    @functools.wraps(original_parse)
    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
        words: list[str] = []
        if context.platform is not None:
            words += platforms.default_words(context.platform, sys.argv[1:])
        if context.plan is not None:
            refuse_conflicts(context.plan, sys.argv[1:])
            words += overrides_to_argv(plan_overrides(context.plan))
        # A throw-away parser tells which of these flags this release has.
        known = _known_words(add_megatron_arguments(_blank_parser()), words)
        with _with_words(REPLACED_BY_LAYOUT if context.plan is not None else (), known):
            namespace = original_parse(extra_args_provider, ignore_unknown_args)
        if context.plan is not None:
            # Plain text: args are saved with checkpoints and read back with plain types only.
            namespace.memx_plan_signature = context.plan.signature
        fired("arguments")
        return namespace

    replacer.replace(arguments, "add_megatron_arguments", add_megatron_arguments)
    replacer.replace(arguments, "parse_args", parse_args)
    # Other modules hold the function under its own name (0.17: initialize; all: the package).
    for module_name in list(sys.modules):
        module = sys.modules[module_name]
        if not module_name.startswith("megatron.") or module is arguments:
            continue
        if vars(module).get("parse_args") is original_parse:
            replacer.replace(module, "parse_args", parse_args)


def _blank_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(allow_abbrev=False, add_help=False)


def _needed(context: Context) -> str | None:
    if context.plan is None and context.platform is None:
        return "no plan and no platform shim"
    if resolve("megatron.training.arguments:parse_args") is None:
        return "megatron.training is not installed"
    return None


PATCH = Patch(
    id="arguments",
    why="MemX's options and the plan's parallel sizes in Megatron's parser",
    targets=("megatron.training.arguments:parse_args",),
    needed=_needed,
    apply=_apply,
    must_fire=True,
)
