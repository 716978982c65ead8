"""Peak memory as the planner counts it against traces of the real model, on random shapes.

    python benchmarks/memory.py [--shapes 200] [--seed 0] [--json] [--keep FOLDER]

Each shape is a model, parallel sizes and a recomputation policy drawn at random, and one of its
pipeline stages: dense, grouped-query, SwiGLU or a mixture of experts, tied or not. The trace runs
Megatron's own model, schedule and optimizer under fake tensors (rung of proof: traced). No GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron_memx.launch.trace_job import counted, run_traces, task_of

from megatron_memx.cluster import Cluster, Node
from megatron_memx.cluster_file import catalogue
from megatron_memx.errors import MemXError
from megatron_memx.job import parse_job
from megatron_memx.legality import Facts
from megatron_memx.options import parse_options
from megatron_memx.planner import make_request
from megatron_memx.profile.traced import Traced
from megatron_memx.versions import installed, require_megatron

_GPU = "h100-80gb"


def draw(dice: random.Random) -> tuple[list[str], int]:
    """Return the words of a random run and its number of devices."""
    tp, pp = dice.choice((1, 2, 4, 8)), dice.choice((1, 2, 4, 8))
    vpp = dice.choice((1, 1, 2)) if pp > 1 else 1
    each = dice.choice((1, 2, 3))
    head, heads = dice.choice((64, 128)), dice.choice((16, 32, 64))
    seq = dice.choice((1024, 2048, 4096, 8192, 16384, 32768))
    most = max(1, 32768 // seq)
    mbs = dice.choice([size for size in (1, 2, 4, 8) if size <= most])
    experts = dice.choice((0, 0, 0, 8))
    dp = dice.choice((2, 4) if experts else (1, 2, 4))
    words = {
        "num-layers": each * pp * vpp,
        "hidden-size": head * heads,
        "num-attention-heads": heads,
        "ffn-hidden-size": dice.choice((4 * head * heads, 8 * head * heads // 3 // 256 * 256)),
        "seq-length": seq,
        "max-position-embeddings": seq,
        "vocab-size": dice.choice((32000, 50257, 128256)),
        "tokenizer-type": "NullTokenizer",
        "micro-batch-size": mbs,
        "global-batch-size": mbs * dp * pp * dice.choice((1, 2, 4)),
        "tensor-model-parallel-size": tp,
        "pipeline-model-parallel-size": pp,
        "train-iters": 10,
        "lr": 1e-4,
        "bf16": True,
        "sequence-parallel": tp > 1 and (bool(experts) or dice.random() < 0.7),
        "use-distributed-optimizer": dice.random() < 0.5,
        "untie-embeddings-and-output-weights": dice.random() < 0.5,
        "position-embedding-type": dice.choice(("rope", "learned_absolute")),
    }
    if dice.random() < 0.6:
        words |= {"swiglu": True, "disable-bias-linear": True, "normalization": "RMSNorm"}
    if dice.random() < 0.5:
        words |= {"group-query-attention": True, "num-query-groups": 8}
    if vpp > 1:
        words["num-layers-per-virtual-pipeline-stage"] = each
    if experts:
        ep = dice.choice((1, 2))
        words |= {"num-experts": experts, "moe-router-topk": 2, "moe-grouped-gemm": True}
        words |= {"expert-model-parallel-size": ep, "disable-bias-linear": True}
        words |= {"moe-token-dispatcher-type": "alltoall"}
    kind = dice.choice(("none", "none", "selective", "block", "uniform"))
    if kind == "selective":
        words["recompute-granularity"] = kind
    elif kind != "none":
        words |= {"recompute-granularity": "full", "recompute-method": kind}
        words["recompute-num-layers"] = dice.randint(1, each)
    found: list[str] = []
    for name, value in words.items():
        if value is not False:
            found += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return found, tp * pp * dp


def main() -> int:
    """Trace, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", help="folder that keeps the traces for the next time")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    release = require_megatron()
    versions = {"megatron_core": release, "torch": installed("torch") or ""}
    facts = Facts(megatron=release, transformer_engine=True, fused_norms=True)
    shapes: list[dict[str, Any]] = []
    tasks = []
    illegal = 0
    while len(tasks) < options.shapes:
        words, world = draw(dice)
        node = Node(name="node", device_kind=_GPU, num_devices=world)
        cluster = Cluster(name="random", nodes=(node,), kinds={_GPU: catalogue()[_GPU]})
        try:
            request = make_request(
                *(parse_job(words), cluster, parse_options([])), facts=facts, versions=versions
            )
            chosen, stages = counted(request)
        except MemXError:
            illegal += 1
            continue
        rank = dice.randrange(len(stages))
        shapes.append({"words": " ".join(words), "rank": rank, "moe": "--num-experts" in words})
        shapes[-1]["counted_bytes"] = stages[rank].memory.peak_bytes
        tasks.append(task_of(request.job, words, chosen.outer.sizes, rank))
    with tempfile.TemporaryDirectory() as scratch:
        traces = run_traces(
            tasks,
            folder=Path(options.keep or scratch),
            versions=versions,
            processes=os.cpu_count() or 1,
            progress=lambda done, total: print(f"\r{done}/{total}", end="", file=sys.stderr),
        )
    refused = []
    for shape, traced in zip(shapes, traces, strict=True):
        if isinstance(traced, Traced):
            shape["traced_bytes"] = traced.peak_bytes
            shape["error"] = shape["counted_bytes"] / traced.peak_bytes - 1
        else:
            refused.append(traced.message)
    result: dict[str, Any] = {"versions": versions, "illegal_draws": illegal, "refused": refused}
    for name, wanted in (("dense", (False,)), ("moe", (True,)), ("all", (False, True))):
        errors = [abs(s["error"]) for s in shapes if "error" in s and s["moe"] in wanted]
        if errors:
            result[name] = {
                "shapes": len(errors),
                "mape": statistics.mean(errors),
                "median": statistics.median(errors),
                "worst": max(errors),
            }
    known = [shape for shape in shapes if "error" in shape]
    result["furthest"] = sorted(known, key=lambda s: -abs(s["error"]))[:5]
    if options.json:
        print(json.dumps(result, indent=1))
        return 0
    print(f"\ncounted against traced peak memory, megatron-core {release}, seed {options.seed}")
    for name in ("dense", "moe", "all"):
        if name in result:
            r = result[name]
            print(
                f"  {name:5} {r['shapes']:4} shapes: MAPE {r['mape']:.2%}, "
                f"median {r['median']:.2%}, worst {r['worst']:.2%}"
            )
    for shape in result["furthest"]:
        print(f"  {shape['error']:+.2%} stage {shape['rank']} of {shape['words']}")
    for message in sorted(set(refused)):
        print(f"  refused by Megatron: {message}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
