"""Entry of ``memx``: find the sub-command, run it, turn errors into exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_memx.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_OK, MemXError

# Name -> what it does. The module is ``megatron_memx.cli.<name>_command`` with ``run(arguments)``;
# commands that start processes stand with what starts them.
_LAUNCHING = frozenset(("profile",))
SUBCOMMANDS = {
    "plan": "plan without launching: memx plan --cluster FILE -- <Megatron arguments>",
    "predict": "time and memory of one configuration: memx predict --cluster FILE -- <arguments>",
    "profile": "measure devices, or trace the memory of real Megatron stages without a GPU",
    "cluster": "check a cluster file and show its nodes and devices",
    "evaluate": "score predictions against measured runs after fitting on a few of them",
    "cache": "list, show and prune the cached plans",
    "export": "write a plan as stock Megatron arguments",
}


def help_text() -> str:
    """Return the text of ``memx --help``."""
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: memx [--version] <command> [options]",
            "",
            "Plan Megatron-LM pre-training on mixed GPU clusters. To train, use memx-torchrun.",
            "",
            "commands:",
            *lines,
            "",
            "Each command takes --help and --json.",
            "Exit codes: 0 done, 2 bad input, 3 no feasible plan, 130 interrupted.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``memx`` and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_text())
        return EXIT_OK if arguments else EXIT_BAD_INPUT
    if arguments[0] == "--version":
        from megatron_memx import __version__

        print(f"memx {__version__}")
        return EXIT_OK
    name, rest = arguments[0], arguments[1:]
    if name not in SUBCOMMANDS:
        known = ", ".join(SUBCOMMANDS)
        print(f"memx: {name!r} is not a command\n  try: {known}", file=sys.stderr)
        return EXIT_BAD_INPUT
    from importlib import import_module

    try:
        room = "launch" if name in _LAUNCHING else "cli"
        return int(import_module(f"megatron_memx.{room}.{name}_command").run(rest))
    except MemXError as error:
        print(f"memx {name}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
