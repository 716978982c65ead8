"""MemX's own options inside a script's arguments."""

from __future__ import annotations

import argparse

import pytest

from megatron_memx.errors import BadInputError
from megatron_memx.options import OPTIONS, MemXOptions, add_options, parse_options


def test_picks_its_own_and_leaves_the_rest() -> None:
    given = ["--num-layers", "4", "--auto-parallel", "--memx-alpha=0.5", "--memx-plan", "a b.json"]
    assert parse_options(given) == MemXOptions(
        auto_parallel=True, memx_alpha=0.5, memx_plan="a b.json"
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--memx-plans", "x"], "--memx-plans is not an option"),
        (["--memx-alpha", "much"], "much"),
        (["--memx-objective", "fast"], "fast"),
        (["--memx-plan"], "expected one argument"),
        (["--memx-dry"], "--memx-dry is not an option"),
    ],
)
def test_wrong_options_are_refused(given: list[str], words: str) -> None:
    with pytest.raises(BadInputError, match="MemX options") as caught:
        parse_options(given)
    assert words in caught.value.message


def test_every_option_is_declared_once_and_has_help() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_options(parser)
    values = vars(parser.parse_args([]))
    assert set(values) == set(MemXOptions.__dataclass_fields__)
    assert all(option.help for option in OPTIONS)
