"""Measurements on disk: JSON lines, one file for each device kind and layer signature.

Rows are only ever appended, each in one write, so that several jobs may share a folder and an
interrupted profile resumes after its last whole row. A torn or unknown line is skipped and counted.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_memx.cache.signature import signature
from megatron_memx.errors import BadInputError
from megatron_memx.job import Job

SCHEMA = 1
OK, OOM, CONTENDED = "ok", "oom", "contended"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileRow:
    """One measured piece of a model on one device kind, for one micro-batch on one rank.

    Args:
        part: ``middle`` (layers alone), ``first`` (embedding before) or ``last`` (head behind);
            ``optimizer`` for a step of the optimizer; ``link`` for a transfer.
        saved_bytes: Held after the forward pass.
        transient_bytes: The most needed above that until the backward pass has ended.
        spread: Interquartile range over the median of the repeats of forward + backward.
        iteration: Passes run before the measured ones.
        size_bytes, peer_kind, where: Of links: bytes sent, kind at the other end, ``intra-node`` or
            ``inter-node``; ``forward_s`` is then the seconds of the transfer.
    """

    device_kind: str
    platform: str
    layer_signature: str
    part: str
    num_layers: int
    tp: int
    micro_batch_size: int
    seq_length: int
    recompute: str = "none"
    modules: tuple[str, ...] = ()
    sequence_parallel: bool = False
    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: int = 0
    transient_bytes: int = 0
    num_parameters: int = 0
    repeats: int = 0
    spread: float = 0.0
    iteration: int = 0
    status: str = OK
    size_bytes: int = 0
    peer_kind: str = ""
    where: str = ""
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """What was measured, without the result; two rows of one key repeat each other."""
        return (
            self.device_kind,
            self.layer_signature,
            self.part,
            self.num_layers,
            self.tp,
            self.micro_batch_size,
            self.seq_length,
            self.recompute,
            self.modules,
            self.sequence_parallel,
            self.size_bytes,
            self.peer_kind,
            self.where,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        data = asdict(self)
        data["modules"] = list(self.modules)
        return {"schema": SCHEMA, **data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProfileRow:
        """Return the row that :meth:`to_dict` wrote.

        Raises:
            BadInputError: Another schema, or a missing, unknown or wrong field.
        """
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            raise BadInputError(f"not a profile row of schema {SCHEMA}")
        known = {item.name for item in fields(cls)}
        values = {name: value for name, value in data.items() if name != "schema"}
        if set(values) - known:
            raise BadInputError(f"unknown profile fields {sorted(set(values) - known)}")
        try:
            values["modules"] = tuple(values.get("modules", ()))
            row = cls(**values)
            if min(row.forward_s, row.backward_s, row.saved_bytes, row.transient_bytes) < 0:
                raise BadInputError("a profile row with a negative figure")
        except TypeError as error:
            raise BadInputError(f"profile row: {error}") from error
        return row


def layer_signature(job: Job, *, megatron: str) -> str:
    """Return the hash of what determines the cost of one layer, apart from the profiled axes."""
    model = job.model.to_dict()
    for name in ("num_layers", "seq_length", "max_position_embeddings"):
        model.pop(name)
    if model.get("moe"):
        model["moe"].pop("layer_pattern")
    axes = {
        "num_layers",
        "seq_length",
        "max_position_embeddings",
        "micro_batch_size",
        "global_batch_size",
        "hybrid_layer_pattern",
        "hybrid_override_pattern",
        *job.pins,
    }
    options = {name: value for name, value in job.relevant.items() if name not in axes}
    return signature(
        {"model": model, "precision": job.train.precision, "options": options, "megatron": megatron}
    )


class ProfileStore:
    """Rows below ``folder``, one file a (device kind, layer signature)."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder) / "profiles"

    def path_of(self, kind: str, layer: str) -> Path:
        """Return the file of a device kind and a layer signature."""
        safe = "".join(c if c.isalnum() or c in "-." else "_" for c in kind)
        tag = hashlib.sha256(kind.encode()).hexdigest()[:6]
        return self.folder / f"{safe}-{tag}-{layer}.jsonl"

    def read(self, kind: str, layer: str) -> tuple[list[ProfileRow], list[str]]:
        """Return the newest row of each key, and warnings about lines that could not be read."""
        return read_rows(self.path_of(kind, layer), kind=kind, layer=layer)

    def append(self, rows: Iterable[ProfileRow]) -> None:
        """Append rows, each in one write.

        Raises:
            BadInputError: The folder cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for row in rows:
                line = (json.dumps(row.to_dict(), sort_keys=True) + "\n").encode()
                path = self.path_of(row.device_kind, row.layer_signature)
                handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                try:
                    os.write(handle, line)
                finally:
                    os.close(handle)
        except OSError as error:
            raise BadInputError(
                f"profile folder {self.folder} cannot be written: {error.strerror}",
                fix="a folder that you may write to, with room",
                flag="--memx-cache-dir",
            ) from error


def read_rows(
    path: str | os.PathLike[str], *, kind: str | None = None, layer: str | None = None
) -> tuple[list[ProfileRow], list[str]]:
    """Read a JSON-lines file of rows; see :meth:`ProfileStore.read`."""
    file = Path(path)
    newest: dict[tuple[Any, ...], ProfileRow] = {}
    bad = other = 0
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"profile {file} cannot be read ({error.strerror}); ignored"]
    for line in text.splitlines():
        try:
            row = ProfileRow.from_dict(json.loads(line))
        except (ValueError, BadInputError):
            bad += 1
            continue
        if (kind and row.device_kind != kind) or (layer and row.layer_signature != layer):
            other += 1
            continue
        newest[row.key] = row
    warnings = []
    if bad:
        warnings.append(f"profile {file}: {bad} line(s) cannot be read; skipped")
    if other:
        warnings.append(f"profile {file}: {other} row(s) of another device or model; skipped")
    return list(newest.values()), warnings


def export_rows(
    store: ProfileStore, path: str | os.PathLike[str], kind: str | None
) -> tuple[int, list[str]]:
    """Write the store's rows (of one device kind) to a file; return how many, and of what.

    Raises:
        BadInputError: There are none, or the file cannot be written.
    """
    found: list[ProfileRow] = []
    for file in sorted(store.folder.glob("*.jsonl")) if store.folder.is_dir() else ():
        rows, _ = read_rows(file)
        found += [row for row in rows if kind is None or row.device_kind == kind]
    if not found:
        raise BadInputError(
            f"{store.folder} has no measured rows{f' of {kind}' if kind else ''}",
            fix="memx profile -- <Megatron arguments> measures them",
            flag="--export",
        )
    lines = [json.dumps(row.to_dict(), sort_keys=True) + "\n" for row in found]
    try:
        Path(path).write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise BadInputError(
            f"{path} cannot be written: {error.strerror}", fix="another path", flag="--export"
        ) from error
    return len(found), sorted({row.device_kind for row in found})


def import_rows(
    store: ProfileStore, path: str | os.PathLike[str], kind: str
) -> tuple[int, list[str]]:
    """Append a file's rows of ``kind`` to the store; return how many, and of what.

    Raises:
        BadInputError: No such file, a line that is no row, or rows of another device kind.
    """
    if not Path(path).is_file():
        raise BadInputError(f"{path}: there is no such file", fix="a profile", flag="--import")
    rows, warnings = read_rows(path)
    if warnings or not rows:
        raise BadInputError(
            warnings[0] if warnings else f"{path} has no rows",
            fix="a file that memx profile --export wrote",
            flag="--import",
        )
    others = sorted({row.device_kind for row in rows} - {kind})
    if others:
        raise BadInputError(
            f"{path} has rows of {', '.join(others)}: they say nothing of {kind}",
            fix=f"a profile of {kind} alone, or --device {others[0]}",
            flag="--device",
        )
    store.append(rows)
    return len(rows), [kind]


def digest(rows: Iterable[ProfileRow]) -> str:
    """Return a hash of rows, whatever their order."""
    lines = sorted(json.dumps(row.to_dict(), sort_keys=True) for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else ""
