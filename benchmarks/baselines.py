"""Simple predictors that `accuracy.py` sets beside MemX, on the same rows.

Each takes the rows to fit on and the rows to predict, and answers ln of seconds and of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from xgboost import DMatrix, train

from megatron_memx.evaluation.cases import Case
from megatron_memx.evaluation.evaluate import MEMORY, TIME, Predicted, Quantity, calibrate, predict

Array = NDArray[np.float64]
# ln of seconds and of bytes of each row.
Answers = dict[str, Array]


def as_predicted(cases: Sequence[Case], said: Answers) -> list[Predicted]:
    """Return a baseline's answers in the form that is scored; it claims no interval."""
    return [
        Predicted(
            run=case.run,
            kind_bytes=case.memory_bytes,
            said={name: (float(values[index]), 1.0) for name, values in said.items()},
        )
        for index, case in enumerate(cases)
    ]


def prior(_fit: Sequence[Case], test: Sequence[Case]) -> list[Predicted]:
    """MemX's physical model with the terms assumed for devices that nobody measured."""
    return predict(calibrate(test[0].kind, []), test)


def xgboost(fit: Sequence[Case], test: Sequence[Case]) -> list[Predicted]:
    """Boosted trees on the raw columns, as the MemX paper and others use them."""
    said: Answers = {}
    for quantity in (TIME, MEMORY):
        rows = [case for case in fit if quantity.measured(case.run)]
        if not rows:
            said[quantity.name] = np.zeros(len(test))
            continue
        seen = DMatrix(_columns(rows), label=_measured(quantity, rows))
        model = train({"max_depth": 4, "eta": 0.1, "nthread": 1}, seen, num_boost_round=300)
        answers = model.predict(DMatrix(_columns(test)))
        said[quantity.name] = np.asarray(answers, dtype=np.float64)
    return as_predicted(test, said)


def _columns(cases: Sequence[Case]) -> Array:
    return np.array(
        [
            [
                *(case.job.model.num_layers, case.job.model.hidden_size),
                *(case.job.model.ffn_hidden_size, case.job.model.num_attention_heads),
                *(case.job.model.seq_length, case.outer.sizes.world_size),
                case.outer.sizes.tensor_model_parallel_size,
                case.outer.sizes.pipeline_model_parallel_size,
                case.outer.sizes.data_parallel_size,
                case.outer.sizes.micro_batch_size,
                case.outer.sizes.global_batch_size,
                case.outer.sizes.use_distributed_optimizer,
            ]
            for case in cases
        ],
        dtype=np.float64,
    )


def _measured(quantity: Quantity, cases: Sequence[Case]) -> Array:
    return np.log([quantity.measured(case.run) or 1.0 for case in cases])


def formula(fit: Sequence[Case], test: Sequence[Case]) -> list[Predicted]:
    """Closed formulas: FLOPs over a fitted utilisation with the bubble; Megatron's own report.

    Time: arXiv 2104.04473's FLOPs of an iteration. Memory: the estimate that Megatron-LM prints
    (``theoretical_memory_usage``): bytes for each parameter, and activations of arXiv 2205.05198.
    """
    rows = [case for case in fit if case.run.iter_time_s]
    ideal = np.log([_ideal_s(case) for case in test])
    if rows:
        ideal += np.median(_measured(TIME, rows) - np.log([_ideal_s(case) for case in rows]))
    return as_predicted(
        test, {"time": ideal, "memory": np.log([_reported_bytes(case) for case in test])}
    )


def _ideal_s(case: Case) -> float:
    model, sizes = case.job.model, case.outer.sizes
    h, s, layers = model.hidden_size, model.seq_length, model.num_layers
    passes = 96 if case.policy.granularity == "full" else 72
    flops = passes * sizes.global_batch_size * s * layers * h**2
    flops *= 1 + s / (6 * h) + model.vocab_size / (12 * layers * h)
    peak = case.cluster.kinds[case.kind].flops(case.job.train.precision)
    m, pp = sizes.num_microbatches, sizes.pipeline_model_parallel_size
    vpp = sizes.virtual_pipeline_model_parallel_size
    return float(flops / (sizes.world_size * peak) * (1 + (pp - 1) / (m * vpp)))


def _reported_bytes(case: Case) -> float:
    model, sizes = case.job.model, case.outer.sizes
    tp, pp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    h, layers = model.hidden_size, model.num_layers
    tokens = sizes.micro_batch_size * model.seq_length
    table = model.vocab_size * h
    bodies = model.total_parameters() - table * (1 + model.untie_embeddings_and_output_weights)
    both = pp == 1 and model.untie_embeddings_and_output_weights
    parameters = (bodies / pp + table * (1 + both)) / tp
    sharded = sizes.use_distributed_optimizer
    static = parameters * (6 + 12 / sizes.data_parallel_size if sharded else 18)
    if case.policy.granularity == "full":
        each = 2.0 * tokens * h
    else:
        each = tokens * h * (18 + 4 * model.ffn_hidden_size / h)
    activations = each * layers + tokens * (8 + h) * pp
    vpp = sizes.virtual_pipeline_model_parallel_size
    if vpp > 1:
        activations *= 1 + (pp - 1) / (pp * vpp)
    elif pp > 1:
        activations *= min(1.0, sizes.num_microbatches / pp)
    if pp == 1:
        activations += tokens * h * 4 * (1 + model.vocab_size / h)
    return float(static + activations / tp)


BASELINES: dict[str, Callable[[Sequence[Case], Sequence[Case]], list[Predicted]]] = {
    "prior alone": prior,
    "XGBoost alone": xgboost,
    "closed formula": formula,
}
