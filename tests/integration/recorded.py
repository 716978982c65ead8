"""The example's pre-training with the raw results of each step written down, bit for bit.

Runs under stock torchrun and under MemX alike, so that both can be compared. TEST_RECORD_DIR says
where; TEST_DUMP_STATE also writes the optimizer's state tensors after that many steps (``start``:
before the first).
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


def _names(model: Any) -> dict[Any, str]:
    """Return parameter -> name, with layers numbered over the whole model."""
    names = {}
    for chunk in model:
        inner = chunk
        while hasattr(inner, "module"):
            inner = inner.module
        numbers = [layer.layer_number for layer in inner.decoder.layers]
        for name, parameter in inner.named_parameters():
            parts = name.split(".")
            if name.startswith("decoder.layers."):
                parts[2] = str(numbers[int(parts[2])])
            names[parameter] = ".".join(parts)
    return names


def _state(model: Any, optimizer: Any) -> list[dict[str, Any]]:
    """Return every piece of parameter and optimizer state that this rank holds."""
    pieces = []
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        sharded = hasattr(each, "model_param_group_index_map")
        for parameter, name in _names(model).items():
            if sharded:
                if parameter not in each.model_param_group_index_map:
                    continue
                group, place = each.model_param_group_index_map[parameter]
                main = each.optimizer.param_groups[group]["params"][place]
                span = each._get_model_param_range_map(parameter)["param"]
                start, end = span.start, span.end
            else:
                main, start, end = parameter, 0, parameter.numel()
            state = each.optimizer.state.get(main, {})
            values = {"param": main, **{k: state[k] for k in ("exp_avg", "exp_avg_sq")}}
            pieces.append(
                {
                    "name": name,
                    "start": start,
                    "end": end,
                    "numel": parameter.numel(),
                    "step": float(state["step"]),
                    **{k: v.detach().clone().flatten().float() for k, v in values.items()},
                }
            )
    return pieces


def hybrid_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Build this rank's part of Megatron's HybridModel, as its pretrain_hybrid.py does."""
    from megatron.core.models.hybrid import hybrid_layer_specs
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    return HybridModel(
        config=config or core_transformer_config_from_args(args),
        hybrid_stack_spec=hybrid_layer_specs.hybrid_stack_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


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
                torch.save(_state(model, optimizer), folder / f"state_{rank}.pt")
        result = original(forward_step, data_iterator, model, optimizer, *args, **kwargs)
        losses = {
            name: [_hex(item) for item in value.double().flatten()]
            for name, value in result[0].items()
        }
        record["steps"].append({"losses": losses, "grad_norm": _hex(result[5])})
        if dump == str(len(record["steps"])):
            torch.save(_state(model, optimizer), folder / f"state_{rank}.pt")
        write()
        return result

    training.train_step = train_step
    path = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
    spec = importlib.util.spec_from_file_location("example_pretrain_gpt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if os.environ.get("TEST_HYBRID"):
        module.model_provider = hybrid_provider
    module.main()


if __name__ == "__main__":
    main()
