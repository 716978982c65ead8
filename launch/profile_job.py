"""Measure what is missing: one short job of real ranks over the minimal set of runs."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_memx.launch.torchrun_options import Invocation

from megatron_memx.errors import BadInputError
from megatron_memx.planner import Request
from megatron_memx.profile.design import (
    LINK,
    OPTIMIZER,
    ProfilePoint,
    full_grid_size,
    minimal_set,
)
from megatron_memx.profile.store import OK, ProfileRow, ProfileStore
from megatron_memx.search.choices import policies
from megatron_memx.search.space import Outer, outer_space

TASK = "MEMX_PROFILE_TASK"
# Sizes of a transfer that tell its start from its rate.
LINK_SIZES_BYTES = (64 * 1024, 4 * 1024**2)


def wanted_points(request: Request) -> tuple[ProfilePoint, ...]:
    """Return the minimal set for every size that the search may choose."""
    job = request.job
    outers = [
        item
        for item in outer_space(job, request.cluster, request.pins, request.facts)
        if isinstance(item, Outer)
    ]
    if not outers:
        return ()
    tps = sorted({(o.sizes.tensor_model_parallel_size, o.sizes.sequence_parallel) for o in outers})
    sizes = sorted({o.sizes.micro_batch_size for o in outers})
    offered = policies(job, request.pins, request.facts, job.model.num_layers)
    return minimal_set(
        tps=tps, micro_batch_sizes=sizes, seq_length=job.model.seq_length, policies=offered
    )


def grid_size(request: Request, points: Sequence[ProfilePoint]) -> int:
    """Return how many runs a full grid over the same search would need."""
    outers = [
        item
        for item in outer_space(request.job, request.cluster, request.pins, request.facts)
        if isinstance(item, Outer)
    ]
    layers = request.job.model.num_layers
    return full_grid_size(
        tps=len({point.tp for point in points}),
        micro_batch_sizes=len({o.sizes.micro_batch_size for o in outers}),
        policies=len(policies(request.job, request.pins, request.facts, layers)),
        num_layers=layers,
    )


def missing_points(
    points: Sequence[ProfilePoint], rows: Sequence[ProfileRow]
) -> tuple[ProfilePoint, ...]:
    """Return the points that no good row answers."""
    done = {row.key[2:10] for row in rows if row.status == OK}
    return tuple(point for point in points if point.key not in done)


def profile_missing(
    request: Request,
    invocation: Invocation,
    store: ProfileStore,
    layer: str,
    rows: dict[str, list[ProfileRow]],
) -> None:
    """Measure the points that some device kind lacks and append their rows to the store.

    Raises:
        BadInputError: The job failed; what it printed says why. Rows measured so far are kept.
    """
    points = wanted_points(request)
    todo: dict[tuple[object, ...], ProfilePoint] = {}
    extras = False
    for kind in request.cluster.used_kinds:
        for point in missing_points(points, rows[kind]):
            todo[point.key] = point
        parts = {row.part for row in rows[kind]}
        extras = extras or OPTIMIZER not in parts
        extras = extras or (LINK not in parts and request.cluster.num_devices > 1)
    if not todo and not extras:
        return
    grid = grid_size(request, points)
    print(
        f"MemX profile: {len(todo)} runs on {', '.join(request.cluster.used_kinds)} "
        f"(a full grid would need {grid})",
        file=sys.stderr,
        flush=True,
    )
    task = {
        "points": [point.to_dict() for point in todo.values()],
        "layer_signature": layer,
        "store": str(store.folder.parent),
        "kinds": [kind for _, _, kind in request.cluster.devices],
        "nodes": [node for node, _, _ in request.cluster.devices],
        "platform": request.cluster.kind_of(0).platform,
        "versions": dict(request.versions),
        "vocab_size": request.job.model.vocab_size,
        "padded_vocab_size": {
            str(tp): request.job.model.padded_vocab_size(tp)
            for tp in {point.tp for point in points}
        },
        "link_sizes_bytes": list(LINK_SIZES_BYTES),
        "dropped": sorted(request.job.pins),
        "global_batch_size": request.job.train.global_batch_size,
        "allow_unknown": request.options.memx_allow_unknown_megatron,
    }
    with tempfile.TemporaryDirectory(prefix="memx-profile-") as folder:
        file = Path(folder) / "task.json"
        file.write_text(json.dumps(task), encoding="utf-8")
        _run(invocation, file, folder, request.cluster.kind_of(0).platform)


def _run(invocation: Invocation, task: Path, folder: str, platform: str) -> None:
    import os

    from megatron_memx.launch.prelaunch import (
        add_package_path,
        launcher_words,
        script_folders,
    )
    from megatron_memx.launch.supervisor import agent_command, run

    from megatron_memx.platforms import prepare_environment

    environment = dict(os.environ)
    environment[TASK] = str(task)
    prepare_environment(platform, environment)
    add_package_path(environment)
    # The worker imports the Megatron that the script would import.
    paths = [*script_folders(invocation), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    quiet = replace(invocation, launcher=_without_logs(invocation.launcher))
    command = agent_command(
        launcher_words(quiet), "megatron_memx.launch.profile_worker", invocation.arguments, folder
    )
    code = run(command, environment)
    if code >= 128:
        raise KeyboardInterrupt
    if code:
        raise BadInputError(
            f"profiling failed with code {code}; its own message stands above, and what was "
            "measured is kept",
            fix="mend what it says, or --memx-profile never to plan without measurements",
            flag="--memx-profile",
        )


def _without_logs(words: Sequence[str]) -> tuple[str, ...]:
    """Drop the options that send the ranks' output elsewhere: progress must be seen."""
    from megatron_memx.launch.torchrun_options import option_at

    kept: list[str] = []
    index = 0
    while index < len(words):
        name, _, takes = option_at(words[index], words[index + 1 :])
        if name not in ("redirects", "tee", "log_dir"):
            kept += words[index : index + 1 + takes]
        index += 1 + takes
    return tuple(kept)
