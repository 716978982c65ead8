"""The example's pre-training with the raw results of each step written down, bit for bit.

Runs under stock torchrun and under MemX alike, so that both can be compared. TEST_RECORD_DIR says
where; TEST_DUMP_STATE also writes the optimizer's state tensors after the last step (or, with the
value ``start``, before the first).
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch


def _hex(value: Any) -> str | None:
    return None if value is None else float(value).hex()


def _state(model: Any, optimizer: Any) -> dict[str, list[str]]:
    """Return parameter name -> checksums of its values and moments, by whole tensors."""
    names = {}
    for chunk in model:
        inner = chunk
        while hasattr(inner, "module"):
            inner = inner.module
        for name, parameter in inner.named_parameters():
            names[parameter] = f"{name}"
    found: dict[str, list[str]] = {}
    optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
    for each in optimizers:
        torch_optimizer = each.optimizer
        for group in torch_optimizer.param_groups:
            for parameter in group["params"]:
                state = torch_optimizer.state.get(parameter, {})
                key = names.get(parameter, f"shard{len(found)}")
                values = [parameter, *(state[k] for k in ("exp_avg", "exp_avg_sq") if k in state)]
                found[key] = [_digest(value) for value in values]
                if "step" in state:
                    found[key].append(_hex(state["step"]))
    return found


def _digest(tensor: Any) -> str:
    import hashlib

    data = tensor.detach().to(torch.float32).contiguous().cpu().numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def main() -> None:
    import megatron.training.training as training

    folder = Path(os.environ["TEST_RECORD_DIR"])
    rank = int(os.environ["RANK"])
    record: dict[str, Any] = {"rank": rank, "steps": [], "layers": [], "pid": os.getpid()}
    original = training.train_step
    dump = os.environ.get("TEST_DUMP_STATE")

    def write() -> None:
        (folder / f"steps_{rank}.json").write_text(json.dumps(record))

    @functools.wraps(original)
    def train_step(forward_step, data_iterator, model, optimizer, *args: Any, **kwargs: Any) -> Any:
        if not record["layers"]:
            for chunk in model:
                inner = chunk
                while hasattr(inner, "module"):
                    inner = inner.module
                config = inner.decoder.config
                record["layers"].append(
                    [
                        len(inner.decoder.layers),
                        config.recompute_granularity,
                        config.recompute_method,
                        config.recompute_num_layers,
                    ]
                )
            if dump == "start":
                record["state"] = _state(model, optimizer)
                write()
        result = original(forward_step, data_iterator, model, optimizer, *args, **kwargs)
        losses = {
            name: [_hex(item) for item in value.double().flatten()]
            for name, value in result[0].items()
        }
        record["steps"].append({"losses": losses, "grad_norm": _hex(result[5])})
        if dump == "end":
            record["state"] = _state(model, optimizer)
        write()
        return result

    training.train_step = train_step
    path = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
    spec = importlib.util.spec_from_file_location("example_pretrain_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()


if __name__ == "__main__":
    main()
