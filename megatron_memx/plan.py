"""The plan: which ranks run which layers, how, and what that is predicted to cost.

Frozen data with a JSON form (``plan.json``, schema 1). A plan is untrusted input: ``Plan.load``
validates everything before anything else reads it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_memx.errors import BadInputError, LegalityError
from megatron_memx.parallel import ParallelSizes, Recompute
from megatron_memx.typed import checked

SCHEMA = 1
MAX_PLAN_BYTES = 64 * 1024**2
MAX_LAYERS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The layers of one virtual stage on one pipeline rank.

    Args:
        virtual_stage: Position among the chunks of this pipeline rank, from 0.
        first_layer: Global number of its first decoder layer, from 0.
        num_layers: Decoder layers; may be 0 only where Megatron allows an empty chunk.
        embedding: Whether the word embedding stands before the layers.
        loss: Whether the output layer and the loss stand behind them.
        mtp_num_layers: Multi-token-prediction layers behind the decoder layers.
        recompute: What this chunk recomputes.
    """

    virtual_stage: int
    first_layer: int
    num_layers: int
    embedding: bool = False
    loss: bool = False
    mtp_num_layers: int = 0
    recompute: Recompute = Recompute()

    @property
    def letters(self) -> str:
        """This chunk in Megatron's layout string, e.g. ``Ettt``."""
        return (
            "E" * self.embedding
            + "t" * self.num_layers
            + "m" * self.mtp_num_layers
            + "L" * self.loss
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePrediction:
    """Predicted cost of one stage; times are per micro-batch over all its chunks."""

    forward_s: float
    backward_s: float
    peak_memory_bytes: int
    peak_memory_high_bytes: int
    capacity_bytes: int
    memory_breakdown_bytes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a device without memory."""
        if self.capacity_bytes < 1:
            raise BadInputError(f"capacity_bytes is {self.capacity_bytes}: must be 1 or more")

    @property
    def utilisation(self) -> float:
        """Predicted peak over capacity."""
        return self.peak_memory_bytes / self.capacity_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One pipeline position: its launcher ranks, device kind and chunks.

    ``ranks`` are ranks as the launcher (torchrun) numbers them, in Megatron's order inside the
    stage: the k-th entry runs Megatron rank ``pipeline_rank * ranks_per_stage + k``.
    """

    pipeline_rank: int
    device_kind: str
    ranks: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    prediction: StagePrediction | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers over all chunks."""
        return sum(chunk.num_layers for chunk in self.chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Predicted cost of a whole iteration, with an interval, and on what it rests."""

    iteration_time_s: float
    iteration_time_low_s: float
    iteration_time_high_s: float
    peak_utilisation: float
    utilisation_variance: float
    phi: float
    rung: str = "predicted"
    basis: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A whole plan. Everything that launching needs and everything that a person asks about.

    Args:
        signature: Job signature (hex) that names this plan in the cache.
        model: Plain dictionary of the model shape (``ModelShape.to_dict()``).
        cluster: Plain dictionary of the cluster (``Cluster.to_dict()``).
        versions: ``megatron_core``, ``torch``, ``megatron_memx``.
        origin: What the predictions rest on: profile ids, catalogue, versions.
        objective: Weights and profile name, reference values of Phi.
        pins: Megatron options that the user wrote and the search kept.
        runners_up: Best other configurations, plain dictionaries.
        rejected: Families that lost, with reasons and counts.
    """

    signature: str
    parallel: ParallelSizes
    stages: tuple[Stage, ...]
    model: Mapping[str, Any]
    cluster: Mapping[str, Any]
    versions: Mapping[str, str] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    objective: Mapping[str, Any] = field(default_factory=dict)
    pins: Mapping[str, Any] = field(default_factory=dict)
    prediction: Prediction | None = None
    runners_up: tuple[Mapping[str, Any], ...] = ()
    rejected: tuple[Mapping[str, Any], ...] = ()
    created: str = ""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        """Refuse a plan whose ranks, stages, chunks or layers do not add up."""
        _check(self)

    @property
    def rank_order(self) -> tuple[int, ...]:
        """Launcher rank that runs Megatron rank ``i``, for each ``i``."""
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the whole model."""
        return sum(stage.num_layers for stage in self.stages)

    @property
    def layout(self) -> str:
        """Megatron's ``--pipeline-model-parallel-layout`` string.

        Slot k holds chunk ``k // pp`` of pipeline rank ``k % pp``.
        """
        vpp = self.parallel.virtual_pipeline_model_parallel_size
        return "|".join(stage.chunks[v].letters for v in range(vpp) for stage in self.stages)

    def megatron_rank(self, launcher_rank: int) -> int:
        """Return the Megatron rank that launcher rank ``launcher_rank`` runs."""
        return self.rank_order.index(launcher_rank)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types, in the order a person reads them."""
        data: dict[str, Any] = {"schema": self.schema, "signature": self.signature}
        data["created"] = self.created
        data["parallel"] = self.parallel.to_dict()
        data["layout"] = self.layout
        data["rank_order"] = list(self.rank_order)
        data["stages"] = [_stage_to_dict(stage) for stage in self.stages]
        data["prediction"] = dataclasses.asdict(self.prediction) if self.prediction else None
        for name in ("objective", "pins", "versions", "origin", "model", "cluster"):
            data[name] = dict(getattr(self, name))
        data["runners_up"] = [dict(item) for item in self.runners_up]
        data["rejected"] = [dict(item) for item in self.rejected]
        return data

    def to_json(self) -> str:
        """Return ``plan.json`` as text."""
        return json.dumps(self.to_dict(), indent=1, sort_keys=False) + "\n"

    @classmethod
    def from_dict(cls, data: Any, *, source: str = "plan") -> Plan:
        """Return the validated plan that :meth:`to_dict` wrote.

        Raises:
            BadInputError: Another schema, a missing or wrong field, sums that do not add up.
        """
        if not isinstance(data, dict):
            raise BadInputError(f"{source}: a plan is a JSON object, not {type(data).__name__}")
        if data.get("schema") != SCHEMA:
            raise BadInputError(
                f"{source}: plan schema {data.get('schema')!r}; this version reads {SCHEMA}",
                fix="plan again with this version of MemX",
                flag="--memx-replan",
            )
        try:
            plan = cls(
                signature=str(data["signature"]),
                created=str(data.get("created", "")),
                parallel=checked(ParallelSizes, data["parallel"], "parallel"),
                stages=tuple(
                    checked(Stage, stage, f"stages[{index}]")
                    for index, stage in enumerate(_list(data, "stages"))
                ),
                prediction=(
                    checked(Prediction, data["prediction"], "prediction")
                    if data.get("prediction") is not None
                    else None
                ),
                objective=_mapping(data, "objective"),
                pins=_mapping(data, "pins"),
                versions=_mapping(data, "versions"),
                origin=_mapping(data, "origin"),
                model=_mapping(data, "model"),
                cluster=_mapping(data, "cluster"),
                runners_up=_objects(data, "runners_up"),
                rejected=_objects(data, "rejected"),
            )
        except BadInputError as error:
            raise type(error)(
                f"{source}: {error.message}", fix=error.fix, flag=error.flag
            ) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInputError(
                f"{source}: not a valid plan of schema {SCHEMA}: {type(error).__name__}: {error}",
                fix="a file written by --memx-save-plan",
                flag="--memx-plan",
            ) from error
        for name in ("layout", "rank_order"):
            stated = data.get(name)
            actual = list(plan.rank_order) if name == "rank_order" else plan.layout
            if stated is not None and stated != actual:
                raise BadInputError(
                    f"{source}: {name} says {stated!r} but its stages say {actual!r}",
                    fix="a file written by --memx-save-plan, unedited",
                    flag="--memx-plan",
                )
        return plan

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read and validate a plan file.

        Raises:
            BadInputError: Unreadable, too large, not JSON, or not a valid plan.
        """
        file = Path(path)
        try:
            size = file.stat().st_size
            if size > MAX_PLAN_BYTES:
                raise BadInputError(
                    f"{file}: {size} bytes; a plan has at most {MAX_PLAN_BYTES}",
                    flag="--memx-plan",
                )
            data = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInputError(
                f"{file}: cannot be read: {error.strerror}", flag="--memx-plan"
            ) from error
        except (ValueError, RecursionError) as error:
            raise BadInputError(
                f"{file}: not JSON: {error}",
                fix="a file written by --memx-save-plan",
                flag="--memx-plan",
            ) from error
        return cls.from_dict(data, source=str(file))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``plan.json`` by atomic replace.

        Raises:
            BadInputError: The place cannot be written.
        """
        file = Path(path)
        temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(self.to_json(), encoding="utf-8")
            os.replace(temporary, file)
        except OSError as error:
            raise BadInputError(
                f"{file}: the plan cannot be written: {error.strerror}",
                fix="a place that you may write to, with room",
                flag="--memx-save-plan",
            ) from error


def _mapping(data: dict[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name, {})
    if not isinstance(value, dict):
        raise BadInputError(f"{name} must be an object, not {type(value).__name__}")
    return value


def _stage_to_dict(stage: Stage) -> dict[str, Any]:
    data = dataclasses.asdict(stage)
    data["ranks"] = list(stage.ranks)
    data["chunks"] = [
        {**dataclasses.asdict(chunk), "recompute": chunk.recompute.to_dict()}
        for chunk in stage.chunks
    ]
    return data


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    value = data.get(name, [])
    if not isinstance(value, list):
        raise BadInputError(f"{name} must be a list, not {type(value).__name__}")
    return value


def _objects(data: Mapping[str, Any], name: str) -> tuple[dict[str, Any], ...]:
    value = _list(data, name)
    if not all(isinstance(item, dict) for item in value):
        raise BadInputError(f"{name} must be a list of objects")
    return tuple(value)


def _check(plan: Plan) -> None:
    sizes, stages = plan.parallel, plan.stages
    pp = sizes.pipeline_model_parallel_size
    vpp = sizes.virtual_pipeline_model_parallel_size
    if plan.cluster:
        _objects(plan.cluster, "nodes")
    _mapping(dict(plan.objective), "weights")
    if len(stages) != pp:
        raise BadInputError(f"{len(stages)} stages for pipeline_model_parallel_size {pp}")
    for index, stage in enumerate(stages):
        if stage.pipeline_rank != index:
            raise BadInputError(f"stage {index} says pipeline_rank {stage.pipeline_rank}")
        if len(stage.ranks) != sizes.ranks_per_stage:
            raise BadInputError(
                f"stage {index} has {len(stage.ranks)} ranks; tp x cp x dp = "
                f"{sizes.ranks_per_stage}"
            )
        numbers = [chunk.virtual_stage for chunk in stage.chunks]
        if len(numbers) != vpp or numbers != list(range(vpp)):
            raise BadInputError(
                f"stage {index} has {len(stage.chunks)} chunks; virtual pipeline size is {vpp}"
            )
    if any(rank < 0 for rank in plan.rank_order):
        raise BadInputError(f"stage ranks {list(plan.rank_order)} must be 0 or more")
    order = sorted(plan.rank_order)
    if len(order) != sizes.world_size or order != list(range(sizes.world_size)):
        raise BadInputError(
            f"rank order {list(plan.rank_order)} is not a permutation of 0 to "
            f"{sizes.world_size - 1}"
        )
    expected = 0
    slots = [(v, p) for v in range(vpp) for p in range(pp)]
    for v, p in slots:
        chunk = stages[p].chunks[v]
        if not (0 <= chunk.num_layers <= MAX_LAYERS and 0 <= chunk.mtp_num_layers <= MAX_LAYERS):
            raise LegalityError(
                f"stage {p} chunk {v} holds {chunk.num_layers} layers and {chunk.mtp_num_layers} "
                f"MTP layers: 0 to {MAX_LAYERS} of each"
            )
        if chunk.num_layers and chunk.first_layer != expected:
            raise LegalityError(
                f"stage {p} chunk {v} starts at layer {chunk.first_layer}; the layers before it "
                f"end at {expected}: each layer must stand exactly once"
            )
        expected += chunk.num_layers
        if chunk.embedding != ((v, p) == slots[0]) or chunk.loss != ((v, p) == slots[-1]):
            raise LegalityError(
                f"stage {p} chunk {v}: Megatron builds the embedding on the first slot and the "
                "loss on the last, whatever a layout says"
            )
    stated = plan.model.get("num_layers")
    if stated is not None and stated != expected:
        raise LegalityError(
            f"the stages hold {expected} layers, the model has {stated}: "
            f"{abs(stated - expected)} layers {'unassigned' if stated > expected else 'too many'}"
        )
