"""Argument parsers of the sub-commands: no abbreviations, errors as one clear message."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NoReturn

from megatron_memx.errors import BadInputError


class CommandParser(argparse.ArgumentParser):
    """A parser that raises :class:`BadInputError` in place of leaving the process."""

    def __init__(self, name: str, description: str, example: str) -> None:
        super().__init__(
            prog=f"memx {name}",
            description=description,
            epilog=f"example: {example}",
            allow_abbrev=False,
        )
        self.add_argument("--json", action="store_true", help="print one JSON document")

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise BadInputError(message, fix=f"{self.prog} --help")

    def warn(self, message: str) -> None:
        """Print a warning to standard error."""
        print(f"{self.prog}: warning: {message}", file=sys.stderr)


def print_json(data: Any) -> None:
    """Print one JSON document, as every ``--json`` does."""
    print(json.dumps(data, indent=1))
