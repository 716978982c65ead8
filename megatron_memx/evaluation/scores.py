"""How near predictions come to what was measured: errors, ranking, and who fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_FEWEST_TO_RANK = 3
_INTERVAL = 1.645


def errors(predicted_ln: Array, measured_ln: Array, sigma: Array) -> dict[str, float | int] | None:
    """Return errors over rows, as shares; None without rows.

    ``bias`` is the mean signed error; ``within_90`` the share inside the predicted 90 % interval.
    """
    if not len(predicted_ln):
        return None
    from scipy.stats import rankdata

    off = predicted_ln - measured_ln
    signed = np.exp(off) - 1
    ranks = rankdata(predicted_ln), rankdata(measured_ln)
    varied = all(np.ptp(values) > 0 for values in ranks)
    return {
        "rows": len(off),
        "mape": float(np.abs(signed).mean()),
        "median_ape": float(np.median(np.abs(signed))),
        "p95_ape": float(np.quantile(np.abs(signed), 0.95)),
        "bias": float(signed.mean()),
        "spearman": float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if varied else 0.0,
        "within_90": float((np.abs(off) <= _INTERVAL * sigma).mean()),
    }


def ranking(
    predicted_ln: Array, measured_ln: Array, groups: Sequence[object]
) -> dict[str, float | int | None]:
    """Return how well the best of each group of comparable rows is found.

    ``top1``: share of groups whose predicted best is the measured best; ``top5``: whose measured
    best is among the predicted five; ``regret``: how much slower the predicted best was.
    """
    members: dict[object, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    firsts, fives, regrets = [], [], []
    for rows in members.values():
        if len(rows) < _FEWEST_TO_RANK:
            continue
        by_said = sorted(rows, key=lambda i: predicted_ln[i])
        best = min(rows, key=lambda i: measured_ln[i])
        firsts.append(by_said[0] == best)
        fives.append(best in by_said[:5])
        regrets.append(float(np.exp(measured_ln[by_said[0]] - measured_ln[best]) - 1))
    if not firsts:
        return {"ranked_groups": 0, "top1": None, "top5": None, "regret": None}
    return {
        "ranked_groups": len(firsts),
        "top1": float(np.mean(firsts)),
        "top5": float(np.mean(fives)),
        "regret": float(np.mean(regrets)),
    }


def confusion(rows: Sequence[tuple[bool, bool, str]]) -> dict[str, Any]:
    """Return who was called out of memory.

    Args:
        rows: (failed, called out of memory, model) of each row. A failed row need not have run out
            of memory: sources do not always tell crashes apart.
    """
    ran = [called for failed, called, _ in rows if not failed]
    lost = [called for failed, called, _ in rows if failed]
    by_model: dict[str, list[bool]] = {}
    for failed, called, model in rows:
        if failed:
            by_model.setdefault(model, []).append(called)
    shares: Mapping[str, float] = {
        model: float(np.mean(values)) for model, values in sorted(by_model.items())
    }
    return {
        "ran": len(ran),
        "ran_called_fitting": float(1 - np.mean(ran)) if ran else None,
        "failed": len(lost),
        "failed_called_oom": float(np.mean(lost)) if lost else None,
        "failed_called_oom_by_model": shares,
    }
