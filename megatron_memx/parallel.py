"""Parallel sizes and recomputation policies: frozen data, checked when made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megatron_memx.errors import BadInputError, LegalityError

# Far above any machine or batch: what is larger is a mistake, or a file made to hurt.
MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Recompute:
    """What one chunk recomputes in its backward pass, in Megatron's terms.

    Args:
        granularity: ``none``, ``selective`` or ``full``.
        method: ``block`` or ``uniform`` for full; None otherwise.
        num_layers: Layers recomputed (block) or layers in a group (uniform); None otherwise.
        modules: Modules recomputed under selective, e.g. ``("core_attn",)``.
    """

    granularity: str = "none"
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse combinations that Megatron refuses or loops on."""
        if self.granularity not in ("none", "selective", "full"):
            raise BadInputError(
                f"recompute granularity {self.granularity!r} is unknown",
                fix="none, selective or full",
                flag="--recompute-granularity",
            )
        if self.granularity == "full":
            if self.method not in ("block", "uniform"):
                raise BadInputError(
                    f"full recomputation with method {self.method!r}",
                    fix="block or uniform",
                    flag="--recompute-method",
                )
            least = 1 if self.method == "uniform" else 0
            if self.num_layers is None or self.num_layers < least:
                raise LegalityError(
                    f"full {self.method} recomputation of {self.num_layers} layers: needs at "
                    f"least {least} (Megatron loops for ever on uniform with 0)",
                    fix=f"{max(least, 1)} or more",
                    flag="--recompute-num-layers",
                )
        elif self.method is not None or self.num_layers is not None:
            raise LegalityError(
                f"{self.granularity} recomputation takes no method ({self.method}) and no number "
                f"of layers ({self.num_layers})",
                fix="leave both out, or use full",
                flag="--recompute-granularity",
            )
        if (self.granularity == "selective") != bool(self.modules):
            raise BadInputError(
                f"{self.granularity} recomputation with modules {list(self.modules)}",
                fix="at least one module, such as core_attn, with selective and none otherwise",
                flag="--recompute-modules",
            )

    @classmethod
    def selective(cls, *modules: str) -> Recompute:
        """Return selective recomputation of ``modules`` (default: core_attn)."""
        return cls(granularity="selective", modules=tuple(modules) or ("core_attn",))

    @classmethod
    def full(cls, method: str, num_layers: int) -> Recompute:
        """Return full recomputation by ``method`` over ``num_layers``."""
        return cls(granularity="full", method=method, num_layers=num_layers)

    @property
    def label(self) -> str:
        """Short text for tables, e.g. ``full block 2`` or ``selective core_attn``."""
        if self.granularity == "full":
            return f"full {self.method} {self.num_layers}"
        if self.granularity == "selective":
            return "selective " + "+".join(self.modules)
        return "none"

    def layer_classes(self, num_layers: int) -> tuple[str, ...]:
        """Return ``none``, ``selective`` or ``full`` for each of a chunk's layers.

        Megatron's block method recomputes the first ``num_layers`` layers of the chunk.
        """
        if self.granularity == "selective":
            return ("selective",) * num_layers
        if self.granularity == "none":
            return ("none",) * num_layers
        if self.method == "uniform":
            return ("full",) * num_layers
        recomputed = min(self.num_layers or 0, num_layers)
        return ("full",) * recomputed + ("none",) * (num_layers - recomputed)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        data = asdict(self)
        data["modules"] = list(self.modules)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recompute:
        """Return the policy that :meth:`to_dict` wrote."""
        return cls(
            granularity=data["granularity"],
            method=data.get("method"),
            num_layers=data.get("num_layers"),
            modules=tuple(data.get("modules") or ()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """Every parallel size of a run, spelled as Megatron spells it.

    ``data_parallel_size`` counts replicas of the pipeline; the world is tp x cp x pp x dp.
    ``expert_tensor_parallel_size`` is always explicit (Megatron defaults it to tp).
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    data_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1
    micro_batch_size: int = 1
    global_batch_size: int = 1
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes below one and a batch that does not divide."""
        for name, value in asdict(self).items():
            if isinstance(value, bool):
                continue
            if not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
                raise BadInputError(
                    f"{name} is {value!r}: must be a whole number of 1 or more, {MAX_SIZE} at most",
                    flag="--" + name.replace("_", "-"),
                )
        per_step = self.micro_batch_size * self.data_parallel_size
        if self.global_batch_size % per_step:
            low = self.global_batch_size // per_step * per_step
            near = [str(v) for v in (low, low + per_step) if v > 0]
            raise LegalityError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size} x data_parallel_size "
                f"{self.data_parallel_size} = {per_step}",
                fix=" or ".join(near),
                flag="--global-batch-size",
            )

    @property
    def world_size(self) -> int:
        """Number of ranks: tp x cp x pp x dp."""
        return (
            self.tensor_model_parallel_size
            * self.context_parallel_size
            * self.pipeline_model_parallel_size
            * self.data_parallel_size
        )

    @property
    def num_microbatches(self) -> int:
        """Micro-batches that each pipeline runs in an iteration."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of one pipeline position: tp x cp x dp."""
        return self.world_size // self.pipeline_model_parallel_size

    @property
    def label(self) -> str:
        """Short text, e.g. ``tp1 pp2 dp4 vpp1 mbs2``."""
        text = (
            f"tp{self.tensor_model_parallel_size} pp{self.pipeline_model_parallel_size} "
            f"dp{self.data_parallel_size}"
        )
        if self.context_parallel_size > 1:
            text += f" cp{self.context_parallel_size}"
        if self.expert_model_parallel_size > 1:
            text += f" ep{self.expert_model_parallel_size} etp{self.expert_tensor_parallel_size}"
        return f"{text} vpp{self.virtual_pipeline_model_parallel_size} mbs{self.micro_batch_size}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ParallelSizes:
        """Return the sizes that :meth:`to_dict` wrote."""
        return cls(**data)
