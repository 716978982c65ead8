"""``memx export``: a plan in the words of other tools."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from megatron_memx.cli.parsing import CommandParser, print_json
from megatron_memx.errors import BadInputError
from megatron_memx.plan import Plan


def run(arguments: Sequence[str]) -> int:
    """Run ``memx export`` and return its exit code.

    Raises:
        BadInputError: The plan recomputes differently on different chunks, which stock
            Megatron arguments cannot say.
    """
    from megatron_memx.megatron_args import overrides_to_argv, plan_overrides

    parser = CommandParser(
        "export",
        "Write a plan as stock Megatron arguments, to run it without MemX.",
        "memx export plan.json --to megatron-args",
    )
    parser.add_argument("plan", help="plan.json, as --memx-save-plan writes it")
    parser.add_argument("--to", choices=("megatron-args",), default="megatron-args")
    options = parser.parse_args(list(arguments))
    plan = Plan.load(options.plan)
    policies = {chunk.recompute for stage in plan.stages for chunk in stage.chunks}
    if len(policies) > 1:
        names = ", ".join(sorted(policy.label for policy in policies))
        raise BadInputError(
            f"{options.plan}: its chunks recompute differently ({names}); stock Megatron has one "
            "setting for all",
            fix=f"memx-torchrun ... --memx-plan {options.plan}",
        )
    policy = next(iter(policies))
    overrides = dict(plan_overrides(plan))
    if policy.granularity != "none":
        overrides["recompute_granularity"] = policy.granularity
        overrides["recompute_method"] = policy.method
        overrides["recompute_num_layers"] = policy.num_layers
        overrides["recompute_modules"] = list(policy.modules) or None
    words = overrides_to_argv(overrides)
    if options.json:
        print_json({"argv": words, "rank_order": list(plan.rank_order)})
    else:
        print(shlex.join(words))
        if list(plan.rank_order) != sorted(plan.rank_order):
            order = ",".join(map(str, plan.rank_order))
            parser.warn(f"the plan also needs launcher ranks in the order {order}")
    return 0
