"""``memx cache``: what is stored, one plan, and a smaller store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from megatron_memx.cache.store import Entry, PlanCache, default_cache_dir
from megatron_memx.cli.parsing import CommandParser, print_json
from megatron_memx.errors import BadInputError


def run(arguments: Sequence[str]) -> int:
    """Run ``memx cache`` and return its exit code."""
    parser = CommandParser(
        "cache", "List, show and prune the cached plans.", "memx cache prune --keep 20"
    )
    parser.add_argument("--cache-dir", help="cache folder (default: as memx-torchrun)")
    parser.add_argument(
        "action", nargs="?", choices=("list", "show", "prune"), default="list", help="what to do"
    )
    parser.add_argument("signature", nargs="?", help="with show: the first digits of a signature")
    parser.add_argument("--keep", type=int, default=20, help="with prune: plans to keep (20)")
    options = parser.parse_args(list(arguments))
    cache = PlanCache(default_cache_dir(options.cache_dir))
    if options.action == "prune":
        if options.keep < 0:
            raise BadInputError(f"--keep {options.keep}: must be 0 or more", flag="--keep")
        removed = cache.prune(keep=options.keep)
        if options.json:
            print_json({"removed": removed})
        else:
            print(f"{len(removed)} plan(s) removed from {cache.folder}")
        return 0
    entries, warnings = cache.entries()
    for warning in warnings:
        parser.warn(warning)
    if options.action == "show":
        _show(_one(entries, options.signature), options.json)
    elif options.json:
        print_json([_row(entry) for entry in entries])
    else:
        print(f"{len(entries)} plan(s) in {cache.folder}")
        for entry in entries:
            row = _row(entry)
            print(f"  {row['signature'][:12]}  {row['modified']}  {row['label']}  {row['layout']}")
    return 0


def _row(entry: Entry) -> dict[str, str]:
    modified = datetime.fromtimestamp(entry.modified_s, tz=UTC)
    return {
        "signature": entry.signature,
        "modified": modified.isoformat(timespec="seconds"),
        "label": entry.plan.parallel.label,
        "layout": entry.plan.layout,
    }


def _one(entries: Sequence[Entry], prefix: str | None) -> Entry:
    found = [entry for entry in entries if prefix and entry.signature.startswith(prefix)]
    if len(found) != 1:
        known = ", ".join(entry.signature[:12] for entry in entries) or "none stored"
        raise BadInputError(
            f"{len(found)} plans have a signature that starts {prefix!r}", fix=known
        )
    return found[0]


def _show(entry: Entry, as_json: bool) -> None:
    if as_json:
        print_json({"fields": entry.fields, "plan": entry.plan.to_dict()})
        return
    from megatron_memx.report.terminal import make_console, show_plan

    show_plan(entry.plan, reused=True, took_s=None, console=make_console())
