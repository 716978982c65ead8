"""Calibrated terms of device kinds as a file: what a few measured runs said of them, to share."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_memx.cost.efficiency import Efficiency
from megatron_memx.errors import BadInputError

SCHEMA = 1
FLAG = "--calibration"


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What runs on one device kind said of it.

    Args:
        log_sigma: One standard deviation of ln(time) between a run and what the others say of it.
        basis: On how many runs it rests, and whose.
        reserved_bytes: Memory outside what is counted (allocator's reserve, workspaces), where the
            runs told; else 0.
    """

    device_kind: str
    efficiency: Efficiency
    log_sigma: float
    basis: str
    reserved_bytes: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "device_kind": self.device_kind,
            "basis": self.basis,
            "log_sigma": self.log_sigma,
            "reserved_bytes": self.reserved_bytes,
            "terms": self.efficiency.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Calibration:
        """Return what :meth:`to_dict` wrote.

        Raises:
            BadInputError: A missing, unknown or impossible term.
        """
        known = {item.name for item in fields(Efficiency)}
        try:
            terms = dict(data["terms"])
            figures = [*terms.values(), data["log_sigma"], data["reserved_bytes"]]
            unknown = sorted(set(terms) - known)
            if unknown:
                raise BadInputError(f"calibration: unknown terms {', '.join(unknown)}", flag=FLAG)
            if not all(isinstance(value, (int, float)) for value in figures):
                raise BadInputError("calibration: a term that is no number", flag=FLAG)
            if not all(map(math.isfinite, figures)):
                raise BadInputError("calibration: a term that is not finite", flag=FLAG)
            shares = ("matmul", "attention", "bandwidth", "optimizer", "intra_link", "inter_link")
            for name in shares:
                if name in terms and not 0 < terms[name] < 10:
                    raise BadInputError(
                        f"calibration: {name} {terms[name]:g} is outside 0 to 10",
                        fix="the file that memx evaluate --save wrote",
                        flag=FLAG,
                    )
            return cls(
                device_kind=str(data["device_kind"]),
                efficiency=Efficiency(**terms),
                log_sigma=float(data["log_sigma"]),
                basis=str(data["basis"]),
                reserved_bytes=float(data["reserved_bytes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadInputError(
                f"calibration: {type(error).__name__} {error}",
                fix="the file that memx evaluate --save wrote",
                flag=FLAG,
            ) from error


def is_calibration(path: str | os.PathLike[str]) -> bool:
    """Whether a file holds calibrations, and not profile rows."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and "calibrations" in data


def save_calibrations(path: str | os.PathLike[str], items: Iterable[Calibration]) -> None:
    """Write a calibration file.

    Raises:
        BadInputError: It cannot be written.
    """
    data = {"schema": SCHEMA, "calibrations": [item.to_dict() for item in items]}
    try:
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise BadInputError(
            f"{path} cannot be written: {error.strerror}", fix="another path", flag="--save"
        ) from error


def read_calibrations(path: str | os.PathLike[str], kinds: Iterable[str]) -> dict[str, Calibration]:
    """Return the calibrations of ``kinds`` in a file; those of other kinds are not for these.

    Raises:
        BadInputError: No such file, another schema, or nothing of these kinds in it.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"calibration {path} cannot be read: {error}",
            fix="a file that memx evaluate --save wrote",
            flag=FLAG,
        ) from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise BadInputError(
            f"{path} is no calibration file of schema {SCHEMA}",
            fix="a file that memx evaluate --save wrote",
            flag=FLAG,
        )
    found = {
        item.device_kind: item for item in map(Calibration.from_dict, data.get("calibrations", ()))
    }
    wanted = list(kinds)
    mine = {kind: found[kind] for kind in wanted if kind in found}
    if not mine:
        raise BadInputError(
            f"calibration {path} is of {', '.join(found) or 'no device'}; "
            f"the cluster has {', '.join(wanted)}",
            fix="a calibration of these device kinds",
            flag=FLAG,
        )
    return mine
