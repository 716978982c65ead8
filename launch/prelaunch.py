"""The step before the ranks: discover, look up, profile what is missing, search, show, save."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_memx.launch.discover import local_cluster, require_here
from megatron_memx.launch.torchrun_options import Invocation

from megatron_memx.cache.store import PlanCache, default_cache_dir
from megatron_memx.cluster import Cluster
from megatron_memx.cluster_file import load_cluster
from megatron_memx.conflicts import refuse_conflicts
from megatron_memx.cost.calibration import is_calibration, read_calibrations
from megatron_memx.errors import BadInputError
from megatron_memx.job import Job, parse_job
from megatron_memx.options import MemXOptions
from megatron_memx.pins import user_facts
from megatron_memx.plan import Plan
from megatron_memx.planner import Request, check_plan_fits, make_plan, make_request
from megatron_memx.platforms import default_words, get, prepare_environment
from megatron_memx.profile.store import (
    CONTENDED,
    ProfileRow,
    ProfileStore,
    layer_signature,
    read_rows,
)
from megatron_memx.versions import installed, require_megatron

_KEPT_RUNS = 20
Rows = dict[str, list[ProfileRow]]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the ranks are started with."""

    plan: Plan | None
    job: Job | None
    platform: str | None
    run_dir: Path
    reused: bool = False
    took_s: float = 0.0
    notes: tuple[str, ...] = field(default_factory=tuple)


def prepare(invocation: Invocation, options: MemXOptions, *, started_s: float) -> Prepared:
    """Return the plan to launch, and where the run keeps its files.

    Raises:
        MemXError: Bad input, or nothing fits; nothing has been started then.
    """
    cache_dir = default_cache_dir(options.memx_cache_dir)
    if not options.auto_parallel and options.memx_plan is None:
        return Prepared(
            plan=None,
            job=None,
            platform=checked_platform(options.memx_platform),
            run_dir=new_run_dir(cache_dir),
        )
    if invocation.on("no_python"):
        raise BadInputError(
            "--no-python starts a program that MemX cannot reach into",
            fix="leave it out and give the Python script",
            flag="--no-python",
        )
    checked_platform(options.memx_platform)
    cluster, notes = find_cluster(invocation, options)
    platform = platform_of(cluster, options)
    if not options.memx_dry_run:
        require_here(platform)
    words = list(invocation.arguments)
    job = parse_job([*words, *default_words(platform, words)])
    if options.memx_plan is not None:
        plan = Plan.load(options.memx_plan)
        check_plan_fits(plan, world_size=cluster.num_devices, job=job)
        reused, took_s = True, time.perf_counter() - started_s
    else:
        request = request_of(invocation, options, job, cluster)
        notes += [*job.notes, *request.pins.warnings]
        plan, reused = find_plan(request, invocation, cache_dir, notes)
        took_s = time.perf_counter() - started_s
    refuse_conflicts(plan, invocation.arguments)
    return Prepared(
        plan=plan,
        job=job,
        platform=platform,
        run_dir=new_run_dir(cache_dir),
        reused=reused,
        took_s=took_s,
        notes=tuple(notes),
    )


def find_cluster(invocation: Invocation, options: MemXOptions) -> tuple[Cluster, list[str]]:
    """Return the cluster of the launch, from its file or from what this node has.

    Raises:
        BadInputError: The file's devices and the launched ranks differ in number.
    """
    nodes = invocation.num_nodes
    nproc = ranks_of(str(invocation.value("nproc_per_node")), options.memx_platform)
    if options.memx_cluster in (None, "auto"):
        return local_cluster(platform=options.memx_platform, num_nodes=nodes, nproc=nproc)
    cluster = load_cluster(str(options.memx_cluster))
    each = nproc or 1
    if cluster.num_devices != nodes * each:
        raise BadInputError(
            f"{options.memx_cluster} describes {cluster.num_devices} devices on "
            f"{len(cluster.nodes)} node(s), the launcher starts {nodes} node(s) x {each} = "
            f"{nodes * each} ranks",
            fix="as many ranks as devices: --nnodes and --nproc-per-node, or the cluster file",
            flag="--nproc-per-node",
        )
    return cluster, []


def ranks_of(text: str, platform: str | None) -> int | None:
    """Return ranks a node; None: as many as there are devices.

    Raises:
        BadInputError: Neither a number nor a word that torchrun knows.
    """
    if text.isdigit() and int(text) > 0:
        return int(text)
    if text == "cpu" or (text == "auto" and platform == "cpu"):
        return os.cpu_count() or 1
    if text in ("auto", "gpu", "xpu", "mps"):
        return None
    raise BadInputError(
        f"--nproc-per-node {text!r} is not a number of ranks",
        fix="1, or auto",
        flag="--nproc-per-node",
    )


def checked_platform(name: str | None) -> str | None:
    """Return a platform's name after checking that there is such a platform.

    Raises:
        BadInputError: There is none.
    """
    return get(name).name if name is not None else None


def platform_of(cluster: Cluster, options: MemXOptions) -> str:
    """Return the platform that this node's ranks run on.

    Raises:
        BadInputError: ``--memx-platform`` contradicts the cluster file.
    """
    asked = checked_platform(options.memx_platform)
    found = {cluster.kinds[kind].platform for kind in cluster.used_kinds}
    if asked is None:
        return cluster.kind_of(0).platform
    if asked not in found:
        raise BadInputError(
            f"--memx-platform {asked}, but the cluster's devices are of {', '.join(sorted(found))}",
            fix=" or ".join(sorted(found)),
            flag="--memx-platform",
        )
    return asked


def script_folders(invocation: Invocation) -> list[str]:
    """Return the folders that Python searches before its path for this script's imports."""
    if invocation.script is None:
        return []
    if invocation.on("module"):
        return [os.getcwd()]
    return [str(Path(invocation.script).resolve().parent)]


def request_of(invocation: Invocation, options: MemXOptions, job: Job, cluster: Cluster) -> Request:
    """Return the planning request of a launch, for the Megatron that its script imports."""
    megatron = require_megatron(script_folders(invocation))
    impl = job.model.transformer_impl
    source = options.memx_profile
    calibrations = {}
    if source and is_calibration(source):
        calibrations = read_calibrations(source, cluster.used_kinds)
    return make_request(
        job,
        cluster,
        options,
        facts=user_facts(megatron=megatron, transformer_impl=impl),
        versions={
            "megatron_core": megatron,
            "torch": installed("torch") or "not installed",
            "megatron_memx": installed("megatron-memx") or "checkout",
        },
        calibrations=calibrations,
    )


def find_plan(
    request: Request, invocation: Invocation, cache_dir: Path, notes: list[str]
) -> tuple[Plan, bool]:
    """Return the plan and whether it came from the cache; profile and search on a miss."""
    options = request.options
    cache = PlanCache(cache_dir)
    store = ProfileStore(cache_dir)
    layer = layer_signature(request.job, megatron=request.facts.megatron)
    rows = known_rows(request, store, layer, notes)
    if not options.memx_replan:
        found = cache.lookup(request.fields(rows))
        notes += found.warnings
        if found.plan is not None:
            return found.plan, True
        if found.nearest is not None:
            differing = "; ".join(
                f"{name} is {_short(given)}, was {_short(stored)}"
                for name, given, stored in found.why_miss[:3]
            )
            notes.append(f"no cached plan; the nearest ({found.nearest[:12]}) differs: {differing}")
    if options.memx_profile in (None, "auto"):
        if options.memx_dry_run:
            notes.append("dry run: nothing is measured, so that a real run may plan differently")
        else:
            from megatron_memx.launch.profile_job import profile_missing

            profile_missing(request, invocation, store, layer, rows)
            rows = known_rows(request, store, layer, notes)
    disturbed = sum(row.status == CONTENDED for each in rows.values() for row in each)
    if disturbed:
        notes.append(
            f"{disturbed} measured run(s) were disturbed by other load; times are less certain. "
            "They are measured again when you plan again (--memx-replan)"
        )
    plan = make_plan(request, rows)
    cache.put(request.fields(rows), plan)
    return plan, False


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def known_rows(request: Request, store: ProfileStore, layer: str, notes: list[str]) -> Rows:
    """Return the rows that the plan may rest on: of the store, or of ``--memx-profile FILE``."""
    source = request.options.memx_profile
    rows: Rows = {}
    for kind in request.cluster.used_kinds:
        if request.calibrations:
            rows[kind] = []
            continue
        if source not in (None, "auto", "never"):
            if not Path(str(source)).is_file():
                raise BadInputError(
                    f"--memx-profile {source}: there is no such file",
                    fix="auto, never, or a file of profile rows or calibrations",
                    flag="--memx-profile",
                )
            rows[kind], warnings = read_rows(str(source), kind=kind, layer=layer)
            if not rows[kind]:
                raise BadInputError(
                    f"--memx-profile {source}: it has no row for {kind} and this model's layers",
                    fix="auto",
                    flag="--memx-profile",
                )
        elif source == "never":
            rows[kind], warnings = [], []
        else:
            rows[kind], warnings = store.read(kind, layer)
        notes += [warning for warning in warnings if warning not in notes]
    return rows


def new_run_dir(cache_dir: Path) -> Path:
    """Make and return a fresh folder for one run's files; old ones beyond twenty are removed.

    Raises:
        BadInputError: The cache folder cannot be written.
    """
    base = cache_dir / "runs"
    try:
        base.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=base))
    except OSError as error:
        raise BadInputError(
            f"cache folder {cache_dir} cannot be written: {error.strerror}",
            fix="a folder that you may write to, with room",
            flag="--memx-cache-dir",
        ) from error
    for old in sorted(base.iterdir())[:-_KEPT_RUNS]:
        _remove_run(old)
    return made


def _remove_run(folder: Path) -> None:
    try:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    except OSError:
        return  # another job removes it, or somebody keeps files there


def rank_environment(prepared: Prepared, options: MemXOptions) -> dict[str, str]:
    """Return the environment of the ranks: this one's, the plan's file and the platform's needs."""
    from megatron_memx.launch import rank

    environment = dict(os.environ)
    environment[rank.RUN_DIR] = str(prepared.run_dir)
    if prepared.plan is not None:
        file = prepared.run_dir / "plan.json"
        prepared.plan.save(file)
        environment[rank.PLAN] = str(file)
    if prepared.platform is not None:
        environment[rank.PLATFORM] = prepared.platform
        prepare_environment(prepared.platform, environment)
    if options.memx_allow_unknown_megatron:
        environment[rank.ALLOW_UNKNOWN] = "1"
    add_package_path(environment)
    return environment


def add_package_path(environment: dict[str, str]) -> None:
    """Let the children import this very package, wherever it runs from (a checkout too)."""
    import megatron_memx

    here = str(Path(str(megatron_memx.__file__)).resolve().parent.parent)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if here not in paths and here not in sys.path[1:]:
        environment["PYTHONPATH"] = os.pathsep.join([here, *filter(None, paths)])


def script_words(invocation: Invocation) -> Sequence[str]:
    """Return the words of the rank entry that run the user's script."""
    kind = "module" if invocation.on("module") else "script"
    return [kind, str(invocation.script), *invocation.arguments]


def launcher_words(invocation: Invocation) -> list[str]:
    """Return torchrun's words for the rank entry, which is a module whatever the script is."""
    dropped = ("-m", "--module", "--run-path", "--run_path")
    return [word for word in invocation.launcher if word not in dropped] + ["--module"]
