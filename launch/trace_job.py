"""Traces of many stages, kept by what determines them, in as many processes as there are cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from megatron_memx.cache.signature import signature
from megatron_memx.errors import BadInputError, MemXError
from megatron_memx.job import IRRELEVANT, Job
from megatron_memx.megatron_args import typed_options, without_options
from megatron_memx.parallel import ParallelSizes
from megatron_memx.profile.traced import Traced

if TYPE_CHECKING:
    from megatron_memx.planner import Request
    from megatron_memx.search.evaluate import StageOption
    from megatron_memx.search.given import Given

# Raise it when a trace would give other bytes for the same task.
_TRACE_VERSION = 1


def counted(request: Request) -> tuple[Given, list[StageOption]]:
    """Return the configuration that the request's pins write out, and its stages as counted.

    Raises:
        LegalityError: Megatron would refuse it.
    """
    from megatron_memx.cost.prior import CatalogueProvider
    from megatron_memx.search.evaluate import Evaluator
    from megatron_memx.search.given import given

    job, cluster = request.job, request.cluster
    chosen = given(job, cluster, request.pins, request.facts)
    provider = CatalogueProvider(job, cluster)
    evaluator = Evaluator(
        job, cluster, provider, chosen.outer, margin=request.margin, absolute=False
    )
    return chosen, chosen.stages(evaluator)


def task_of(job: Job, words: Sequence[str], sizes: ParallelSizes, rank: int) -> dict[str, Any]:
    """Return the task that traces a pipeline rank of ``words``' run, as plain JSON types.

    The kernels of Transformer Engine and of fused attention are not here: Megatron's local layers
    run, with stand-ins that keep what those kernels keep.
    """
    pp, vpp = sizes.pipeline_model_parallel_size, sizes.virtual_pipeline_model_parallel_size
    engine = job.model.transformer_impl != "local"
    plain = without_options(words, {"transformer_impl", "attention_backend", "no_rope_fusion"})
    plain = [*plain, "--transformer-impl", "local", "--no-rope-fusion"]
    return {
        "words": plain,
        # The first rank of the stage: stages are the slowest dimension of Megatron's order.
        "rank": rank * sizes.world_size // pp,
        "world_size": sizes.world_size,
        "padded_vocab_size": job.model.padded_vocab_size(sizes.tensor_model_parallel_size),
        # Enough for the fullest moment; more of them repeat it.
        "num_microbatches": min(sizes.num_microbatches, pp + 2 if vpp == 1 else 3 * pp),
        "engine": engine,
        "flash": job.model.flash_attention,
        "fused_rope": engine and job.model.rope_fusion,
    }


def run_traces(
    tasks: Sequence[dict[str, Any]],
    *,
    folder: Path,
    versions: dict[str, str],
    processes: int,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[Traced | MemXError]:
    """Return the trace of each task, or the error that Megatron answered.

    Args:
        folder: Where traces are kept; a task that stands there is not traced again.
        versions: Of Megatron and torch: part of what determines a trace.
        processes: Processes to trace in.
    """
    files = [folder / f"{_signature(task, versions)}.json" for task in tasks]
    found: list[Traced | MemXError | None] = [_read(file) for file in files]
    missing = [index for index, item in enumerate(found) if item is None]
    if missing:
        workers: SimpleQueue[_Worker] = SimpleQueue()
        count = max(1, min(processes, len(missing)))
        with _workers(count) as started, ThreadPoolExecutor(count) as pool:
            for worker in started:
                workers.put(worker)

            def one(index: int) -> Traced | MemXError:
                worker = workers.get()
                try:
                    return worker.ask(tasks[index])
                finally:
                    workers.put(worker)

            for done, (index, result) in enumerate(
                zip(missing, pool.map(one, missing), strict=True), start=1
            ):
                found[index] = result
                if isinstance(result, Traced):
                    _write(files[index], tasks[index], result)
                progress(done, len(missing))
    return [item for item in found if item is not None]


class _Worker:
    """One process that traces."""

    def __init__(self, log: Path) -> None:
        self._log = log
        environment = dict(os.environ)
        root = str(Path(__file__).resolve().parents[1])
        paths = [root, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment["OMP_NUM_THREADS"] = "1"
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_memx.launch.trace_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )

    def ask(self, task: dict[str, Any]) -> Traced | MemXError:
        """Trace a task."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return BadInputError(
                f"the process that traces ended: {self._last_words()}",
                fix="megatron-core and torch in this environment, and memory for one process each",
                flag="--processes",
            )
        data = json.loads(line)
        if "error" in data:
            # Megatron's parser prints its reason and exits.
            exited = data["error"].startswith("SystemExit")
            reason = self._last_words() if exited else data["error"]
            return BadInputError(
                f"Megatron refuses rank {task['rank']} of {task['world_size']}: {reason}",
                fix="arguments that Megatron takes",
            )
        return Traced(**data["result"])

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


@contextmanager
def _workers(count: int) -> Iterator[list[_Worker]]:
    with tempfile.TemporaryDirectory(prefix="memx-trace-") as logs:
        started = [_Worker(Path(logs) / f"{index}.log") for index in range(count)]
        try:
            yield started
        finally:
            for worker in started:
                worker.process.kill()
                worker.process.wait()
                for pipe in (worker.process.stdin, worker.process.stdout):
                    if pipe is not None:
                        pipe.close()


def _signature(task: dict[str, Any], versions: dict[str, str]) -> str:
    words = typed_options(without_options(task["words"], IRRELEVANT))
    return signature({**task, "words": words, "versions": versions, "trace": _TRACE_VERSION})


def _read(file: Path) -> Traced | None:
    try:
        return Traced(**json.loads(file.read_text(encoding="utf-8"))["result"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(file: Path, task: dict[str, Any], result: Traced) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".tmp", delete=False) as new:
        json.dump({"task": task, "result": asdict(result)}, new)
    os.replace(new.name, file)
