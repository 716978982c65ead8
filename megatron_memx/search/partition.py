"""Splits and recomputation under one outer choice.

Stages are filled one after the other. For each number of layers used, the beginnings with the least
estimate are kept (all of them where the space is small, so that nothing is lost). Complete
configurations are judged by the exact schedule in the order of a bound on their score, until no
bound can beat what was judged; the best are then improved by single moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_memx.cost.pipeline import lower_bound_s
from megatron_memx.legality import Facts
from megatron_memx.parallel import Recompute
from megatron_memx.pins import Constraints
from megatron_memx.search.choices import pareto, policies
from megatron_memx.search.evaluate import Evaluated, Evaluator, StageOption
from megatron_memx.search.table import StageTable, Tables

EXHAUSTIVE_LIMIT = 50_000
_FINALS = 12
_ROUNDS = 12

Score = Callable[[Any, Any, Any], Any]
Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How hard to look.

    Args:
        beam: Beginnings kept for each number of layers used.
        window: How far a stage may be from its fair share, as a share of it.
        drift: How many layers the first ranks together may be from theirs.
    """

    beam: int
    window: float
    drift: float


QUICK = Effort(beam=4, window=0.35, drift=3)
THOROUGH = Effort(beam=32, window=1.0, drift=float("inf"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Result under one outer choice.

    Args:
        best: The best feasible configuration, or None.
        nearest: If none fits: the stage options that come nearest.
        exhaustive: Whether every split and Pareto option was weighed.
        count: Complete configurations weighed.
    """

    best: Evaluated | None
    nearest: tuple[StageOption, ...]
    exhaustive: bool
    count: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Beginnings:
    """Fillings of the first ranks, one a row; ``choice[:, r]`` indexes the table of rank r."""

    bound: Array
    busy: Array
    peak: Array
    total: Array
    squares: Array
    choice: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class _Grown:
    """Beginnings with one more rank; ``columns`` in the order of :class:`_Beginnings`."""

    columns: tuple[Array, ...]
    parent: NDArray[np.int64]
    option: NDArray[np.int64]


class Partitioner:
    """Finds splits and policies for one outer choice.

    Args:
        score: (time, peak load, variance of loads) -> what is minimised; grows with each and
            takes numbers or arrays.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        tables: Tables,
        pins: Constraints,
        facts: Facts,
        score: Score,
    ) -> None:
        self._evaluator, self._tables = evaluator, tables
        self._pins, self._facts, self._score = pins, facts, score
        sizes = evaluator.outer.sizes
        self._sizes = sizes
        self._pp = sizes.pipeline_model_parallel_size
        self._vpp = sizes.virtual_pipeline_model_parallel_size
        self._m = sizes.num_microbatches
        self._layers = evaluator.job.model.num_layers
        self._round = self._layers // self._vpp
        self._stages: dict[tuple[int, int], StageTable] = {}
        self.count = 0

    def run(self, effort: Effort, *, bound: float = float("inf")) -> Partition:
        """Return the best configuration whose score may beat ``bound``."""
        exhaustive = True
        if self._pins.split is not None:
            rows = [pareto([o for o in row if o.fits]) for row in self._pinned_rows()]
            complete = self._combined(rows)
            best = self._judge_best(
                complete,
                bound,
                improve=False,
                materialise=lambda choice: [row[i] for row, i in zip(rows, choice, strict=True)],
            )
        else:
            small = self._is_small()
            if small:
                effort = Effort(beam=EXHAUSTIVE_LIMIT, window=float("inf"), drift=float("inf"))
            complete = self._fill(effort, bound)
            exhaustive = small
            best = self._judge_best(complete, bound, improve=not small and effort is THOROUGH)
        nearest = () if best else self._nearest()
        return Partition(best=best, nearest=nearest, exhaustive=exhaustive, count=self.count)

    def even(self, policy: Recompute) -> Evaluated | None:
        """Return the even split under one policy, as without MemX; None if layers do not divide."""
        if self._vpp > 1 or self._layers % self._pp:
            return None
        return self.nearly_even(policy)

    def nearly_even(self, policy: Recompute) -> Evaluated:
        """Return the split that is even but for one layer, under one policy."""
        counts = self._even_counts()
        starts = [sum(counts[:slot]) for slot in range(len(counts))]
        return self._evaluator.evaluate(
            tuple(
                self._evaluator.option(
                    rank,
                    tuple(starts[rank :: self._pp]),
                    tuple(counts[rank :: self._pp]),
                    policy,
                )
                for rank in range(self._pp)
            )
        )

    def value(self, item: Evaluated) -> float:
        """Return the exact score of a configuration."""
        loads = np.array(item.loads)
        return float(self._score(item.time_s, loads.max(), loads.var()))

    def _even_counts(self) -> list[int]:
        base, more = divmod(self._layers, self._pp * self._vpp)
        return [base + (slot < more) for slot in range(self._pp * self._vpp)]

    def _table(self, rank: int, used: int) -> StageTable:
        key = (rank, 0 if self._tables.uniform else used)
        if key not in self._stages:
            kind = self._evaluator.outer.kinds[rank]
            self._stages[key] = self._tables.stage(
                self._sizes,
                kind,
                rank,
                key[1],
                across_nodes=self._evaluator.across_nodes,
            )
        return self._stages[key]

    def _is_small(self) -> bool:
        splits = comb(self._round - 1, self._pp - 1)
        if splits > EXHAUSTIVE_LIMIT:
            return False
        sizes = [len(self._table(rank, 0).row) / self._round for rank in range(self._pp)]
        return float(splits * np.prod(np.maximum(sizes, 1.0))) <= EXHAUSTIVE_LIMIT / 4

    def _fair(self) -> Array:
        """Return the layers (not whole) of each rank that take equal time."""
        one = []
        for rank in range(self._pp):
            table = self._table(rank, 0)
            one.append(table.busy_s[0] / table.layers[0] if len(table.row) else np.inf)
        speed = 1.0 / np.array(one)
        return np.asarray(speed * self._round / max(float(speed.sum()), 1e-30))

    def _fill(self, effort: Effort, bound: float) -> _Beginnings | None:
        """Return complete fillings; None if nothing fits."""
        fair = self._fair()
        # A stage that nothing fits has no fair share of its own to scale.
        share = np.where(fair > 0, fair, 1.0)
        reach = np.maximum(3.0, effort.window * share)
        lows = np.maximum(1, np.floor(np.maximum(fair - reach, 1.0)))
        highs = np.minimum(self._round, np.ceil(np.maximum(fair + reach, 1.0)))
        until = np.cumsum(fair)
        zero = np.zeros(1)
        states = {
            0: _Beginnings(
                bound=zero,
                busy=zero,
                peak=zero,
                total=zero,
                squares=zero,
                choice=np.zeros((1, 0), dtype=np.int64),
            )
        }
        for rank in range(self._pp):
            behind = self._pp - rank - 1
            low, high = int(lows[rank]), int(highs[rank])
            grown: dict[int, list[_Grown]] = {}
            sources: list[NDArray[np.int64]] = []
            offset = 0
            for used, items in states.items():
                table = self._table(rank, used)
                left = self._round - used
                least, most = (left, left) if behind == 0 else (low, min(high, left - behind))
                sources.append(items.choice)
                if least <= most:
                    parts = self._grow(items, table, least, most, offset)
                    for layers, part in parts:
                        grown.setdefault(used + layers, []).append(part)
                offset += len(items.bound)
            if not grown:
                return None
            before = np.concatenate(sources)
            states = {}
            for used, made in grown.items():
                if behind and abs(used - until[rank]) > effort.drift:
                    continue
                kept = self._keep(_joined(made), before, used, rank + 1, effort.beam, bound)
                if kept is not None:
                    states[used] = kept
        return states.get(self._round)

    def _grow(
        self, items: _Beginnings, table: StageTable, least: int, most: int, offset: int
    ) -> list[tuple[int, _Grown]]:
        """Return every beginning followed by every option of ``least`` to ``most`` layers."""
        begin, end = int(table.start[least]), int(table.start[most + 1])
        busy, load = table.busy_s[None, begin:end], table.load[None, begin:end]
        bound = np.maximum(items.bound[:, None], self._m * busy + items.busy[:, None] / self._vpp)
        columns = (
            bound,
            items.busy[:, None] + busy,
            np.maximum(items.peak[:, None], load),
            items.total[:, None] + load,
            items.squares[:, None] + load**2,
        )
        parent = np.arange(offset, offset + len(items.bound))
        parts = []
        for layers in range(least, most + 1):
            here = slice(int(table.start[layers]) - begin, int(table.start[layers + 1]) - begin)
            count = here.stop - here.start
            if count:
                option = np.arange(begin + here.start, begin + here.stop)
                parts.append(
                    (
                        layers,
                        _Grown(
                            tuple(column[:, here].ravel() for column in columns),
                            parent.repeat(count),
                            np.broadcast_to(option, (len(parent), count)).ravel(),
                        ),
                    )
                )
        return parts

    def _keep(
        self,
        grown: _Grown,
        before: NDArray[np.int64],
        used: int,
        count: int,
        beam: int,
        bound: float,
    ) -> _Beginnings | None:
        """Keep the ``beam`` beginnings of least estimate that can still beat ``bound``."""
        least_s, busy, peak, total, squares = grown.columns
        hope = self._score(np.maximum(least_s, busy), peak, 0.0)
        index = np.flatnonzero(hope <= bound)
        if not len(index):
            return None
        if len(index) > beam:
            share = self._pp if self._pins.split is not None else self._round
            # Spread what is left like what is there, but never below the slowest stage so far.
            spread = self._m * busy[index] * (share / used) / self._pp
            mean: Array = total[index] / count
            variance: Array = np.maximum(0.0, squares[index] / count - mean * mean)
            time_s = np.maximum(least_s[index], spread)
            estimate = np.asarray(self._score(time_s, peak[index], variance)).round(9)
            order = np.lexsort((busy[index], estimate))
            ranked = estimate[order]
            distinct = np.ones(len(order), dtype=bool)
            distinct[1:] = ranked[1:] != ranked[:-1]
            index = index[order[distinct][:beam]]
        choice = np.concatenate([before[grown.parent[index]], grown.option[index][:, None]], axis=1)
        return _Beginnings(
            bound=least_s[index],
            busy=busy[index],
            peak=peak[index],
            total=total[index],
            squares=squares[index],
            choice=choice,
        )

    def _judge_best(
        self,
        complete: _Beginnings | None,
        bound: float,
        *,
        improve: bool,
        materialise: Callable[[list[int]], Sequence[StageOption]] | None = None,
    ) -> Evaluated | None:
        if complete is None:
            return None
        self.count += len(complete.bound)
        mean = complete.total / self._pp
        variance = np.maximum(0.0, complete.squares / self._pp - mean**2)
        least_s = np.maximum(complete.bound, complete.busy)
        hope = self._score(least_s, complete.peak, variance)
        best: Evaluated | None = None
        value = bound
        for judged, index in enumerate(np.argsort(hope, kind="stable").tolist()):
            if hope[index] >= value or (improve and judged >= _FINALS and best is not None):
                break
            choice = complete.choice[index].tolist()
            item = self._evaluator.evaluate((materialise or self._materialise)(choice))
            score = self.value(item)
            if score < value or best is None:
                best, value = item, min(score, value)
        if best is not None and improve:
            best = self._improve(best)
        return best

    def _materialise(self, choice: Sequence[int]) -> tuple[StageOption, ...]:
        stages = []
        used = 0
        for rank, index in enumerate(choice):
            table = self._table(rank, used)
            layers = int(table.layers[index])
            stages.append(self._stage(rank, used, layers, int(table.row[index])))
            used += layers
        return tuple(stages)

    def _stage(self, rank: int, first: int, layers: int, row: int) -> StageOption:
        firsts = tuple(v * self._round + first for v in range(self._vpp))
        policy = self._tables.rows.policies[row]
        return self._evaluator.option(rank, firsts, (layers,) * self._vpp, policy)

    def _improve(self, best: Evaluated) -> Evaluated:
        """Move single layers and change single policies while the exact score falls."""
        value = self.value(best)
        for _ in range(_ROUNDS):
            hopeful = sorted(
                (
                    (self._hope(stages), index, stages)
                    for index, stages in enumerate(self._neighbours(best))
                ),
                key=lambda entry: entry[:2],
            )[:_FINALS]
            found = None
            for hope, _, stages in hopeful:
                if hope >= value:
                    break
                item = self._evaluator.evaluate(stages)
                self.count += 1
                if self.value(item) < value:
                    found, value = item, self.value(item)
            if found is None:
                return best
            best = found
        return best

    def _hope(self, stages: Sequence[StageOption]) -> float:
        loads = np.array([stage.load for stage in stages])
        time_s = lower_bound_s([stage.busy_s for stage in stages], self._m, self._vpp)
        return float(self._score(time_s, loads.max(), loads.var()))

    def _options(self, rank: int, first: int, layers: int) -> list[StageOption]:
        table = self._table(rank, first)
        rows = table.row[int(table.start[layers]) : int(table.start[layers + 1])]
        return [self._stage(rank, first, layers, int(row)) for row in rows]

    def _neighbours(self, item: Evaluated) -> Iterator[tuple[StageOption, ...]]:
        """Yield configurations one policy or one moved layer (and two policies) away."""
        counts = [stage.chunks[0].num_layers for stage in item.stages]
        firsts = [sum(counts[:rank]) for rank in range(self._pp)]
        for rank in range(self._pp):
            for option in self._options(rank, firsts[rank], counts[rank]):
                if option is not item.stages[rank]:
                    yield (*item.stages[:rank], option, *item.stages[rank + 1 :])
        for rank in range(self._pp - 1):
            for move in (-1, 1):
                a, b = counts[rank] + move, counts[rank + 1] - move
                if a < 1 or b < 1:
                    continue
                for one in self._options(rank, firsts[rank], a):
                    for two in self._options(rank + 1, firsts[rank] + a, b):
                        yield (*item.stages[:rank], one, two, *item.stages[rank + 2 :])

    def _pinned_rows(self) -> list[list[StageOption]]:
        """Return for each rank every policy's filling of the split that the user wrote."""
        split = self._pins.split or tuple(self._even_counts())
        starts = [sum(split[:k]) for k in range(len(split))]
        rows = []
        for rank in range(self._pp):
            slots = range(rank, len(split), self._pp)
            firsts = tuple(starts[k] for k in slots)
            counts = tuple(split[k] for k in slots)
            offered = policies(self._evaluator.job, self._pins, self._facts, max(counts))
            rows.append([self._evaluator.option(rank, firsts, counts, p) for p in offered])
        return rows

    def _combined(self, rows: Sequence[Sequence[StageOption]]) -> _Beginnings | None:
        """Return combinations of one option of each rank."""
        if not all(rows):
            return None
        items = _Beginnings(
            bound=np.zeros(1),
            busy=np.zeros(1),
            peak=np.zeros(1),
            total=np.zeros(1),
            squares=np.zeros(1),
            choice=np.zeros((1, 0), dtype=np.int64),
        )
        for rank, row in enumerate(rows):
            table = StageTable(
                row=np.arange(len(row)),
                layers=np.zeros(len(row), dtype=np.int64),
                busy_s=np.array([option.busy_s for option in row]),
                load=np.array([option.load for option in row]),
                start=np.array([0, len(row)]),
            )
            ((_, grown),) = self._grow(items, table, 0, 0, 0)
            kept = self._keep(grown, items.choice, rank + 1, rank + 1, THOROUGH.beam, float("inf"))
            assert kept is not None
            items = kept
        return items

    def _nearest(self) -> tuple[StageOption, ...]:
        """Return the filling that needs least memory: most recomputation, even or pinned split."""
        return tuple(
            min(row, key=lambda option: option.memory.high_bytes) for row in self._pinned_rows()
        )


def _joined(parts: Sequence[_Grown]) -> _Grown:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(part.columns for part in parts), strict=True)
    return _Grown(
        tuple(np.concatenate(column) for column in columns),
        np.concatenate([part.parent for part in parts]),
        np.concatenate([part.option for part in parts]),
    )
