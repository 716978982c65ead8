"""Errors that people see: what was given, the rule with its numbers, a legal value, the flag."""

from __future__ import annotations

EXIT_OK = 0
EXIT_BAD_INPUT = 2
EXIT_INFEASIBLE = 3
EXIT_TRAINING_FAILED = 4
EXIT_INTERRUPTED = 130


class MemXError(Exception):
    """Base of every error that MemX shows to a person; ``exit_code`` ends the process.

    Args:
        message: What was given and the rule that it breaks, with the numbers filled in.
        fix: The nearest legal value or what to do instead; shown on its own line.
        flag: The option to change, spelled as on the command line.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, message: str, *, fix: str | None = None, flag: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix
        self.flag = flag

    def __str__(self) -> str:
        parts = [self.message]
        if self.fix:
            parts.append(f"  try: {self.fix}")
        if self.flag:
            parts.append(f"  flag: {self.flag}")
        return "\n".join(parts)


class BadInputError(MemXError, ValueError):
    """A file, a flag or a combination of them that cannot be used (exit code 2)."""


class LegalityError(BadInputError):
    """A configuration that Megatron refuses or, worse, silently gets wrong (exit code 2)."""


class InfeasibleError(MemXError):
    """No plan satisfies the constraints; the message names the nearest miss (exit code 3)."""

    exit_code = EXIT_INFEASIBLE


class UpstreamChangedError(BadInputError):
    """The installed Megatron differs from what a patch was written for (exit code 2)."""
