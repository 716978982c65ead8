"""The learned residual: XGBoost, one model with two outputs, ln(time ratio) and ln(memory ratio).

Trees cannot extrapolate, so the residual speaks only inside the measured range and only about what
the physical core got wrong. Saved as XGBoost JSON beside its feature names and a schema number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_memx.errors import BadInputError
from megatron_memx.profile.augment import Sample

SCHEMA = 1
FEATURES = (
    "ln_flops",
    "ln_moved_bytes",
    "ln_saved_bytes",
    "ln_tokens",
    "ln_seq_length",
    "ln_tp",
    "recompute",
    "unit",
)
_PARAMETERS: dict[str, Any] = {
    "tree_method": "hist",
    "multi_strategy": "multi_output_tree",
    "max_depth": 3,
    "eta": 0.1,
    "lambda": 1.0,
    "min_child_weight": 1.0,
    "base_score": 0.0,
    "objective": "reg:squarederror",
    "nthread": 1,
    "seed": 0,
    "verbosity": 0,
}
_ROUNDS = 60
# The residual never moves the core by more than this factor either way.
_MOST = float(np.log(1.5))


class Residual:
    """A fitted residual.

    Args:
        booster: The XGBoost model.
    """

    def __init__(self, booster: Any) -> None:
        self._booster = booster

    @classmethod
    def fit(cls, samples: Sequence[Sample]) -> Residual:
        """Fit on measured and interpolated samples."""
        import xgboost

        data = xgboost.DMatrix(
            np.stack([sample.features for sample in samples]),
            label=np.stack([sample.targets for sample in samples]),
            weight=np.array([sample.weight for sample in samples]),
            feature_names=list(FEATURES),
        )
        return cls(xgboost.train(_PARAMETERS, data, num_boost_round=_ROUNDS))

    def predict(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return ln(time ratio) and ln(memory ratio), one row for each row of ``features``."""
        import xgboost

        data = xgboost.DMatrix(features, feature_names=list(FEATURES))
        raw = np.asarray(self._booster.predict(data), dtype=np.float64).reshape(-1, 2)
        return np.clip(raw, -_MOST, _MOST)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as JSON with its feature names and schema number."""
        model = json.loads(bytes(self._booster.save_raw("json")).decode())
        data = {"schema": SCHEMA, "features": list(FEATURES), "model": model}
        file = Path(path)
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(data), encoding="utf-8")
        os.replace(temporary, file)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Residual:
        """Read what :meth:`save` wrote.

        Raises:
            BadInputError: Not such a file, another schema, or other features (they are named).
        """
        import xgboost

        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            schema, features, model = data["schema"], data["features"], data["model"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInputError(f"{path}: not a saved predictor: {error}") from error
        if schema != SCHEMA:
            raise BadInputError(f"{path}: predictor schema {schema}; this version reads {SCHEMA}")
        if features != list(FEATURES):
            wrong = [f"{a} for {b}" for a, b in zip(features, FEATURES, strict=False) if a != b]
            raise BadInputError(
                f"{path}: its features differ: {', '.join(wrong) or 'another number'}"
            )
        booster = xgboost.Booster()
        booster.load_model(bytearray(json.dumps(model).encode()))
        return cls(booster)
