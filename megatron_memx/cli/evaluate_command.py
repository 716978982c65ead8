"""``memx evaluate``: how near predictions come to measured runs, after fitting on a few of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_memx.cli.parsing import CommandParser, print_json
from megatron_memx.errors import BadInputError

DEFAULT_BUDGET = 8


def run(arguments: Sequence[str]) -> int:
    """Run ``memx evaluate`` and return its exit code.

    Raises:
        BadInputError: A file or an option cannot be read.
    """
    parser = CommandParser(
        "evaluate",
        "Fit on the rows of a file of measured runs that tell most, predict and score the others.",
        "memx evaluate --runs runs.csv --budget 8",
    )
    parser.add_argument("--runs", required=True, metavar="FILE", help="measured runs, CSV")
    parser.add_argument(
        "--budget",
        type=int,
        metavar="N",
        help=f"rows to fit on, in each group ({DEFAULT_BUDGET})",
    )
    parser.add_argument("--fit-runs", metavar="FILE", help="fit on the rows of this file instead")
    parser.add_argument(
        "--by", default="", metavar="COLUMNS", help="group by these columns: source,gpu,model"
    )
    parser.add_argument(
        "--save",
        metavar="FILE",
        help="write what the fit says of each device kind, for memx plan --calibration",
    )
    options = parser.parse_args(list(arguments))
    if options.budget is not None and options.fit_runs:
        raise BadInputError(
            "--budget and --fit-runs both say what to fit on",
            fix="leave one of them out",
            flag="--budget",
        )
    budget = DEFAULT_BUDGET if options.budget is None else options.budget
    if budget < 0:
        raise BadInputError(f"--budget {budget}: must be 0 or more", fix="0", flag="--budget")
    from megatron_memx.cost.calibration import Calibration, save_calibrations
    from megatron_memx.evaluation.evaluate import evaluate
    from megatron_memx.evaluation.runs import COLUMNS, read_runs

    columns = [name.strip() for name in options.by.split(",") if name.strip()]
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown:
        raise BadInputError(
            f"--by {options.by}: no column {', '.join(unknown)}",
            fix="source,gpu,model",
            flag="--by",
        )
    runs, skipped = read_runs(options.runs)
    fit_runs = read_runs(options.fit_runs)[0] if options.fit_runs else None
    if options.save and columns:
        raise BadInputError(
            "--save with --by: a device kind has one calibration",
            fix="leave one of them out",
            flag="--by",
        )
    made: list[Calibration] = []
    result = evaluate(
        runs, budget=budget, fit_runs=fit_runs, by=columns, skipped=skipped, calibrations=made
    )
    if options.save:
        name = Path(options.fit_runs or options.runs).name
        save_calibrations(
            options.save, [replace(item, basis=f"{item.basis} of {name}") for item in made]
        )
    if options.json:
        print_json(result)
    else:
        _show(result)
    return 0


def _show(result: dict[str, Any]) -> None:
    print(f"fitted on {result['fit_rows']} measured rows, scored on {result['test_rows']} others")
    for name, count in sorted(result["skipped"].items()):
        print(f"  left out {count}: {name}")
    for name, count in sorted(result["assumed"].items()):
        print(f"  assumed for {count} rows: {name}")
    for note in result["notes"]:
        print(f"  {note}")
    for name in ("time", "memory"):
        scores = result[name]
        if scores is None:
            print(f"{name}: no row tells")
            continue
        print(
            f"{name} (predicted against measured, {scores['rows']} rows): "
            f"MAPE {scores['mape']:.2%}, median {scores['median_ape']:.2%}, "
            f"95th percentile {scores['p95_ape']:.2%}, bias {scores['bias']:+.2%}, "
            f"rank correlation {scores['spearman']:.3f}, "
            f"{scores['within_90']:.0%} within the 90 % interval"
        )
    if result["top1"] is not None:
        print(
            f"best of comparable rows: Top-1 {result['top1']:.0%}, Top-5 {result['top5']:.0%}, "
            f"mean regret {result['regret']:.2%}"
        )
    fits = result["fits"]
    if fits["ran"]:
        print(f"ran: {fits['ran']}, called fitting {fits['ran_called_fitting']:.1%}")
    if fits["failed"]:
        print(f"failed: {fits['failed']}, called out of memory {fits['failed_called_oom']:.1%}")
