"""What commands about one job share: ``-- <Megatron arguments>`` for a described cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_memx.cli.parsing import CommandParser
from megatron_memx.errors import BadInputError
from megatron_memx.options import MemXOptions, parse_options

if TYPE_CHECKING:
    from megatron_memx.cluster import Cluster
    from megatron_memx.planner import Request
    from megatron_memx.profile.store import ProfileRow


@dataclass(frozen=True, kw_only=True)
class Read:
    """A job on a cluster as its words say, and what was measured for it."""

    request: Request
    options: MemXOptions
    rows: Mapping[str, Sequence[ProfileRow]]


def split_words(arguments: Sequence[str], name: str, example: str) -> tuple[list[str], list[str]]:
    """Return the words before ``--`` and those behind it.

    Raises:
        BadInputError: Nothing stands behind it, and no help is asked for.
    """
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    before, after = words[:cut], words[cut + 1 :]
    if not after and not {"-h", "--help"} & set(before):
        raise BadInputError(f"memx {name} needs Megatron's arguments behind --", fix=example)
    return before, after


def add_facts(parser: CommandParser) -> None:
    """Add the options that say what the cluster has installed."""
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
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="terms of device kinds that memx evaluate --save wrote, for kinds without profiles",
    )


def read_job(words: Sequence[str], cluster: Cluster, options: Any, parser: CommandParser) -> Read:
    """Return the request that ``words`` make on ``cluster``.

    Raises:
        BadInputError: Arguments that cannot be read.
        LegalityError: Pins that cannot be kept.
    """
    from megatron_memx.cache.store import default_cache_dir
    from megatron_memx.cost.calibration import read_calibrations
    from megatron_memx.job import parse_job
    from megatron_memx.pins import user_facts
    from megatron_memx.planner import make_request
    from megatron_memx.platforms import default_words
    from megatron_memx.profile.store import ProfileStore, layer_signature
    from megatron_memx.versions import installed, megatron_version

    memx = parse_options(list(words))
    job = parse_job([*words, *default_words(cluster.kind_of(0).platform, words)])
    release = options.megatron or megatron_version() or "0.19.2"
    engine = options.transformer_engine == "yes"
    facts = replace(
        user_facts(megatron=release, transformer_impl=job.model.transformer_impl),
        transformer_engine=engine,
        fused_norms=engine,
    )
    versions = {"megatron_core": release, "torch": installed("torch") or "not installed"}
    calibrations = (
        read_calibrations(options.calibration, cluster.used_kinds) if options.calibration else {}
    )
    request = make_request(
        job, cluster, memx, facts=facts, versions=versions, calibrations=calibrations
    )
    store = ProfileStore(default_cache_dir(options.cache_dir or memx.memx_cache_dir))
    layer = layer_signature(job, megatron=release)
    rows = {}
    for kind in cluster.used_kinds:
        rows[kind], warnings = store.read(kind, layer)
        for warning in warnings:
            parser.warn(warning)
    return Read(request=request, options=memx, rows=rows)
