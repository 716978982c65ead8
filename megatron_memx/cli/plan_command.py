"""``memx plan``: plan without launching, for a cluster that need not be here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from megatron_memx.cli.parsing import CommandParser, print_json
from megatron_memx.errors import BadInputError


def run(arguments: Sequence[str]) -> int:
    """Run ``memx plan`` and return its exit code.

    Raises:
        BadInputError: No ``--`` before Megatron's arguments, or arguments that cannot be read.
        InfeasibleError: Nothing fits.
    """
    from megatron_memx.cache.store import default_cache_dir
    from megatron_memx.cluster_file import load_cluster
    from megatron_memx.job import parse_job
    from megatron_memx.options import parse_options
    from megatron_memx.pins import user_facts
    from megatron_memx.planner import make_plan, make_request
    from megatron_memx.platforms import default_words
    from megatron_memx.profile.store import ProfileStore, layer_signature
    from megatron_memx.versions import installed, megatron_version

    words = list(arguments)
    before, after = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    parser = CommandParser(
        "plan",
        "Plan without launching. Megatron's and MemX's arguments follow --.",
        "memx plan --cluster cluster.yaml -- --num-layers 32 --hidden-size 4096 ...",
    )
    parser.add_argument("--cluster", required=True, help="cluster.yaml")
    parser.add_argument("--save", help="write plan.json here")
    parser.add_argument(
        "--megatron", help="release of megatron-core to plan for (default: the installed one)"
    )
    parser.add_argument(
        "--transformer-engine",
        choices=("yes", "no"),
        default="yes",
        help="whether the cluster has Transformer Engine (yes)",
    )
    parser.add_argument("--cache-dir", help="cache folder with profiles")
    options = parser.parse_args(before)
    if not after:
        raise BadInputError(
            "memx plan needs Megatron's arguments behind --",
            fix="memx plan --cluster cluster.yaml -- --num-layers 32 --hidden-size 4096 ...",
        )
    started = perf_counter()
    cluster = load_cluster(options.cluster)
    memx = parse_options(after)
    platform = cluster.kind_of(0).platform
    job = parse_job([*after, *default_words(platform, after)])
    release = options.megatron or megatron_version() or "0.19.2"
    engine = options.transformer_engine == "yes"
    facts = replace(
        user_facts(megatron=release, transformer_impl=job.model.transformer_impl),
        transformer_engine=engine,
        fused_norms=engine,
    )
    versions = {"megatron_core": release, "torch": installed("torch") or "not installed"}
    request = make_request(job, cluster, memx, facts=facts, versions=versions)
    store = ProfileStore(default_cache_dir(options.cache_dir or memx.memx_cache_dir))
    layer = layer_signature(job, megatron=release)
    rows = {}
    for kind in cluster.used_kinds:
        rows[kind], warnings = store.read(kind, layer)
        for warning in warnings:
            parser.warn(warning)
    plan = make_plan(request, rows)
    took_s = perf_counter() - started
    target = options.save or memx.memx_save_plan
    if target:
        plan.save(target)
    if options.json:
        print_json(plan.to_dict())
        return 0
    from megatron_memx.report.terminal import make_console, show_plan

    show_plan(plan, reused=False, took_s=took_s, console=make_console())
    return 0
