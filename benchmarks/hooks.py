"""What the schedule's clocks add to a pass, paired: the same pass with and without, in turn.

    python benchmarks/hooks.py [--json] [--pass-ms 5]

A pass here is a matrix product of about the given time on the CPU; the ratio is the added share.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable

import torch
from megatron_memx.patches.schedule import _Clock


def seconds(action: Callable[[], object]) -> float:
    """Return how long one call takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def matrix_of(pass_s: float) -> torch.Tensor:
    """Return a square matrix whose product with itself takes about ``pass_s``."""
    size = 128
    while True:
        matrix = torch.randn(size, size)
        taken = [seconds(functools.partial(torch.matmul, matrix, matrix)) for _ in range(5)]
        if statistics.median(taken) > pass_s:
            return matrix
        size = int(size * 1.2)


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pass-ms", type=float, default=5.0)
    parser.add_argument("--pairs", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    matrix = matrix_of(options.pass_ms / 1e3)
    clock = _Clock(on_device=False)

    def work() -> torch.Tensor:
        return matrix @ matrix

    empty_s = [seconds(lambda: clock.run(int)) - seconds(int) for _ in range(20_000)]
    ratios = []
    plain = []
    for _ in range(options.pairs):
        without = seconds(work)
        plain.append(without)
        ratios.append(seconds(lambda: clock.run(work)) / without)
    base = statistics.median(plain)
    figures = {
        "pass_s": base,
        "added_s": statistics.median(empty_s),
        "added_share": statistics.median(empty_s) / base,
        "paired_ratio_median": statistics.median(ratios),
    }
    if options.json:
        print(json.dumps(figures, indent=1))
    else:
        for name, value in figures.items():
            print(f"{name:20} {value:.3e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
