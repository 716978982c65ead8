"""MemX's own command-line options, declared once for the launcher, the ranks and the tests."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Any

from megatron_memx.errors import BadInputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option: its flag, the type of its value (None: a switch), choices and help."""

    flag: str
    type: type | None
    help: str
    choices: tuple[str, ...] = ()
    metavar: str | None = None

    @property
    def dest(self) -> str:
        """Attribute name in the parsed namespace."""
        return self.flag.lstrip("-").replace("-", "_")


OPTIONS: tuple[Option, ...] = (
    Option(
        flag="--auto-parallel",
        type=None,
        help="let MemX choose the parallel sizes, the layers of each stage and what it recomputes",
    ),
    Option(
        flag="--memx-cluster",
        type=str,
        metavar="FILE|auto",
        help="cluster.yaml that describes the nodes and devices; auto (default): what is found",
    ),
    Option(flag="--memx-alpha", type=float, help="weight of the iteration time in Phi"),
    Option(flag="--memx-beta", type=float, help="weight of the peak memory in Phi"),
    Option(flag="--memx-gamma", type=float, help="weight of the memory balance in Phi"),
    Option(
        flag="--memx-objective",
        type=str,
        choices=("default", "safety", "throughput", "auto"),
        help="named weights: default 0.4/0.2/0.4, safety 0.3/0.5/0.2, throughput 0.7/0.2/0.1",
    ),
    Option(
        flag="--memx-balance",
        type=str,
        choices=("utilisation", "absolute"),
        help="balance fractions of each device's memory (default) or bytes",
    ),
    Option(
        flag="--memx-memory-margin",
        type=float,
        help="fraction of each device's memory to keep free (default 0.05)",
    ),
    Option(flag="--memx-plan", type=str, metavar="FILE", help="run this plan instead of searching"),
    Option(flag="--memx-save-plan", type=str, metavar="FILE", help="also write the plan here"),
    Option(
        flag="--memx-cache-dir",
        type=str,
        metavar="DIR",
        help="folder of plans and profiles (default: $MEMX_CACHE_DIR or ~/.cache/megatron_memx)",
    ),
    Option(flag="--memx-replan", type=None, help="search again although the cache holds a plan"),
    Option(flag="--memx-dry-run", type=None, help="plan and show what would be run; start no rank"),
    Option(
        flag="--memx-profile",
        type=str,
        metavar="auto|never|FILE",
        help="auto (default): measure what is missing; never: use nothing measured; FILE: its "
        "profile rows, or its calibrations",
    ),
    Option(
        flag="--memx-platform",
        type=str,
        help="accelerator platform, e.g. cuda, rocm, npu or cpu (default: what is found)",
    ),
    Option(
        flag="--memx-allow-unknown-megatron",
        type=None,
        help="patch a Megatron release whose code MemX has not been tested against",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemXOptions:
    """Parsed values of :data:`OPTIONS`; None means that the user wrote nothing."""

    auto_parallel: bool = False
    memx_cluster: str | None = None
    memx_alpha: float | None = None
    memx_beta: float | None = None
    memx_gamma: float | None = None
    memx_objective: str | None = None
    memx_balance: str | None = None
    memx_memory_margin: float | None = None
    memx_plan: str | None = None
    memx_save_plan: str | None = None
    memx_cache_dir: str | None = None
    memx_replan: bool = False
    memx_dry_run: bool = False
    memx_profile: str | None = None
    memx_platform: str | None = None
    memx_allow_unknown_megatron: bool = False


def add_options(parser: Any) -> None:
    """Add every option to an argparse parser (Megatron's own, or ours) as one group."""
    group = parser.add_argument_group(title="MemX")
    for option in OPTIONS:
        if option.type is None:
            group.add_argument(option.flag, action="store_true", help=option.help)
        else:
            group.add_argument(
                option.flag,
                type=option.type,
                default=None,
                choices=option.choices or None,
                metavar=option.metavar,
                help=option.help,
            )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        flags = ", ".join(option.flag for option in OPTIONS)
        raise BadInputError(f"MemX options: {message}", fix=f"one of: {flags}")


def parse_options(arguments: list[str]) -> MemXOptions:
    """Pick MemX's options out of a script's arguments; everything else is left alone.

    Raises:
        BadInputError: An unknown ``--memx-`` option, a missing or wrong value.
    """
    known = {option.flag: option for option in OPTIONS}
    picked: list[str] = []
    index = 0
    while index < len(arguments):
        word = arguments[index]
        flag, _, _ = word.partition("=")
        option = known.get(flag)
        if option is None:
            if flag.startswith("--memx-"):
                _Parser().error(f"{flag} is not an option of MemX")
            index += 1
            continue
        takes_next = option.type is not None and "=" not in word
        picked.extend(arguments[index : index + 1 + takes_next])
        index += 1 + takes_next
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_options(parser)
    values = vars(parser.parse_args(picked))
    return MemXOptions(**{item.name: values[item.name] for item in fields(MemXOptions)})
