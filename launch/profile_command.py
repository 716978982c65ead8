"""``memx profile``: measure this cluster's devices, trace memory, or carry profiles elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_memx.cli.parsing import CommandParser, print_json
from megatron_memx.cli.reading import add_facts, read_job, split_words
from megatron_memx.errors import BadInputError

_EXAMPLE = "memx profile --nproc-per-node 8 -- --num-layers 32 --hidden-size 4096 ..."
_TRACE_EXAMPLE = (
    "memx profile --trace --cluster cluster.yaml -- --pipeline-model-parallel-size 4 "
    "--num-layers 32 ..."
)


def run(arguments: Sequence[str]) -> int:
    """Run ``memx profile`` and return its exit code.

    Raises:
        BadInputError: Arguments that cannot be read, or that Megatron refuses; a profile of
            another device kind.
        LegalityError: A configuration that Megatron would refuse.
    """
    parser = CommandParser(
        "profile",
        "Measure the layers of a model on this node's devices: the few short runs that a plan "
        "rests on, kept for later jobs. With --trace: run the real model, schedule and optimizer "
        "of every pipeline stage under fake tensors and count every byte, without a device. With "
        "--export and --import: carry what was measured to another machine.",
        _EXAMPLE,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--trace", action="store_true", help="trace memory instead of measuring")
    what.add_argument("--export", metavar="FILE", help="write the measured rows to FILE")
    what.add_argument("--import", dest="take", metavar="FILE", help="take over the rows of FILE")
    parser.add_argument("--cluster", help="cluster.yaml (--trace)")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="processes to trace in (one for each core)"
    )
    parser.add_argument("--nproc-per-node", default="auto", help="ranks to measure on (auto)")
    parser.add_argument("--platform", help="accelerator platform, e.g. cpu (what is found)")
    parser.add_argument("--device", metavar="KIND", help="device kind to export or import")
    add_facts(parser)
    words = list(arguments)
    before = words[: words.index("--")] if "--" in words else words
    options = parser.parse_args(before)
    if options.export or options.take:
        return _carry(options)
    example = _TRACE_EXAMPLE if options.trace else _EXAMPLE
    _, after = split_words(words, "profile", example)
    return _trace(options, after, parser) if options.trace else _measure(options, after)


def _trace(options: Any, words: Sequence[str], parser: CommandParser) -> int:
    from megatron_memx.launch.trace_report import show_trace, trace

    from megatron_memx.cache.store import default_cache_dir
    from megatron_memx.cluster_file import load_cluster

    if not options.cluster:
        raise BadInputError(
            "--trace needs the cluster that the configuration is for",
            fix=_TRACE_EXAMPLE,
            flag="--cluster",
        )
    processes = options.processes if options.processes is not None else os.cpu_count() or 1
    if processes < 1:
        raise BadInputError(
            f"--processes {processes}: must be 1 or more", fix="1", flag="--processes"
        )
    read = read_job(words, load_cluster(options.cluster), options, parser)
    folder = default_cache_dir(options.cache_dir or read.options.memx_cache_dir) / "traces"
    result = trace(read, words, folder=folder, processes=processes)
    if options.json:
        print_json(result)
    else:
        show_trace(result)
    return 0


def _measure(options: Any, words: Sequence[str]) -> int:
    """Measure what is missing for a job on this node, and say what is known now."""
    from megatron_memx.launch.discover import local_cluster, require_here
    from megatron_memx.launch.prelaunch import known_rows, ranks_of, request_of
    from megatron_memx.launch.profile_job import profile_missing
    from megatron_memx.launch.torchrun_options import split

    from megatron_memx.cache.store import default_cache_dir
    from megatron_memx.job import parse_job
    from megatron_memx.options import parse_options
    from megatron_memx.platforms import default_words
    from megatron_memx.profile.store import ProfileStore, layer_signature

    memx = parse_options(list(words))
    count = ranks_of(options.nproc_per_node, options.platform)
    cluster, notes = local_cluster(platform=options.platform, num_nodes=1, nproc=count)
    platform = cluster.kind_of(0).platform
    require_here(platform)
    job = parse_job([*words, *default_words(platform, words)])
    launched = split(["--nproc-per-node", str(cluster.num_devices), "--", "profile", *words])
    request = request_of(launched, memx, job, cluster)
    store = ProfileStore(default_cache_dir(options.cache_dir or memx.memx_cache_dir))
    layer = layer_signature(job, megatron=request.facts.megatron)
    profile_missing(request, launched, store, layer, known_rows(request, store, layer, notes))
    rows = known_rows(request, store, layer, notes)
    for note in notes:
        print(f"memx profile: {note}", file=sys.stderr)
    devices = {
        kind: {
            "rows": len(found),
            "ok": sum(row.status == "ok" for row in found),
            "file": str(store.path_of(kind, layer)),
        }
        for kind, found in rows.items()
    }
    if options.json:
        print_json({"layer_signature": layer, "devices": devices})
        return 0
    for kind, said in devices.items():
        print(f"{kind}: {said['rows']} measured rows, {said['ok']} of them good, in {said['file']}")
    return 0


def _carry(options: Any) -> int:
    """Export or import rows."""
    from megatron_memx.cache.store import default_cache_dir
    from megatron_memx.profile.store import ProfileStore, export_rows, import_rows

    store = ProfileStore(default_cache_dir(options.cache_dir))
    if options.export:
        count, kinds = export_rows(store, options.export, options.device)
        done = f"{options.export}: {count} rows of {', '.join(kinds)}"
    else:
        if not options.device:
            raise BadInputError(
                "--import needs the device kind that the rows are for",
                fix="--device KIND, as memx cluster names it",
                flag="--device",
            )
        count, kinds = import_rows(store, options.take, options.device)
        done = f"{count} rows of {options.device} taken over from {Path(options.take).name}"
    if options.json:
        print_json({"rows": count, "devices": kinds})
    else:
        print(done)
    return 0
