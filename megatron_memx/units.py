"""The one place where bytes, seconds and counts become text."""

from __future__ import annotations

import re

from megatron_memx.errors import BadInputError

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4
_FACTORS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")


def format_bytes(count: float) -> str:
    """Return ``count`` bytes as text in the largest binary unit that keeps it >= 1."""
    sign = "-" if count < 0 else ""
    value = abs(float(count))
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if value >= factor:
            return f"{sign}{value / factor:.2f} {unit}"
    return f"{sign}{value:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return a duration as text: us, ms, s or min."""
    value = abs(seconds)
    if value >= 120:
        return f"{seconds / 60:.1f} min"
    if value >= 1:
        return f"{seconds:.2f} s"
    if value >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"


def parse_bytes(text: str | int, *, what: str = "size") -> int:
    """Return bytes for ``"80GiB"``, ``"80 GB"`` or a plain number of bytes.

    Raises:
        BadInputError: The text is not a number with a known unit.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.match(str(text))
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise BadInputError(
            f"{what}: {text!r} is not a size",
            fix="a number of bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB",
        )
    return int(float(match.group(1)) * factor)
