"""What every rank of a profile runs: real Megatron layers, at the points of the minimal set.

All ranks run each point at the same time, as they would while training, so that devices which
share something (cores, memory bandwidth, a switch) are measured sharing it. The first rank of each
device kind writes the rows, one as soon as it is measured, so that an interrupted profile resumes.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from megatron_memx.launch.profile_job import TASK
from megatron_memx.launch.profile_piece import Piece
from megatron_memx.launch.supervisor import die_with_parent

from megatron_memx.megatron_args import REPLACED_BY_LAYOUT, without_options
from megatron_memx.options import OPTIONS
from megatron_memx.profile.design import LINK, MIDDLE, OPTIMIZER, ProfilePoint
from megatron_memx.profile.store import CONTENDED, OOM, ProfileRow, ProfileStore

WARMUP, REPEATS, MOST_REPEATS = 2, 5, 15
# Repeats that spread more than this are run again; if they still do, the row is marked.
WIDE_SPREAD, CONTENDED_SPREAD = 0.15, 0.6
_PROGRESS_EVERY_S = 5.0
# What a rank computes between two transfers: some milliseconds of a CPU core.
_BUSY_SIDE, _BUSY_PRODUCTS = 512, 2
# More than the caches of today's processors and accelerators hold for one rank.
_EVICTED_BYTES = 64 * 1024**2


class Worker:
    """One rank of the profile."""

    def __init__(self, task: dict[str, Any], words: list[str]) -> None:
        import torch

        self.task = task
        self.torch = torch
        self.rank = int(os.environ["RANK"])
        self.kind = str(task["kinds"][self.rank])
        self.leads = task["kinds"].index(self.kind) == self.rank
        self.on_device = task["platform"] != "cpu"
        self.store = ProfileStore(task["store"])
        own = {option.dest for option in OPTIONS}
        self.words = without_options(words, {*task["dropped"], *REPLACED_BY_LAYOUT, *own})
        self.args: Any = None
        self.tp = 0
        self._filler: Any = None

    def run(self) -> None:
        """Measure every point, then the links."""
        points = [ProfilePoint.from_dict(item) for item in self.task["points"]]
        points.sort(key=lambda point: (point.tp, point.sequence_parallel))
        started = shown = time.monotonic()
        for done, point in enumerate(points):
            now = time.monotonic()
            if self.rank == 0 and done and now - shown > _PROGRESS_EVERY_S:
                left = (now - started) / done * (len(points) - done)
                self.say(f"{done} of {len(points)} runs, about {left:.0f} s left")
                shown = now
            self.enter(point)
            self.measure(point)
        if points:
            self.enter(points[0])
        elif self.args is None:
            self.enter(
                ProfilePoint(part=MIDDLE, num_layers=1, tp=1, micro_batch_size=1, seq_length=8)
            )
        self.measure_links()
        if self.rank == 0:
            self.say(f"done in {time.monotonic() - started:.0f} s")

    def say(self, text: str) -> None:
        """Print one line of progress."""
        print(f"MemX profile: {text}", file=sys.stderr, flush=True)

    def enter(self, point: ProfilePoint) -> None:
        """Set Megatron up for the point's tensor-parallel size."""
        from megatron.core import parallel_state, tensor_parallel
        from megatron_memx.patches.model import parsed_arguments

        if self.args is not None and (self.tp, self.args.sequence_parallel) == (
            point.tp,
            point.sequence_parallel,
        ):
            return
        torch = self.torch
        if not torch.distributed.is_initialized():
            from megatron_memx.platforms import get

            if self.on_device:
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            torch.distributed.init_process_group(backend=get(self.task["platform"]).backend)
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        dp = len(self.task["kinds"]) // point.tp
        words = [
            *self.words,
            *("--tensor-model-parallel-size", str(point.tp)),
            *("--micro-batch-size", str(point.micro_batch_size)),
            *("--global-batch-size", str(point.micro_batch_size * dp)),
        ]
        if point.sequence_parallel:
            words.append("--sequence-parallel")
        with _quiet():
            self.args = parsed_arguments(words)
            self.args.padded_vocab_size = self.task["padded_vocab_size"].get(
                str(point.tp), self.task["vocab_size"]
            )
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=point.tp)
            tensor_parallel.model_parallel_cuda_manual_seed(1234)
        self.tp = point.tp

    def measure(self, point: ProfilePoint) -> None:
        """Measure one point and write its row."""
        try:
            figures = self._measure(point)
        except (self.torch.OutOfMemoryError, MemoryError):
            figures = {"status": OOM}
        gc.collect()
        if self.on_device:
            self.torch.cuda.empty_cache()
        self.write(point, figures)

    def write(self, point: ProfilePoint, figures: dict[str, Any]) -> None:
        """Write a row if this rank leads its device kind."""
        if not self.leads:
            return
        row = ProfileRow(
            device_kind=self.kind,
            platform=self.task["platform"],
            layer_signature=self.task["layer_signature"],
            part=point.part,
            num_layers=point.num_layers,
            tp=point.tp,
            micro_batch_size=point.micro_batch_size,
            seq_length=point.seq_length,
            recompute=point.recompute,
            modules=point.modules,
            sequence_parallel=point.sequence_parallel,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions=self.task["versions"],
            **figures,
        )
        self.store.append([row])

    def _measure(self, point: ProfilePoint) -> dict[str, Any]:
        piece = Piece(self, point)
        for _ in range(WARMUP):
            piece.run_pass()
        saved, transient = piece.memory()
        forwards: list[float] = []
        backwards: list[float] = []
        spread = float("inf")
        while spread > WIDE_SPREAD and len(forwards) < MOST_REPEATS:
            for _ in range(REPEATS):
                self.torch.distributed.barrier()
                forward_s, backward_s = piece.run_pass()
                forwards.append(forward_s)
                backwards.append(backward_s)
            spread = self.agreed(_spread([f + b for f, b in zip(forwards, backwards, strict=True)]))
        if point.part == MIDDLE and point.recompute == "none" and self.wants_optimizer(point):
            self.measure_optimizer(piece, point)
        figures: dict[str, Any] = {
            "forward_s": statistics.median(forwards),
            "backward_s": statistics.median(backwards),
            "saved_bytes": saved,
            "transient_bytes": transient,
            "num_parameters": piece.num_parameters,
            "repeats": len(forwards),
            "spread": spread,
            "iteration": WARMUP + 1,
        }
        if spread > CONTENDED_SPREAD:
            figures["status"] = CONTENDED
        return figures

    def agreed(self, value: float) -> float:
        """Return the largest of all ranks' values: every rank must repeat equally often."""
        tensor = self.torch.tensor([value], device=self.device)
        self.torch.distributed.all_reduce(tensor, op=self.torch.distributed.ReduceOp.MAX)
        return float(tensor.item())

    @property
    def device(self) -> Any:
        """The device of this rank's tensors."""
        return self.torch.device("cuda") if self.on_device else self.torch.device("cpu")

    def wants_optimizer(self, point: ProfilePoint) -> bool:
        """The optimizer is measured at the first shape of the first tensor-parallel size."""
        first = self.task["points"][0]
        return (point.tp, point.micro_batch_size, point.seq_length) == (
            first["tp"],
            first["micro_batch_size"],
            first["seq_length"],
        )

    def measure_optimizer(self, piece: Piece, point: ProfilePoint) -> None:
        """Measure a step of Megatron's own optimizer on the piece's parameters."""
        from megatron.core.optimizer import get_megatron_optimizer
        from megatron.training.training import get_megatron_optimizer_config

        config, overrides = get_megatron_optimizer_config(self.args)
        optimizer = get_megatron_optimizer(config, [piece.module], config_overrides=overrides)
        times = []
        transient = 0
        for turn in range(WARMUP + REPEATS):
            piece.run_pass()
            if turn == WARMUP - 1:
                with self.tracker() as tracker:
                    before = tracker.current_bytes
                    optimizer.step()
                    transient = max(0, tracker.peak_bytes - before)
                continue
            start = self.now()
            optimizer.step()
            times.append(self.now() - start)
        self.write(
            ProfilePoint(
                part=OPTIMIZER,
                num_layers=point.num_layers,
                tp=point.tp,
                micro_batch_size=point.micro_batch_size,
                seq_length=point.seq_length,
                sequence_parallel=point.sequence_parallel,
            ),
            {
                "forward_s": statistics.median(times[1:]),
                "transient_bytes": transient,
                "num_parameters": piece.num_parameters,
                "repeats": REPEATS,
                "spread": _spread(times[1:]),
                "iteration": WARMUP,
            },
        )

    def now(self) -> float:
        """Return the time once the device has done its work."""
        if self.on_device:
            self.torch.cuda.synchronize()
        return time.perf_counter()

    def evict(self) -> None:
        """Push a layer's weights and activations out of the processor's caches.

        While training, other layers run between two passes of one layer; a profile that runs one
        layer again and again would find everything in the cache.
        """
        if self._filler is None:
            self._filler = self.torch.zeros(_EVICTED_BYTES // 4, device=self.device)
        self._filler.add_(1.0)

    def tracker(self) -> Any:
        """Return a context that counts live bytes on this platform."""
        if self.on_device:
            return _DeviceTracker(self.torch)
        from megatron_memx.patches.platform.memory import StorageTracker

        return StorageTracker()

    def measure_links(self) -> None:
        """Measure transfers from the first rank of each kind to a peer of each kind and place."""
        kinds, nodes = self.task["kinds"], self.task["nodes"]
        done = set()
        for a in range(len(kinds)):
            for b in range(a + 1, len(kinds)):
                where = "intra-node" if nodes[a] == nodes[b] else "inter-node"
                pair = (*sorted((kinds[a], kinds[b])), where)
                if pair in done:
                    continue
                done.add(pair)
                for size in self.task["link_sizes_bytes"]:
                    self.measure_transfer(a, b, size, where)

    def measure_transfer(self, a: int, b: int, size: int, where: str) -> None:
        """Measure half of a round trip between ranks ``a`` and ``b``, as a pipeline makes it.

        Each rank computes before it sends, so that its partner waits: a transfer that finds the
        partner's thread asleep takes many times as long as one of a loop of transfers.
        """
        torch = self.torch
        torch.distributed.barrier()
        if self.rank not in (a, b):
            return
        other = b if self.rank == a else a
        data = torch.zeros(size // 4, dtype=torch.float32, device=self.device)
        square = torch.zeros((_BUSY_SIDE, _BUSY_SIDE), device=self.device)

        def pass_on(kind: Any) -> None:
            for done in torch.distributed.batch_isend_irecv(
                [torch.distributed.P2POp(kind, data, other)]
            ):
                done.wait()

        def compute() -> float:
            start = self.now()
            for _ in range(_BUSY_PRODUCTS):
                square @ square
            return self.now() - start

        times = []
        for turn in range(WARMUP + 2 * REPEATS):
            start = self.now()
            if self.rank != a:
                pass_on(torch.distributed.irecv)
            own = compute()
            pass_on(torch.distributed.isend)
            if self.rank == a:
                pass_on(torch.distributed.irecv)
            spent = torch.tensor([own], dtype=torch.float32, device=self.device)
            both = self.now() - start
            if self.rank == a:
                torch.distributed.recv(spent, other)
                if turn >= WARMUP:
                    times.append(max(0.0, both - own - float(spent)) / 2)
            else:
                torch.distributed.send(spent, other)
        if self.rank != a:
            return
        row = ProfileRow(
            device_kind=self.kind,
            platform=self.task["platform"],
            layer_signature=self.task["layer_signature"],
            part=LINK,
            num_layers=0,
            tp=1,
            micro_batch_size=0,
            seq_length=0,
            forward_s=statistics.median(times),
            repeats=len(times),
            spread=_spread(times),
            iteration=WARMUP,
            size_bytes=size,
            peer_kind=str(self.task["kinds"][b]),
            where=where,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            versions=self.task["versions"],
        )
        self.store.append([row])


class _DeviceTracker:
    """The allocator's own counters, with the names of the CPU's tracker."""

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda

    def __enter__(self) -> _DeviceTracker:
        self._cuda.synchronize()
        self._cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_exc: object) -> None:
        return None

    @property
    def current_bytes(self) -> int:
        """Bytes allocated now."""
        return int(self._cuda.memory_allocated())

    @property
    def peak_bytes(self) -> int:
        """Most bytes allocated since the start."""
        return int(self._cuda.max_memory_allocated())


class _quiet:  # noqa: N801 - reads like the function that it stands for
    """Keep Megatron's listing of arguments out of the profile's output."""

    def __enter__(self) -> None:
        self._before = sys.stdout
        sys.stdout = open(os.devnull, "w")

    def __exit__(self, *_exc: object) -> None:
        sys.stdout.close()
        sys.stdout = self._before


def _spread(values: list[float]) -> float:
    """Return the interquartile range over the median."""
    if len(values) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / middle


def main(words: list[str]) -> int:
    """Run one rank of the profile."""
    die_with_parent()
    task = json.loads(Path(os.environ[TASK]).read_text(encoding="utf-8"))
    from megatron_memx.patches.registry import Context

    from megatron_memx import patches

    patches.apply(Context(platform=task["platform"], allow_unknown=bool(task["allow_unknown"])))
    Worker(task, words).run()
    import torch

    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
