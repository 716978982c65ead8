"""Plans and measurements as text: tables on a terminal, the same words when piped."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import IO, Any

from rich.box import ASCII, ROUNDED
from rich.console import Console
from rich.table import Table

from megatron_memx.plan import Plan, Stage
from megatron_memx.report.measured import Measured
from megatron_memx.units import format_bytes, format_seconds

_PIPED_WIDTH = 110
_BAR_CELLS = 10


def make_console(file: IO[str] | None = None) -> Console:
    """Return a console that is plain when ``file`` is not a terminal or ``NO_COLOR`` is set."""
    stream = file or sys.stdout
    terminal = stream.isatty()
    return Console(
        file=stream,
        width=None if terminal else _PIPED_WIDTH,
        no_color=bool(os.environ.get("NO_COLOR")) or not terminal,
        highlight=False,
        soft_wrap=False,
        emoji=False,
        markup=False,
    )


def show_plan(plan: Plan, *, reused: bool, took_s: float | None, console: Console) -> None:
    """Print the plan: sizes, stages, prediction, what it rests on and who came second."""
    how = "reused the cached plan" if reused else "planned now"
    took = f" in {format_seconds(took_s)}" if took_s is not None else ""
    console.print(f"MemX plan {plan.signature[:12]}: {how}{took}", style="bold")
    model = plan.model
    console.print(
        f"  model    {model.get('num_layers')} layers, hidden {model.get('hidden_size')}, "
        f"sequence {model.get('seq_length')}"
    )
    console.print(f"  cluster  {_cluster_text(plan)}")
    console.print(
        f"  sizes    {plan.parallel.label} gbs{plan.parallel.global_batch_size} "
        f"({plan.parallel.num_microbatches} micro-batches), layout {plan.layout}"
    )
    if plan.pins:
        kept = ", ".join(f"{name}={_plain(value)}" for name, value in plan.pins.items())
        console.print(f"  pins     kept as you wrote them: {kept}")
    console.print(_stage_table(plan, console))
    if plan.prediction is not None:
        _show_prediction(plan, console)
    for index, item in enumerate(plan.runners_up[:3]):
        lead = "  next     " if index == 0 else "           "
        console.print(lead + _runner_text(item))
    for index, item in enumerate(plan.rejected[:4]):
        lead = "  lost     " if index == 0 else "           "
        console.print(f"{lead}{item.get('family')}: {item.get('reason')}")


def show_measured(plan: Plan, measured: Measured, console: Console) -> None:
    """Print each stage's predicted and measured time and peak memory, side by side."""
    console.print(
        f"MemX measured {measured.num_steps} iterations on {measured.platform}; "
        "predicted against measured:",
        style="bold",
    )
    table = Table(box=_box(console), pad_edge=False)
    for name in ("stage", "forward+backward / micro-batch", "p2p wait / iteration", "peak memory"):
        table.add_column(name)
    for stage in plan.stages:
        seen = measured.stages.get(stage.pipeline_rank)
        if seen is None:
            table.add_row(str(stage.pipeline_rank), "not measured", "", "")
            continue
        said = stage.prediction
        busy = said.forward_s + said.backward_s if said else None
        table.add_row(
            str(stage.pipeline_rank),
            _pair(busy, seen.forward_s + seen.backward_s, format_seconds),
            format_seconds(seen.p2p_s),
            _pair(said.peak_memory_bytes if said else None, seen.peak_bytes, format_bytes),
        )
    console.print(table)
    said_s = plan.prediction.iteration_time_s if plan.prediction else None
    console.print(f"  iteration  {_pair(said_s, measured.iteration_time_s, format_seconds)}")


def _show_prediction(plan: Plan, console: Console) -> None:
    said = plan.prediction
    assert said is not None
    console.print(
        f"  predict  iteration {format_seconds(said.iteration_time_s)} "
        f"({format_seconds(said.iteration_time_low_s)} to "
        f"{format_seconds(said.iteration_time_high_s)}), peak utilisation "
        f"{said.peak_utilisation:.1%}, Phi {said.phi:.4f}"
    )
    console.print(f"  rests on {said.basis or said.rung} ({said.rung})")
    weights = plan.objective.get("weights")
    if isinstance(weights, Mapping):
        text = ", ".join(f"{name} {value:g}" for name, value in weights.items())
        console.print(f"  weights  {plan.objective.get('profile', 'by hand')}: {text}")


def _stage_table(plan: Plan, console: Console) -> Table:
    table = Table(box=_box(console), pad_edge=False)
    for name in ("stage", "ranks", "device", "layers", "recompute"):
        table.add_column(name)
    table.add_column("fwd + bwd", justify="right")
    table.add_column("peak memory of capacity")
    for stage in plan.stages:
        said = stage.prediction
        table.add_row(
            str(stage.pipeline_rank),
            ranks_text(stage.ranks),
            stage.device_kind,
            _layers_text(stage),
            _recompute_text(stage),
            f"{format_seconds(said.forward_s)} + {format_seconds(said.backward_s)}" if said else "",
            _memory_text(stage),
        )
    return table


def _memory_text(stage: Stage) -> str:
    said = stage.prediction
    if said is None:
        return ""
    cells = min(_BAR_CELLS, round(said.utilisation * _BAR_CELLS))
    bar = "#" * cells + "." * (_BAR_CELLS - cells)
    return f"[{bar}] {format_bytes(said.peak_memory_bytes)} of {format_bytes(said.capacity_bytes)}"


def _layers_text(stage: Stage) -> str:
    parts = []
    for chunk in stage.chunks:
        last = chunk.first_layer + chunk.num_layers - 1
        span = f"{chunk.first_layer}-{last}" if chunk.num_layers > 1 else f"{chunk.first_layer}"
        parts.append(f"{chunk.num_layers} ({span})" if chunk.num_layers else "0")
    text = " + ".join(parts)
    extras = [
        name
        for name, present in (
            ("embedding", any(chunk.embedding for chunk in stage.chunks)),
            ("mtp", any(chunk.mtp_num_layers for chunk in stage.chunks)),
            ("loss", any(chunk.loss for chunk in stage.chunks)),
        )
        if present
    ]
    return text + (f" + {' + '.join(extras)}" if extras else "")


def _recompute_text(stage: Stage) -> str:
    labels = [chunk.recompute.label for chunk in stage.chunks]
    return labels[0] if len(set(labels)) == 1 else " | ".join(labels)


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Return ranks as text, runs joined: ``0-3,8``."""
    parts: list[str] = []
    start = previous = None
    for rank in (*ranks, None):
        if previous is not None and rank == previous + 1:
            previous = rank
            continue
        if start is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = rank
    return ",".join(parts)


def _cluster_text(plan: Plan) -> str:
    counts: dict[str, int] = {}
    for node in plan.cluster.get("nodes", ()):
        kind, count = str(node.get("device_kind", "?")), node.get("num_devices")
        counts[kind] = counts.get(kind, 0) + (count if isinstance(count, int) else 0)
    devices = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
    return f"{devices} on {len(plan.cluster.get('nodes', ()))} node(s)"


def _runner_text(item: Mapping[str, Any]) -> str:
    time_s, phi = item.get("iteration_time_s"), item.get("phi")
    text = str(item.get("label", item.get("family", "?")))
    if isinstance(time_s, (int, float)):
        text += f": iteration {format_seconds(time_s)}"
    if isinstance(phi, (int, float)):
        text += f", Phi {phi:.4f}"
    reason = item.get("reason")
    return f"{text} ({reason})" if reason else text


def _pair(said: float | None, seen: float | None, text: Any) -> str:
    if seen is None:
        return f"predicted {text(said)}, not measured" if said is not None else "not measured"
    if said is None:
        return f"measured {text(seen)}"
    error = (said - seen) / seen if seen else 0.0
    return f"predicted {text(said)}, measured {text(seen)} ({error:+.1%})"


def _plain(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _box(console: Console) -> Any:
    return ROUNDED if console.is_terminal else ASCII
