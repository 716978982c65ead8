"""Maintainer's tool: fingerprints of the installed Megatron for ``fingerprints.json``.

``python -m megatron_memx.patches.fingerprint`` prints what this environment's Megatron has;
``--update`` merges it into the file. Run it once for each supported release, after the tests of
the patches have passed on it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_memx.patches import all_patches
from megatron_memx.patches.registry import fingerprint, resolve

from megatron_memx.versions import require_megatron


def current() -> dict[str, str]:
    """Return target -> fingerprint of every target that this Megatron has."""
    found = {}
    for patch in all_patches():
        for target in patch.targets:
            function = resolve(target)
            if function is not None:
                found[target.rstrip("?")] = fingerprint(function)
    return found


def merged(known: dict[str, dict[str, list[str]]], found: dict[str, str], release: str) -> None:
    """Add ``found`` as the fingerprints of ``release`` to ``known``."""
    for target in {*known, *found}:
        marks = known.setdefault(target, {})
        for releases in marks.values():
            if release in releases:
                releases.remove(release)
        if target in found:
            releases = marks.setdefault(found[target], [])
            releases.append(release)
            releases.sort()
        for mark in [mark for mark, releases in marks.items() if not releases]:
            del marks[mark]


def main(words: list[str]) -> int:
    """Print or merge the fingerprints."""
    from megatron_memx.patches import platform

    platform.install("cpu")
    release, found = require_megatron(), current()
    if "--update" not in words:
        print(json.dumps({"release": release, "fingerprints": found}, indent=1))
        return 0
    path = Path(__file__).with_name("fingerprints.json")
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    merged(known, found, release)
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{len(found)} fingerprints of {release} in {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
