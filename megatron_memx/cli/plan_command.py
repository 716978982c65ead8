"""``memx plan``: plan without launching, for a cluster that need not be here."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from megatron_memx.cli.parsing import CommandParser, print_json
from megatron_memx.cli.reading import add_facts, read_job, split_words

_EXAMPLE = "memx plan --cluster cluster.yaml -- --num-layers 32 --hidden-size 4096 ..."


def run(arguments: Sequence[str]) -> int:
    """Run ``memx plan`` and return its exit code.

    Raises:
        BadInputError: No ``--`` before Megatron's arguments, or arguments that cannot be read.
        InfeasibleError: Nothing fits.
    """
    from megatron_memx.cluster_file import load_cluster
    from megatron_memx.planner import make_plan

    before, after = split_words(arguments, "plan", _EXAMPLE)
    parser = CommandParser(
        "plan",
        "Plan without launching. Megatron's and MemX's arguments follow --.",
        _EXAMPLE,
    )
    parser.add_argument("--cluster", required=True, help="cluster.yaml")
    parser.add_argument("--save", help="write plan.json here")
    add_facts(parser)
    options = parser.parse_args(before)
    started = perf_counter()
    read = read_job(after, load_cluster(options.cluster), options, parser)
    plan = make_plan(read.request, read.rows)
    took_s = perf_counter() - started
    target = options.save or read.options.memx_save_plan
    if target:
        plan.save(target)
    if options.json:
        print_json(plan.to_dict())
        return 0
    from megatron_memx.report.terminal import make_console, show_plan

    show_plan(plan, reused=False, took_s=took_s, console=make_console())
    return 0
