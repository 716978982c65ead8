"""How near predictions come to what others measured, beside simpler predictors.

    python benchmarks/accuracy.py [--set NAME] [--runs FILE] [--json]

Every set is fitted on at most 2 % of its rows (8 at least), chosen by the minimal-set rule, and
scored on the others; the figures are others' GPU measurements (rung of proof: published; sources
and licences in `benchmarks/data/README.md`). Extrapolation leaves the largest model, or the
largest number of GPUs, out of what is fitted on, and is scored on those alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baselines import BASELINES, xgboost

from megatron_memx.evaluation.cases import Case
from megatron_memx.evaluation.evaluate import calibrate, cases_by_kind, part, predict, score
from megatron_memx.evaluation.runs import read_runs

_DATA = Path(__file__).resolve().parent / "data"
SETS = {
    "vTrain": ("vtrain.csv",),
    "nanotron": ("nanotron_ultrascale.csv", "nanotron_ultrascale_failed.csv"),
    "Sailor": ("sailor_gh200.csv",),
    "BigScience": ("bigscience.csv",),
    "MLPerf": ("mlperf_training.csv",),
}
_SHARE, _LEAST = 0.02, 8
PEERS = (
    "Published by others, each on its own data and split:",
    "  MemX paper (arXiv 2610.41525): MAPE 12.17 %",
    "  SimuMax on B200: memory 0.46 %, time 5.6 %",
    "  vTrain's own predictor on its 1,440 single-node runs: time 8.37 %",
)


def load(files: Sequence[Path]) -> tuple[dict[str, list[Case]], Counter[str]]:
    """Return the runs of files by device kind, and why the others were left out."""
    runs, skipped = [], Counter[str]()
    for path in files:
        found, left_out = read_runs(path)
        runs += found
        skipped += left_out
    return cases_by_kind(runs, skipped), skipped


def compare(cases: Sequence[Case]) -> dict[str, Any]:
    """Return the scores of every predictor on one device kind's runs."""
    ran = sum(not case.run.failed for case in cases)
    fit, test = part(cases, max(_LEAST, int(_SHARE * ran)), None)
    started = time.perf_counter()
    calibrated = calibrate(cases[0].kind, fit)
    fit_s = time.perf_counter() - started
    scores = {"MemX": score(predict(calibrated, test))}
    for name, baseline in BASELINES.items():
        scores[name] = score(baseline(fit, test))
    shuffled = [case for case in cases if not case.run.failed]
    random.Random(0).shuffle(shuffled)
    most = len(shuffled) * 4 // 5
    if most >= _LEAST and len(shuffled) > most:
        scores["XGBoost, 80 % of rows"] = score(xgboost(shuffled[:most], shuffled[most:]))
    return {
        "fit_rows": len(fit),
        "test_rows": len(test),
        "fit_s": fit_s,
        "scores": scores,
        "extrapolation": extrapolate(cases),
    }


def extrapolate(cases: Sequence[Case]) -> dict[str, Any]:
    """Return scores on the largest models and on the most GPUs, fitted on the rest."""
    found: dict[str, Any] = {}
    ran = [case for case in cases if not case.run.failed]
    for name, size in (
        ("largest model", lambda case: case.job.model.total_parameters()),
        ("most GPUs", lambda case: case.outer.sizes.world_size),
    ):
        # The largest by which enough rows are left out; near ones count as alike.
        most = 0.75 * sorted(map(size, ran))[-min(_LEAST, len(ran))]
        held = [case for case in ran if size(case) >= most]
        rest = [case for case in ran if size(case) < most]
        if len(rest) < 2 * _LEAST:
            continue
        fit, _ = part(rest, max(_LEAST, int(_SHARE * len(ran))), None)
        made = {"MemX": score(predict(calibrate(cases[0].kind, fit), held))}
        for other, baseline in BASELINES.items():
            made[other] = score(baseline(fit, held))
        found[name] = {"fit_rows": len(fit), "test_rows": len(held), "scores": made}
    return found


def main() -> int:
    """Compare on every set, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--set", choices=SETS, help="one of the sets kept here")
    parser.add_argument("--runs", type=Path, help="a runs.csv of your own in their place")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = [options.set] if options.set else list(SETS)
    chosen = {name: [_DATA / file for file in SETS[name]] for name in names}
    if options.runs:
        chosen = {options.runs.name: [options.runs]}
    result: dict[str, Any] = {}
    for name, files in chosen.items():
        groups, skipped = load(files)
        result[name] = {"skipped": dict(skipped), "kinds": {}}
        for kind, cases in groups.items():
            ran = sum(not case.run.failed for case in cases)
            if ran <= _LEAST:
                result[name]["skipped"][f"{kind}: {_LEAST} rows or fewer"] = len(cases)
                continue
            print(f"{name}, {kind}: {len(cases)} rows", file=sys.stderr)
            result[name]["kinds"][kind] = compare(cases)
    if options.json:
        print(json.dumps(result, indent=1))
        return 0
    for name, one in result.items():
        for kind, made in one["kinds"].items():
            _show(name, kind, made)
        for reason, count in sorted(one["skipped"].items()):
            print(f"  left out {count}: {reason}")
    print(*PEERS, sep="\n")
    return 0


def _show(name: str, kind: str, made: dict[str, Any]) -> None:
    print(
        f"{name}, {kind}: fitted on {made['fit_rows']} rows in {made['fit_s']:.1f} s, "
        f"scored on {made['test_rows']} [published]"
    )
    _table(made["scores"])
    fits = made["scores"]["MemX"]["fits"]
    if fits["ran"]:
        print(f"  of {fits['ran']} that ran, called fitting: {fits['ran_called_fitting']:.1%}")
    for model, share in fits["failed_called_oom_by_model"].items():
        print(f"  failed runs of {model} called out of memory: {share:.0%}")
    for what, inner in made["extrapolation"].items():
        print(f"  {what}, fitted on {inner['fit_rows']} others, scored on {inner['test_rows']}:")
        _table(inner["scores"], indent="    ")


def _table(scores: dict[str, Any], indent: str = "  ") -> None:
    for name, made in scores.items():
        words = []
        for quantity in ("time", "memory"):
            said = made[quantity]
            if said is not None:
                words.append(
                    f"{quantity} MAPE {said['mape']:7.2%}, median {said['median_ape']:6.2%}"
                )
        if made["top1"] is not None:
            words.append(f"Top-1 {made['top1']:4.0%}, regret {made['regret']:6.2%}")
        print(f"{indent}{name:22} {'; '.join(words)}")


if __name__ == "__main__":
    raise SystemExit(main())
