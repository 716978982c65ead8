"""Frozen dataclasses from untrusted JSON: every field is checked, every error names its place."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from megatron_memx.errors import BadInputError


def checked[T](cls: type[T], data: Any, where: str) -> T:
    """Return ``cls(**data)`` after checking ``data`` against the annotations of ``cls``.

    Lists become tuples; nested dataclasses are made the same way.

    Args:
        where: Where ``data`` stands in the document, for messages.

    Raises:
        BadInputError: A field is missing, unknown or of another type.
    """
    if not isinstance(data, Mapping):
        raise BadInputError(f"{where} must be an object, not {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    fields = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise BadInputError(f"{where} has the unknown field {unknown[0]!r}")
    values = {}
    for name, item in fields.items():
        if name in data:
            values[name] = _value(hints[name], data[name], f"{where}.{name}")
        elif item.default is item.default_factory is dataclasses.MISSING:
            raise BadInputError(f"{where} lacks the field {name!r}")
    return cls(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in inner:
            return None
        (hint,) = (each for each in inner if each is not type(None))
        return _value(hint, value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _wrong(where, value, "a list")
        return tuple(_value(inner[0], each, f"{where}[{i}]") for i, each in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _wrong(where, value, "an object")
        return {key: _value(inner[1], each, f"{where}.{key}") for key, each in value.items()}
    if dataclasses.is_dataclass(hint):
        return checked(typing.cast(Any, hint), value, where)
    if hint is Any:
        return value
    if hint is bool:
        if not isinstance(value, bool):
            raise _wrong(where, value, "true or false")
    elif hint is int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _wrong(where, value, "a whole number")
    elif hint is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _wrong(where, value, "a number")
        if not math.isfinite(value):
            raise _wrong(where, value, "a finite number")
    elif hint is str and not isinstance(value, str):
        raise _wrong(where, value, "text")
    return value


def _wrong(where: str, value: Any, wanted: str) -> BadInputError:
    text = repr(value)
    return BadInputError(
        f"{where} is {text if len(text) < 60 else text[:57] + '...'}: must be {wanted}"
    )
