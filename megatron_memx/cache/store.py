"""Plans on disk: one file an entry, content-addressed, safe for many jobs on one folder.

An entry is written whole to a temporary file and renamed into place, so that a reader sees the old
entry, the new one or none, never a half; a killed writer leaves only a temporary file behind.
Writers of one signature write the same content, so the last rename may win.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_memx.cache.signature import differences, signature
from megatron_memx.errors import BadInputError
from megatron_memx.plan import MAX_PLAN_BYTES, Plan

SCHEMA = 1
_STALE_TEMPORARY_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One stored plan with the fields that its signature was made of."""

    path: Path
    signature: str
    fields: Mapping[str, Any]
    plan: Plan
    modified_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """Result of a look-up: the plan, or why there is none, and what was set aside on the way."""

    plan: Plan | None
    why_miss: tuple[tuple[str, Any, Any], ...] = ()
    nearest: str | None = None
    warnings: tuple[str, ...] = ()


def default_cache_dir(given: str | None = None) -> Path:
    """Return the cache folder: ``given``, else ``$MEMX_CACHE_DIR``, else below the home folder."""
    if given:
        return Path(given).expanduser()
    from_environment = os.environ.get("MEMX_CACHE_DIR")
    if from_environment:
        return Path(from_environment).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "megatron_memx"


class PlanCache:
    """The plans below ``folder``.

    Args:
        folder: Cache folder; made on the first write.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder) / "plans"

    def path_of(self, key: str) -> Path:
        """Return the file of a signature."""
        return self.folder / f"{key}.json"

    def lookup(self, fields: Mapping[str, Any]) -> Lookup:
        """Return the plan of exactly these fields, or what differs from the nearest entry."""
        key = signature(fields)
        path = self.path_of(key)
        warnings: list[str] = []
        if path.exists():
            entry = self._read(path, warnings)
            if entry is not None:
                return Lookup(plan=entry.plan, warnings=tuple(warnings))
        nearest: tuple[int, float, str] | None = None
        why: list[tuple[str, Any, Any]] = []
        for candidate in self._entries(warnings):
            differing = differences(fields, candidate.fields)
            rank = (len(differing), -candidate.modified_s, candidate.signature)
            if nearest is None or rank < nearest:
                nearest, why = rank, differing
        return Lookup(
            plan=None,
            why_miss=tuple(why),
            nearest=nearest[2] if nearest else None,
            warnings=tuple(warnings),
        )

    def put(self, fields: Mapping[str, Any], plan: Plan) -> Path:
        """Store ``plan`` under the signature of ``fields`` and return the file.

        Raises:
            BadInputError: The folder cannot be written; the message names it and the flag.
        """
        key = signature(fields)
        if plan.signature != key:
            raise ValueError(f"plan is signed {plan.signature}, its fields say {key}")
        data = {"schema": SCHEMA, "fields": fields, "plan": plan.to_dict()}
        path = self.path_of(key)
        temporary = path.with_name(f".{key}.{os.getpid()}.{time.monotonic_ns()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(data, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise BadInputError(
                f"cache folder {self.folder} cannot be written: {error.strerror}",
                fix="a folder that you may write to, with room",
                flag="--memx-cache-dir",
            ) from error
        return path

    def entries(self) -> tuple[list[Entry], list[str]]:
        """Return every readable entry, newest first, and warnings about those set aside."""
        warnings: list[str] = []
        found = sorted(self._entries(warnings), key=lambda entry: -entry.modified_s)
        return found, warnings

    def remove(self, key: str) -> bool:
        """Remove one entry; False if there was none."""
        try:
            self.path_of(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def prune(self, *, keep: int, now_s: float | None = None) -> list[str]:
        """Keep the ``keep`` newest entries; return the signatures removed.

        Broken files and the temporary files of writers dead for an hour go as well.
        """
        found, _ = self.entries()
        removed = [entry.signature for entry in found[keep:] if self.remove(entry.signature)]
        horizon = (now_s if now_s is not None else time.time()) - _STALE_TEMPORARY_S
        for path in self.folder.glob(".*.tmp") if self.folder.is_dir() else ():
            if _modified_s(path) < horizon:
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*.broken") if self.folder.is_dir() else ():
            path.unlink(missing_ok=True)
        return removed

    def _entries(self, warnings: list[str]) -> Iterator[Entry]:
        for path in sorted(self.folder.glob("*.json")) if self.folder.is_dir() else ():
            entry = self._read(path, warnings)
            if entry is not None:
                yield entry

    def _read(self, path: Path, warnings: list[str]) -> Entry | None:
        """Return the entry, or None after a broken file was set aside with a warning."""
        try:
            if path.stat().st_size > MAX_PLAN_BYTES:
                raise BadInputError(f"larger than {MAX_PLAN_BYTES} bytes")
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.get("schema") != SCHEMA:
                raise BadInputError(f"not a cache entry of schema {SCHEMA}")
            fields = data["fields"]
            if not isinstance(fields, dict) or signature(fields) != path.stem:
                raise BadInputError("its fields do not give the signature in its name")
            plan = Plan.from_dict(data["plan"], source=path.name)
            if plan.signature != path.stem:
                raise BadInputError(f"its plan is signed {plan.signature}")
        except FileNotFoundError:
            return None
        except OSError as error:
            warnings.append(f"cache entry {path} cannot be read ({error.strerror}); ignored")
            return None
        except (ValueError, KeyError, TypeError, RecursionError, BadInputError) as error:
            self._set_aside(path, str(error).splitlines()[0], warnings)
            return None
        return Entry(
            path=path,
            signature=path.stem,
            fields=fields,
            plan=plan,
            modified_s=_modified_s(path),
        )

    def _set_aside(self, path: Path, reason: str, warnings: list[str]) -> None:
        aside = path.with_suffix(".broken")
        try:
            os.replace(path, aside)
            warnings.append(f"cache entry {path.name} is unreadable ({reason}); kept as {aside}")
        except OSError:
            warnings.append(f"cache entry {path} is unreadable ({reason}); ignored")


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
