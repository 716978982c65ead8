"""Traced peak memory against what Megatron-LM's own tests measured on A100, H100 and GB200.

    python benchmarks/golden.py [--rows N] [--keep FOLDER] [--json]

Each row of `data/megatron_lm_golden_values.csv` tells its exact flags and the peak of
`max_memory_allocated` on the last pipeline rank. The same flags are traced without a device (rung
of proof: traced against published); workspaces that cuBLAS and Transformer Engine hold are added.
Rows whose kernels cannot be modelled are listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_memx.launch.trace_job import counted, run_traces, task_of

from megatron_memx.cluster import Cluster, Node
from megatron_memx.cluster_file import catalogue
from megatron_memx.errors import MemXError
from megatron_memx.evaluation.cases import device_kind
from megatron_memx.evaluation.runs import Run, read_runs
from megatron_memx.job import parse_job
from megatron_memx.legality import Facts
from megatron_memx.options import parse_options
from megatron_memx.planner import make_request
from megatron_memx.profile.traced import Traced
from megatron_memx.units import GIB, MIB
from megatron_memx.versions import installed, require_megatron

_DATA = Path(__file__).resolve().parent / "data" / "megatron_lm_golden_values.csv"
# What a source notes beside Megatron's flags.
_NOT_FLAGS = re.compile(
    r"^(ffn=|gpu_count|iter_|test_type|mem_allocated|identical_golden|NVTE_|step-batch-size)"
)
_UNMODELLED = {
    "8-bit parameters and products": lambda run: "fp8" in run.precision or "fp4" in run.precision,
    "Megatron-FSDP": lambda run: "fsdp" in run.zero.lower(),
    "Mamba layers": lambda run: "HYBRID" in run.notes,
    "latent attention's kernel": lambda run: "multi-latent-attention" in run.notes,
    "the fused cross entropy's kernel": lambda run: "cross-entropy-loss-fusion" in run.notes,
    "CUDA graphs' own pools": lambda run: "cuda-graph" in run.notes,
    "activations offloaded to the host": lambda run: "offloading" in run.notes,
    "number of GPUs not stated": lambda run: run.num_gpus is None,
    "not measured": lambda run: not run.peak_mem_gib,
    "checkpoints resumed in the measured process": lambda run: (
        "ckpt-resume" in run.notes or "resume" in run.row_ref
    ),
}


def words_of(run: Run) -> list[str]:
    """Return a row's Megatron arguments."""
    given: dict[str, object] = {
        "num-layers": run.layers,
        "hidden-size": run.hidden,
        "num-attention-heads": run.heads,
        "seq-length": run.seq,
        "micro-batch-size": run.mbs,
        "global-batch-size": run.gbs,
        "tensor-model-parallel-size": run.tp,
        "pipeline-model-parallel-size": run.pp,
        "context-parallel-size": run.cp or 1,
        "expert-model-parallel-size": run.ep or 1,
        "vocab-size": run.vocab or 50257,
        "tokenizer-type": "NullTokenizer",
        "train-iters": 50,
        "lr": 1e-4,
        run.precision.split("+")[0]: True,
        "sequence-parallel": run.seq_parallel,
        "use-distributed-optimizer": run.dist_opt,
    }
    if run.kv_heads and run.kv_heads != run.heads:
        given |= {"group-query-attention": True, "num-query-groups": run.kv_heads}
    if run.vpp:
        given["num-virtual-stages-per-pipeline-rank"] = run.vpp
    if run.moe_experts:
        given |= {"num-experts": run.moe_experts, "moe-router-topk": run.moe_topk or 2}
        # Not told, but asserted by Megatron: a router of one expert, and experts without biases
        # unless their tensor-parallel size is 1.
        given["moe-router-pre-softmax"] = run.moe_topk == 1
        given["disable-bias-linear"] = "expert-tensor-parallel-size=1" not in run.notes
    if run.ffn:
        given["ffn-hidden-size"] = run.ffn
    if run.flash.startswith("unfused"):
        given["attention-backend"] = "unfused"
    kind, _, rest = run.recompute.partition("/")
    if kind == "full":
        method, _, count = rest.partition("/")
        given |= {"recompute-granularity": "full", "recompute-method": method}
        given["recompute-num-layers"] = count
    elif kind.startswith("selective"):
        given["recompute-granularity"] = "selective"
        given["recompute-modules"] = re.findall(r"\[(.*?)\]", kind)[0].split()
    for note in run.notes.split("; "):
        name, _, value = note.partition("=")
        if re.fullmatch(r"[a-z0-9-]+", name) and not _NOT_FLAGS.match(note):
            given[name] = value or True
    found: list[str] = []
    for name, value in given.items():
        if value is True:
            found.append(f"--{name}")
        elif value not in (None, False, "", "none"):
            found += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return found


def workspaces_bytes(run: Run) -> int:
    """Return what libraries hold beside the job's tensors.

    cuBLAS has a workspace for the forward and one for the backward pass's thread: 32 MiB each
    under ``CUBLAS_WORKSPACE_CONFIG=:4096:8``, which deterministic runs set, and by default from
    Hopper on, else 8.125 MiB. Transformer Engine holds 32 MiB from Hopper on, 4 MiB before.
    """
    hopper = "A100" not in run.gpu
    cublas = 32.0 if hopper or "deterministic" in run.notes else 8.125
    engine = (32 if hopper else 4) if "transformer-impl=local" not in run.notes else 0
    return int((2 * cublas + engine) * MIB)


def main() -> int:
    """Trace, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rows", type=int, help="only the first N that can be modelled")
    parser.add_argument("--keep", help="folder that keeps the traces for the next time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    release = require_megatron()
    versions = {"megatron_core": release, "torch": installed("torch") or ""}
    facts = Facts(megatron=release, transformer_engine=True, fused_norms=True)
    left_out: Counter[str] = Counter()
    runs, tasks = [], []
    found, skipped = read_runs(_DATA)
    left_out.update(skipped)
    for run in found:
        reason = next((name for name, applies in _UNMODELLED.items() if applies(run)), None)
        if reason is None:
            try:
                tasks.append(_task(run, facts, versions))
                runs.append(run)
            except MemXError as error:
                reason = error.message.splitlines()[0]
        if reason is not None:
            left_out[reason] += 1
        if options.rows and len(runs) == options.rows:
            break
    with tempfile.TemporaryDirectory() as scratch:
        traces = run_traces(
            tasks,
            folder=Path(options.keep or scratch),
            versions=versions,
            processes=os.cpu_count() or 1,
            progress=lambda done, total: print(f"\r{done}/{total}", end="", file=sys.stderr),
        )
    rows: list[dict[str, Any]] = []
    for run, traced in zip(runs, traces, strict=True):
        if not isinstance(traced, Traced):
            left_out[traced.message[-160:]] += 1
            continue
        said = (traced.peak_bytes + workspaces_bytes(run)) / GIB
        measured = run.peak_mem_gib or 0.0
        rows.append({"test": run.row_ref, "gpu": run.gpu, "measured_gib": measured})
        rows[-1] |= {"traced_gib": said, "error": said / measured - 1}
    if options.json:
        print(json.dumps({"versions": versions, "rows": rows, "left_out": left_out}, indent=1))
        return 0
    _show(rows, left_out, release)
    return 0


def _task(run: Run, facts: Facts, versions: dict[str, str]) -> dict[str, Any]:
    words = words_of(run)
    kind = device_kind(run.gpu)
    count = run.num_gpus or 1
    each = min(run.gpus_per_node or 8, count)
    nodes = tuple(
        Node(name=f"node{i}", device_kind=kind, num_devices=each) for i in range(count // each)
    )
    cluster = Cluster(name="ci", nodes=nodes, kinds={kind: catalogue()[kind]})
    request = make_request(
        *(parse_job(words), cluster, parse_options([])), facts=facts, versions=versions
    )
    chosen, stages = counted(request)
    return task_of(request.job, words, chosen.outer.sizes, len(stages) - 1)


def _show(rows: list[dict[str, Any]], left_out: Counter[str], release: str) -> None:
    errors = [abs(row["error"]) for row in rows]
    print(f"\ntraced (megatron-core {release}) against measured by Megatron-LM's own tests:")
    if errors:
        within = sum(error <= 0.02 for error in errors) / len(errors)
        print(
            f"  {len(errors)} rows: median {statistics.median(errors):.2%}, "
            f"mean {statistics.mean(errors):.2%}, within 2 % {within:.0%}"
        )
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:10]:
        print(
            f"  {row['error']:+.1%}: {row['traced_gib']:.3f} against {row['measured_gib']:.3f} GiB,"
            f" {row['gpu']}, {row['test']}"
        )
    for reason, count in left_out.most_common():
        print(f"  left out {count}: {reason}")


if __name__ == "__main__":
    raise SystemExit(main())
