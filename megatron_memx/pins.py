"""The parallel and recompute options that a user wrote, as constraints of the search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_memx.errors import BadInputError, LegalityError
from megatron_memx.job import Job
from megatron_memx.legality import Facts, check_recompute, uniform_group_legal
from megatron_memx.parallel import Recompute

_FIRST, _LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraints:
    """What the search must keep; None: free.

    Args:
        split: Decoder layers of each slot (slot k: chunk ``k // pp`` of rank ``k % pp``).
        recompute: One policy for every chunk.
        warnings: Options that are kept although they gain nothing.
    """

    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    etp: int | None = None
    vpp: int | None = None
    micro_batch_size: int | None = None
    split: tuple[int, ...] | None = None
    recompute: Recompute | None = None
    sequence_parallel: bool | None = None
    use_distributed_optimizer: bool | None = None
    warnings: tuple[str, ...] = ()


def constraints(job: Job, world_size: int, facts: Facts) -> Constraints:
    """Return the user's pins as constraints.

    Raises:
        LegalityError: Pins that contradict each other, the model, the world or Megatron.
    """
    pins = job.pins
    tp, cp = pins.get("tensor_model_parallel_size"), pins.get("context_parallel_size")
    pp, vpp, split = _split(job)
    ep, etp = pins.get("expert_model_parallel_size"), pins.get("expert_tensor_parallel_size")
    _check_world(world_size, tp=tp, cp=cp, pp=pp)
    _check_batch(job, world_size, tp=tp, cp=cp, pp=pp)
    if job.model.moe is not None:
        _check_experts(world_size, tp=tp, pp=pp, ep=ep, etp=etp)
    recompute = _recompute(pins)
    warnings: list[str] = []
    if recompute is not None:
        for violation in check_recompute(job, recompute, facts):
            raise violation.error()
        for layers in split or (job.model.num_layers,) * (pp == 1):
            violation_of_group = uniform_group_legal(recompute, layers, facts)
            if violation_of_group is not None:
                raise violation_of_group.error()
        if "core_attn" in recompute.modules and job.model.flash_attention:
            warnings.append(
                "recomputing core_attn saves nothing with fused or flash attention, which already "
                "recomputes it; kept because you wrote it (--recompute-modules)"
            )
    return Constraints(
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        etp=etp,
        vpp=vpp,
        micro_batch_size=pins.get("micro_batch_size"),
        split=split,
        recompute=recompute,
        sequence_parallel=pins.get("sequence_parallel"),
        use_distributed_optimizer=pins.get("use_distributed_optimizer"),
        warnings=tuple(warnings),
    )


def _recompute(pins: Mapping[str, Any]) -> Recompute | None:
    granularity = pins.get("recompute_granularity")
    if pins.get("recompute_activations"):
        if granularity == "full":
            raise LegalityError(
                "--recompute-activations means --recompute-granularity selective, and "
                "--recompute-granularity full was given too",
                fix="leave --recompute-activations out",
                flag="--recompute-activations",
            )
        granularity = "selective"
    method, number = pins.get("recompute_method"), pins.get("recompute_num_layers")
    modules = tuple(pins.get("recompute_modules", ()))
    if granularity is None:
        if method or number is not None or modules:
            raise LegalityError(
                "--recompute-method, --recompute-num-layers and --recompute-modules do nothing "
                "without --recompute-granularity",
                fix="--recompute-granularity full or selective",
                flag="--recompute-granularity",
            )
        return None
    if granularity == "selective" and not modules:
        modules = ("core_attn",)
    return Recompute(
        granularity=granularity,
        method=method,
        num_layers=number,
        modules=modules if granularity == "selective" else (),
    )


def _split(job: Job) -> tuple[int | None, int | None, tuple[int, ...] | None]:
    """Return (pp, vpp, layers of each slot) as far as the pins say."""
    pins, layers = job.pins, job.model.num_layers
    pp = pins.get("pipeline_model_parallel_size")
    layout = pins.get("pipeline_model_parallel_layout")
    if layout is not None:
        return _layout_split(job, layout, pp)
    if job.model.hybrid and "|" in job.typed.get("hybrid_layer_pattern", ""):
        return _pattern_split(job, pp)
    first, last = pins.get(_FIRST), pins.get(_LAST)
    per_chunk = pins.get("num_layers_per_virtual_pipeline_stage")
    vpp = pins.get("num_virtual_stages_per_pipeline_rank")
    edges = {name: pins[name] for name in (_FIRST, _LAST) if name in pins}
    for name, value in edges.items():
        flag = "--" + name.replace("_", "-")
        if pp is None or pp == 1:
            raise LegalityError(
                f"{flag} {value} with pp {pp or 1}: one stage holds all {layers} layers",
                fix=f"leave {flag} out, or --pipeline-model-parallel-size 2 or more",
                flag=flag,
            )
        if value >= layers:
            raise LegalityError(
                f"{flag} {value}: the model has {layers} layers and pp is {pp}",
                fix=str(max(1, layers // pp)),
                flag=flag,
            )
    if pp is None:
        if per_chunk or vpp:
            raise LegalityError(
                "virtual stages were given without the pipeline size",
                fix="--pipeline-model-parallel-size N",
                flag="--pipeline-model-parallel-size",
            )
        return None, None, None
    if layers < pp:
        raise LegalityError(
            f"pp {pp} for {layers} layers: each stage needs at least one",
            fix=str(layers),
            flag="--pipeline-model-parallel-size",
        )
    if per_chunk is not None:
        vpp = _virtual_size(layers, pp, per_chunk, edges)
    if edges:
        return pp, vpp or 1, _edge_split(layers, pp, vpp or 1, first, last)
    if vpp is not None and vpp > 1:
        if layers % pp or layers // pp % vpp:
            _not_multiple(layers, pp, vpp, "--num-virtual-stages-per-pipeline-rank")
        return pp, vpp, (layers // (pp * vpp),) * (pp * vpp)
    return pp, vpp, None


def _virtual_size(layers: int, pp: int, per_chunk: int, edges: Mapping[str, int]) -> int:
    flag = "--num-layers-per-virtual-pipeline-stage"
    if edges:
        raise LegalityError(
            f"{flag} excludes {', '.join('--' + name.replace('_', '-') for name in edges)}",
            fix="--num-virtual-stages-per-pipeline-rank",
            flag=flag,
        )
    if layers % pp or layers // pp % per_chunk:
        each = f"{layers // pp} a stage" if layers % pp == 0 else f"{layers} over {pp} stages"
        near = [d for d in range(1, layers // pp + 1) if layers % (pp * d) == 0]
        raise LegalityError(
            f"{layers} layers on {pp} stages are {each}, not a multiple of {per_chunk} a virtual "
            "stage",
            fix=f"one of {', '.join(map(str, near))}" if near else "--auto-parallel without it",
            flag=flag,
        )
    return layers // pp // per_chunk


def _edge_split(
    layers: int, pp: int, vpp: int, first: int | None, last: int | None
) -> tuple[int, ...]:
    middle = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    flag = "--decoder-first-pipeline-num-layers" if first else "--decoder-last-pipeline-num-layers"
    if rest < 0 or (middle == 0 and rest != 0):
        raise LegalityError(
            f"first {first} and last {last} on {pp} stages leave {rest} layers unassigned of "
            f"{layers}",
            fix=f"first {layers - (last or 0)}" if middle == 0 else "smaller edges",
            flag=flag,
        )
    if middle and (rest % middle or rest == 0):
        near = f"{rest // middle * middle} or {(rest // middle + 1) * middle}"
        raise LegalityError(
            f"{rest} layers for {middle} middle stages: must be a multiple, 1 or more each",
            fix=f"edges that leave {near}, or an explicit layout",
            flag=flag,
        )
    ranks = [first] * (first is not None)
    ranks += [rest // middle] * middle if middle else []
    ranks += [last] * (last is not None)
    counts = [int(value or 0) for value in ranks]
    for rank, count in enumerate(counts):
        if count % vpp:
            raise LegalityError(
                f"stage {rank} holds {count} layers, not a multiple of {vpp} virtual stages",
                fix="an explicit layout",
                flag="--pipeline-model-parallel-layout",
            )
    return tuple(count // vpp for _ in range(vpp) for count in counts)


def _pattern_split(job: Job, pp: int | None) -> tuple[int, int, tuple[int, ...]]:
    """Return the split that the bars of a hybrid pattern say."""
    pattern, flag = job.typed["hybrid_layer_pattern"], "--hybrid-layer-pattern"
    segments = pattern.split("|")
    if pp != len(segments):
        raise LegalityError(
            f"{flag} {pattern!r} has {len(segments)} segments, pp is {pp or 'not given'}: MemX "
            "plans one segment a pipeline rank",
            fix=f"--pipeline-model-parallel-size {len(segments)}, or the pattern without bars",
            flag="--pipeline-model-parallel-size",
        )
    return len(segments), 1, tuple(segment.count("*") for segment in segments)


def _layout_split(job: Job, layout: str, pp: int | None) -> tuple[int, int, tuple[int, ...]]:
    flag = "--pipeline-model-parallel-layout"
    slots = layout.split("|")
    if pp is None:
        raise LegalityError(
            f"layout {layout} without the pipeline size",
            fix=f"--pipeline-model-parallel-size {len(slots)}",
            flag="--pipeline-model-parallel-size",
        )
    if len(slots) % pp:
        raise LegalityError(
            f"layout {layout} has {len(slots)} slots, not a multiple of pp {pp}", flag=flag
        )
    letters = layout.replace("|", "")
    if (
        letters.count("E") != 1
        or letters.count("L") != 1
        or letters[0] != "E"
        or (letters[-1] != "L")
    ):
        raise LegalityError(
            f"layout {layout}: one E stands first and one L last",
            fix="E" + layout.replace("E", "").replace("L", "") + "L",
            flag=flag,
        )
    if "E" not in slots[0] or "L" not in slots[-1]:
        raise LegalityError(
            f"layout {layout}: Megatron builds the embedding in the first slot and the loss in "
            "the last, whatever the layout says",
            fix="E in the first slot, L in the last",
            flag=flag,
        )
    decoders = letters.count("t")
    if decoders != job.model.num_layers:
        gap = job.model.num_layers - decoders
        raise LegalityError(
            f"layout {layout} holds {decoders} layers, the model has {job.model.num_layers}: "
            f"{abs(gap)} layers {'unassigned' if gap > 0 else 'too many'}",
            flag=flag,
        )
    mtp = letters.count("m")
    if mtp != job.model.mtp_num_layers or (mtp and "m" * mtp not in slots[-1]):
        raise LegalityError(
            f"layout {layout} holds {mtp} MTP layers, the model has {job.model.mtp_num_layers}; "
            "they stand together in the last slot",
            flag=flag,
        )
    return pp, len(slots) // pp, tuple(slot.count("t") for slot in slots)


def _not_multiple(layers: int, pp: int, vpp: int, flag: str) -> None:
    each = f"{layers // pp} a stage" if layers % pp == 0 else f"{layers} over {pp} stages"
    raise LegalityError(
        f"{layers} layers on {pp} stages are {each}, not a multiple of {vpp} virtual stages",
        fix="a divisor, or --auto-parallel without it",
        flag=flag,
    )


def _check_world(world: int, **sizes: int | None) -> None:
    given = {name: value for name, value in sizes.items() if value}
    product = 1
    for value in given.values():
        product *= value
    if world % product:
        text = " x ".join(f"{name} {value}" for name, value in given.items())
        divisors = [d for d in range(1, world + 1) if world % d == 0]
        raise LegalityError(
            f"{text} = {product} does not divide the {world} ranks that are launched",
            fix=f"sizes whose product is one of {', '.join(map(str, divisors))}, or "
            f"{product} ranks",
            flag="--nproc-per-node",
        )


def _check_batch(job: Job, world: int, **sizes: int | None) -> None:
    """Refuse a batch that no data-parallel size left by the pins divides."""
    batch = job.train.global_batch_size
    mbs = job.pins.get("micro_batch_size", 1)
    fixed = 1
    for value in sizes.values():
        fixed *= value or 1
    if all(sizes.get(name) for name in ("tp", "pp")):
        candidates = [world // fixed]
    else:
        rest = world // fixed
        candidates = [d for d in range(1, rest + 1) if rest % d == 0]
    if any(batch % (mbs * dp) == 0 for dp in candidates):
        return
    dp = max(candidates)
    step = mbs * dp
    low = batch // step * step
    near = " or ".join(str(value) for value in (low, low + step) if value)
    fewer = [
        w for w in range(world - 1, 0, -1) if w % fixed == 0 and batch % (mbs * (w // fixed)) == 0
    ]
    also = f", or {fewer[0]} ranks" if fewer else ""
    raise LegalityError(
        f"global_batch_size {batch} is not a multiple of micro_batch_size {mbs} x "
        f"data_parallel_size {dp} = {step}",
        fix=f"{near}{also}",
        flag="--global-batch-size",
    )


def _check_experts(
    world: int, *, tp: int | None, pp: int | None, ep: int | None, etp: int | None
) -> None:
    if ep is None:
        return
    tensor = etp if etp is not None else (tp or 1)
    product = tensor * ep * (pp or 1)
    if world % product:
        origin = "given" if etp is not None else "defaulted to tp"
        raise LegalityError(
            f"expert sizes: etp {tensor} ({origin}) x ep {ep} (given) x pp {pp or 1} "
            f"({'given' if pp else 'default'}) = {product} does not divide the {world} ranks",
            fix="--expert-tensor-parallel-size 1, or a smaller ep",
            flag="--expert-tensor-parallel-size",
        )


def user_facts(*, megatron: str, transformer_impl: str) -> Facts:
    """Return what this environment has, found without importing it."""
    from importlib.util import find_spec

    if transformer_impl not in ("local", "transformer_engine", "inference_optimized"):
        raise BadInputError(
            f"--transformer-impl {transformer_impl!r} is unknown",
            fix="transformer_engine or local",
            flag="--transformer-impl",
        )
    engine = find_spec("transformer_engine") is not None
    return Facts(
        megatron=megatron,
        transformer_engine=engine,
        fused_norms=engine or find_spec("apex") is not None,
    )
