"""Units and error texts."""

from __future__ import annotations

import pytest

from megatron_memx.errors import BadInputError, InfeasibleError, MemXError
from megatron_memx.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GiB", 80 * 1024**3), ("80 GB", 80 * 10**9), ("1.5 MiB", 3 * 1024**2 // 2), (7, 7)],
)
def test_parse_bytes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "80 Gbit", "-1 GiB", "GiB", "1e"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(BadInputError, match="memory: "):
        parse_bytes(text, what="memory")


def test_formats() -> None:
    assert format_bytes(80 * 1024**3) == "80.00 GiB"
    assert format_bytes(-512) == "-512 B"
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(300) == "5.0 min"
    assert format_seconds(2e-5) == "20 us"


def test_error_shows_fix_and_flag_and_has_its_exit_code() -> None:
    error = MemXError("a is 3, must be 2 or 4", fix="2 or 4", flag="--a")
    assert str(error) == "a is 3, must be 2 or 4\n  try: 2 or 4\n  flag: --a"
    assert (error.exit_code, InfeasibleError("x").exit_code) == (2, 3)
