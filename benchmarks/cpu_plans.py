"""Predicted against measured on CPU ranks: random jobs, the plans that MemX makes for them.

    python benchmarks/cpu_plans.py [--plans 32] [--seed 0] [--json]

Each job is a small model with random depth, batch, memory budget and objective, so that plans are
uneven and recompute differently by stage. MemX profiles the layers once for each model, plans, and
trains it on two ranks (some on four) with real torchrun, Megatron and gloo (rung of proof:
measured-cpu). Each plan runs twice: the spread of a pair is the machine's own. Where
ranks are more than cores, they share them; four ranks are profiled and given apart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron_memx.plan import Plan
from megatron_memx.report.measured import Measured, read_measured

ROOT = Path(__file__).resolve().parent.parent
_ITERATIONS = 14
_MODELS = (
    {"hidden-size": 192, "num-attention-heads": 6, "seq-length": 192, "vocab-size": 512},
    {"hidden-size": 256, "num-attention-heads": 4, "seq-length": 128, "vocab-size": 2048},
    {"hidden-size": 128, "num-attention-heads": 4, "seq-length": 384, "vocab-size": 1024},
)
_CLUSTER = """name: cpu
nodes: [{{name: localhost, device: cpu, num_devices: {ranks}}}]
devices:
  cpu:
    platform: cpu
    memory_bytes: {memory}MiB
    peak_flops: {{fp32: 40e9}}
    memory_bandwidth_bytes_per_s: 10e9
"""


def draw(dice: random.Random, number: int) -> dict[str, Any]:
    """Return a random job."""
    model = _MODELS[number % len(_MODELS)]
    ranks = 4 if number % 8 == 7 else 2
    return {
        "ranks": ranks,
        "memory": dice.choice((64, 96, 128, 192, 256)),
        "objective": dice.choice(("default", "throughput", "safety")),
        "words": {
            **model,
            "num-layers": dice.randint(max(4, ranks), 10),
            "max-position-embeddings": model["seq-length"],
            "global-batch-size": 8,
            "pipeline-model-parallel-size": ranks,
            "tensor-model-parallel-size": 1,
        },
    }


def trained(job: dict[str, Any], folder: Path, cache: Path) -> tuple[Plan, Measured] | None:
    """Train a job on its plan; None where no plan fits its memory."""
    cluster = folder / "cluster.yaml"
    cluster.write_text(_CLUSTER.format(ranks=job["ranks"], memory=job["memory"]))
    saved = folder / "plan.json"
    words = [word for name, value in job["words"].items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "megatron_memx.launch.torchrun"]
    command += ["--nproc-per-node", str(job["ranks"]), str(ROOT / "examples" / "pretrain_gpt.py")]
    command += [*words, "--auto-parallel", "--memx-platform", "cpu", "--memx-cluster", str(cluster)]
    command += ["--memx-cache-dir", str(cache), "--memx-save-plan", str(saved)]
    command += ["--memx-objective", job["objective"], "--mock-data"]
    command += ["--tokenizer-type", "NullTokenizer", "--swiglu", "--disable-bias-linear"]
    command += ["--normalization", "RMSNorm", "--position-embedding-type", "rope"]
    command += ["--hidden-dropout", "0", "--attention-dropout", "0", "--lr", "1e-4"]
    command += ["--train-iters", str(_ITERATIONS), "--lr-decay-iters", str(_ITERATIONS)]
    command += ["--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "100"]
    # Workers of the data loader would take the cores that the ranks run on.
    command += ["--num-workers", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 3:
        return None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    plan = Plan.load(saved)
    run = max((cache / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    measured = read_measured(run, num_microbatches=plan.parallel.num_microbatches)
    assert measured is not None, "a run of this many steps always tells"
    return plan, measured


def compare(plan: Plan, first: Measured, second: Measured) -> dict[str, Any]:
    """Return one plan's relative errors, against the mean of its two runs."""
    assert plan.prediction is not None
    times = (first.iteration_time_s, second.iteration_time_s)
    memory = []
    for stage in plan.stages:
        peak = first.stages[stage.pipeline_rank].peak_bytes
        assert stage.prediction is not None and peak is not None
        memory.append(stage.prediction.peak_memory_bytes / peak - 1)
    return {
        "sizes": plan.parallel.label,
        "layers": [sum(chunk.num_layers for chunk in stage.chunks) for stage in plan.stages],
        "recompute": [stage.chunks[0].recompute.label for stage in plan.stages],
        "predicted_s": plan.prediction.iteration_time_s,
        "measured_s": statistics.mean(times),
        "time_error": plan.prediction.iteration_time_s / statistics.mean(times) - 1,
        "pair_spread": abs(times[0] - times[1]) / statistics.mean(times),
        "memory_errors": memory,
    }


def main() -> int:
    """Draw, train, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--plans", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    found: list[dict[str, Any]] = []
    infeasible = number = 0
    with tempfile.TemporaryDirectory(prefix="memx-cpu-plans-") as scratch:
        folder = Path(scratch)
        while len(found) < options.plans:
            job = draw(dice, number)
            number += 1
            # Four ranks on fewer cores are other devices than two: they are profiled apart.
            cache = folder / f"cache{job['ranks']}"
            runs = [trained(job, folder, cache) for _ in range(2)]
            if runs[0] is None or runs[1] is None:
                infeasible += 1
                continue
            found.append({"ranks": job["ranks"], **compare(runs[0][0], runs[0][1], runs[1][1])})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    result: dict[str, Any] = {"plans": found, "infeasible_draws": infeasible}
    for name, wanted in (("2 ranks", (2,)), ("4 ranks", (4,)), ("all", (2, 4))):
        rows = [row for row in found if row["ranks"] in wanted]
        if rows:
            times = [abs(row["time_error"]) for row in rows]
            memory = [abs(error) for row in rows for error in row["memory_errors"]]
            result[name] = {
                "plans": len(rows),
                "time_mape": statistics.mean(times),
                "time_median": statistics.median(times),
                "time_bias": statistics.mean(row["time_error"] for row in rows),
                "pair_spread": statistics.mean(row["pair_spread"] for row in rows),
                "memory_mape": statistics.mean(memory),
                "memory_worst": max(memory),
            }
    if options.json:
        print(json.dumps(result, indent=1))
        return 0
    print("predicted against measured on CPU ranks, each plan run twice [measured-cpu]")
    for name in ("2 ranks", "4 ranks", "all"):
        if name in result:
            r = result[name]
            print(
                f"  {name:8} {r['plans']:3} plans: time MAPE {r['time_mape']:.1%} (median "
                f"{r['time_median']:.1%}, bias {r['time_bias']:+.1%}; two runs of a plan differ by "
                f"{r['pair_spread']:.1%}), memory MAPE {r['memory_mape']:.2%}, worst "
                f"{r['memory_worst']:.2%}"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
