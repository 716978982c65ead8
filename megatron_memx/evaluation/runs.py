"""Measured runs: one row of a ``runs.csv`` each. Blank means unknown, and stays unknown."""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from megatron_memx.errors import BadInputError

_NEEDED = ("layers", "hidden", "heads", "seq", "gpu", "num_gpus")
# Rows that say of themselves that they cannot be right, or that they did not run.
_DISTRUSTED = {
    "the notes call the run suspect": re.compile(r"\bsuspect\b", re.IGNORECASE),
    "the notes say source inconsistency": re.compile(r"source inconsisten", re.IGNORECASE),
}
_FAILED = re.compile(r"\bFAILED\b|^\s*OOM\b")
_TRUE = frozenset(("true", "yes", "1", "on"))
_FALSE = frozenset(("false", "no", "0", "off"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run as its source printed it. ``None`` is unknown; sizes are counts.

    Args:
        row: Line of the file, from 2.
        failed: Whether it did not run (out of memory or another failure).
    """

    row: int
    source: str = ""
    row_ref: str = ""
    model: str = ""
    layers: int | None = None
    hidden: int | None = None
    ffn: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    seq: int | None = None
    vocab: int | None = None
    params_b: float | None = None
    moe_experts: int | None = None
    moe_topk: int | None = None
    gpu: str = ""
    num_gpus: int | None = None
    gpus_per_node: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    vpp: int | None = None
    mbs: int | None = None
    gbs: int | None = None
    recompute: str = ""
    seq_parallel: bool | None = None
    dist_opt: bool | None = None
    zero: str = ""
    precision: str = ""
    flash: str = ""
    framework: str = ""
    iter_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    tflops_per_gpu: float | None = None
    mfu: float | None = None
    peak_mem_gib: float | None = None
    notes: str = ""
    failed: bool = False

    def group(self) -> tuple[object, ...]:
        """Return what makes runs comparable: one model and batch on the same devices."""
        return (
            *(self.source, self.layers, self.hidden, self.ffn, self.heads, self.kv_heads),
            *(self.seq, self.vocab, self.moe_experts, self.gpu, self.num_gpus, self.gbs),
            *(self.precision, self.framework),
        )


COLUMNS = tuple(item.name for item in fields(Run) if item.name not in ("row", "failed"))


def read_runs(path: str | os.PathLike[str]) -> tuple[list[Run], Counter[str]]:
    """Read a file of runs.

    Returns:
        The rows that can be used at all, and how many cannot, by reason.

    Raises:
        BadInputError: Not a CSV file with the columns of a ``runs.csv``, or no row of it can be
            read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read: {error}", flag="--runs") from error
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise BadInputError(
            f"{path}: no column {', '.join(missing)}: a file of runs has a header with "
            f"{', '.join(COLUMNS)}",
            fix="add the columns (cells may be blank)",
            flag="--runs",
        )
    runs, unread = [], Counter[str]()
    first_error: ValueError | None = None
    for number, row in enumerate(reader, start=2):
        try:
            runs.append(_run(row, number))
        except ValueError as error:
            first_error = first_error or ValueError(f"line {number}: {error}")
            unread[str(error).partition(" is ")[0] + " cannot be read"] += 1
    if first_error is not None and not runs:
        raise BadInputError(f"{path}: no row can be read; {first_error}", flag="--runs")
    kept, skipped = sort_out(runs)
    return kept, skipped + unread


def sort_out(runs: Iterable[Run]) -> tuple[list[Run], Counter[str]]:
    """Return the runs that can be used, and how many cannot, by reason."""
    kept, skipped = [], Counter[str]()
    for run in runs:
        reason = _unusable(run)
        if reason:
            skipped[reason] += 1
        else:
            kept.append(run)
    return kept, skipped


def _unusable(run: Run) -> str | None:
    for reason, words in _DISTRUSTED.items():
        if words.search(run.notes):
            return reason
    for name in _NEEDED:
        if not getattr(run, name):
            return f"{name} is not stated"
    if not run.failed and run.iter_time_s is None and run.peak_mem_gib is None:
        return "neither time nor memory is stated"
    return None


def _run(row: Mapping[str, str | None], number: int) -> Run:
    values: dict[str, object] = {}
    for item in fields(Run):
        cell = (row.get(item.name) or "").strip()
        if item.name in ("row", "failed"):
            continue
        values[item.name] = _cell(str(item.type), item.name, cell)
    failed = bool(_FAILED.search(str(values["notes"])))
    if failed:
        values["iter_time_s"] = values["peak_mem_gib"] = None
    run = Run(row=number, failed=failed, **values)  # type: ignore[arg-type]
    speed, tokens = run.tokens_per_s_per_gpu, (run.gbs or 0) * (run.seq or 0)
    if not failed and run.iter_time_s is None and speed and tokens and run.num_gpus:
        # Exact where the global batch is printed.
        run = replace(run, iter_time_s=tokens / (speed * run.num_gpus))
    return run


def _cell(kind: str, name: str, cell: str) -> object:
    if kind == "str":
        return cell
    if not cell:
        return None
    if kind.startswith("bool"):
        low = cell.lower()
        if low in _TRUE or low in _FALSE:
            return low in _TRUE
        raise ValueError(f"{name} is {cell!r}: must be true, false or blank")
    try:
        value = float(cell)
    except ValueError:
        raise ValueError(f"{name} is {cell!r}: must be a number or blank") from None
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} is {cell}: must be 0 or more and finite")
    if not kind.startswith("int"):
        return value
    if value != int(value):
        raise ValueError(f"{name} is {cell}: must be a whole number")
    return int(value)
