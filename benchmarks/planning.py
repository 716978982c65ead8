"""What planning adds before torchrun: cold, and from the cache; also against a bare Python start.

    python benchmarks/planning.py [--json]

Each figure is the median of repeats in this run, on this machine; ratios are between figures of
the same run. Nothing is trained or measured on devices: the plan rests on the catalogue.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = [
    *("--num-layers", "24", "--hidden-size", "1024", "--num-attention-heads", "16"),
    *("--seq-length", "1024", "--max-position-embeddings", "1024", "--vocab-size", "50257"),
    *("--global-batch-size", "64", "--bf16"),
]


def planned_s(cache: str, *more: str) -> tuple[float, float]:
    """Return (seconds of the process, seconds that it says planning took)."""
    command = [sys.executable, "-m", "megatron_memx.launch.torchrun", "--nproc-per-node", "4"]
    command += [str(ROOT / "examples" / "pretrain_gpt.py"), *MODEL, "--auto-parallel"]
    command += ["--memx-platform", "cpu", "--memx-profile", "never", "--memx-dry-run"]
    command += ["--memx-cache-dir", cache, *more]
    started = time.perf_counter()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    whole = time.perf_counter() - started
    found = re.search(r"in ([0-9.]+) (ms|s)\b", done.stdout)
    assert found is not None, done.stdout
    return whole, float(found.group(1)) * (1e-3 if found.group(2) == "ms" else 1.0)


def bare_s() -> float:
    """Return the seconds of a Python process that does nothing."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - started


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    cold, cached, bare = [], [], []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(planned_s(cache))
            cached.append(planned_s(cache))
        bare.append(bare_s())
    base = statistics.median(bare)
    figures = {
        "bare_python_s": base,
        "cold.process_s": statistics.median(whole for whole, _ in cold),
        "cold.planning_s": statistics.median(planning for _, planning in cold),
        "cached.process_s": statistics.median(whole for whole, _ in cached),
        "cached.planning_s": statistics.median(planning for _, planning in cached),
    }
    figures["cached_over_cold"] = figures["cached.planning_s"] / figures["cold.planning_s"]
    figures["cached_over_bare_python"] = figures["cached.process_s"] / base
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        for name, value in figures.items():
            print(f"{name:26} {value:8.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
