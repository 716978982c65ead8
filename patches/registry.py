"""Patches: each with an id, a version range, a reason, a fingerprint of what it replaces, an undo.

A patch replaces attributes of Megatron's modules and nothing else; no file is edited. Before it is
applied, the code that it replaces is compared with the releases that it was written for. Unknown
code is refused, never patched on trust, unless the user says so.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import logging
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from megatron_memx.errors import UpstreamChangedError
from megatron_memx.plan import Plan

SUPPORTED = ("0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.2")
OVERRIDE_FLAG = "--memx-allow-unknown-megatron"
_MISSING = object()
_log = logging.getLogger("megatron_memx")


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the patches of one rank process know.

    Args:
        plan: The plan, or None for a run without one.
        platform: Name of the platform shim, or None.
        run_dir: Folder for measurements of this run, or None to measure nothing.
        allow_unknown: Patch code whose fingerprint is unknown.
    """

    plan: Plan | None = None
    platform: str | None = None
    run_dir: str | None = None
    allow_unknown: bool = False


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One patch.

    Args:
        id: Short name, shown in reports.
        why: One line: what it makes possible.
        targets: Replaced or relied-on functions, ``module:qualified.name``; a trailing ``?``
            marks one that some supported releases lack.
        needed: Returns None where the patch is needed, else the reason to leave it out.
        apply: Replaces attributes through :class:`Replacer`.
        must_fire: The run is wrong if this patch never ran.
    """

    id: str
    why: str
    targets: tuple[str, ...]
    needed: Callable[[Context], str | None]
    apply: Callable[[Context, Replacer], None]
    must_fire: bool = False


@dataclass
class Replacer:
    """Replaces attributes and remembers what stood there."""

    patch_id: str
    undo_list: list[tuple[Any, str, Any]] = field(default_factory=list)

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Put ``value`` at ``owner.name`` and return what was there."""
        before = vars(owner).get(name, _MISSING)
        self.undo_list.append((owner, name, before))
        setattr(owner, name, value)
        return before

    def undo(self) -> None:
        """Put everything back, last first."""
        while self.undo_list:
            owner, name, before = self.undo_list.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


_applied: dict[str, Replacer] = {}
_fired: dict[str, int] = {}
_skipped: dict[str, str] = {}


def fired(patch_id: str) -> None:
    """Count one run of a patch's own code."""
    _fired[patch_id] = _fired.get(patch_id, 0) + 1


def resolve(target: str) -> Any:
    """Return the function that ``module:qualified.name`` names, or None if there is none."""
    module_name, _, qualified = target.rstrip("?").partition(":")
    try:
        thing: Any = importlib.import_module(module_name)
    except ModuleNotFoundError:
        return None
    for part in qualified.split("."):
        thing = getattr(thing, part, None)
    return thing


def fingerprint(function: Any) -> str:
    """Return a hash of a function's code that comments, docstrings and layout do not change."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                body[0] = ast.Pass()
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


@cache
def known_fingerprints() -> dict[str, dict[str, list[str]]]:
    """Return target -> fingerprint -> releases, as ``fingerprints.json`` lists them."""
    text = resources.files(__package__).joinpath("fingerprints.json").read_text(encoding="utf-8")
    data: dict[str, dict[str, list[str]]] = json.loads(text)
    return data


def check_upstream(patch: Patch, *, allow_unknown: bool) -> None:
    """Refuse code that the patch was not written for.

    Raises:
        UpstreamChangedError: A target is missing or has an unknown fingerprint.
    """
    for target in patch.targets:
        function = resolve(target)
        name = target.rstrip("?")
        known = known_fingerprints().get(name, {})
        if function is None:
            if target.endswith("?"):
                continue
            problem = "is not there"
        else:
            found = fingerprint(function)
            if found in known:
                continue
            problem = f"has the unknown fingerprint {found}"
        if allow_unknown and function is not None:
            _log.warning("MemX patch %s: %s %s; patched all the same", patch.id, name, problem)
            continue
        releases = sorted({release for each in known.values() for release in each})
        raise UpstreamChangedError(
            f"patch {patch.id!r} ({patch.why}): {name} of the installed Megatron {problem}; tested "
            f"with megatron-core {', '.join(releases or SUPPORTED)}",
            fix="one of these releases, or the flag below at your own risk",
            flag=OVERRIDE_FLAG,
        )


def apply_all(patches: tuple[Patch, ...], context: Context) -> None:
    """Apply each patch that is needed and not yet applied, in order.

    All targets are checked before the first attribute is replaced.
    """
    todo = []
    for patch in patches:
        reason = patch.needed(context)
        if reason is not None:
            _skipped[patch.id] = reason
        elif patch.id not in _applied:
            check_upstream(patch, allow_unknown=context.allow_unknown)
            todo.append(patch)
    for patch in todo:
        replacer = Replacer(patch_id=patch.id)
        patch.apply(context, replacer)
        _applied[patch.id] = replacer
        _fired.setdefault(patch.id, 0)


def undo_all() -> None:
    """Undo every applied patch, last first, and forget the counters."""
    while _applied:
        _, replacer = _applied.popitem()
        replacer.undo()
    _fired.clear()
    _skipped.clear()


def report() -> dict[str, Any]:
    """Return what was applied and how often it ran, and what was left out and why."""
    return {"fired": dict(_fired), "skipped": dict(_skipped)}


def never_fired(patches: tuple[Patch, ...]) -> list[str]:
    """Return the ids of applied patches that must run and did not."""
    return [
        patch.id
        for patch in patches
        if patch.must_fire and patch.id in _applied and not _fired.get(patch.id)
    ]
