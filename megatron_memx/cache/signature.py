"""Signatures: the hash of everything that determines a result, and what differs between two."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

# Part of every key: raise it when the planner or the predictor would answer differently.
PLANNER_VERSION = 2
_ABSENT = "(absent)"


def signature(fields: Mapping[str, Any]) -> str:
    """Return 32 hexadecimal digits that name ``fields`` (plain JSON types, any nesting)."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, plain value) for every leaf of nested mappings and lists."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from flatten(value[key], f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from flatten(item, f"{prefix}[{index}]")
    else:
        yield prefix, value


def differences(given: Mapping[str, Any], stored: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (field, given value, stored value) for each leaf that differs, sorted by name."""
    left, right = dict(flatten(given)), dict(flatten(stored))
    return [
        (name, left.get(name, _ABSENT), right.get(name, _ABSENT))
        for name in sorted(left.keys() | right.keys())
        if left.get(name, _ABSENT) != right.get(name, _ABSENT)
    ]
