"""A measured run in the planner's terms: job, cluster, parallel sizes, stages.

What a source left blank is filled by a :class:`Setting`; each filled field is named, so that a
report can count on how many rows an assumption rests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_memx.cluster import Cluster, Node
from megatron_memx.cluster_file import catalogue, catalogue_link
from megatron_memx.errors import MemXError
from megatron_memx.evaluation.runs import Run
from megatron_memx.evaluation.splits import stage_layers
from megatron_memx.job import Job, TrainSettings
from megatron_memx.model import ModelShape, MoEShape
from megatron_memx.parallel import ParallelSizes, Recompute
from megatron_memx.search.space import Outer

_LLAMA = re.compile(
    r"llama|mistral|mixtral|qwen|deepseek|yi-|baichuan|internlm|gemma|moonlight", re.IGNORECASE
)
_DEFAULT_VOCABULARY = {False: 51200, True: 32000}
_GPUS_PER_NODE = 8
_FULLY_SHARDED = re.compile(r"fsdp|^3$", re.IGNORECASE)
_LOW_PRECISION = re.compile(r"fp8|float8|fp4", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is assumed where a source is silent.

    Args:
        recompute: ``none``, ``selective`` or ``full``.
        flash: Whether attention is a fused kernel.
        single_gradients: Whether gradients accumulate in single precision beside 16-bit ones.
        overlap: Whether the gradient reduction overlaps the backward pass.
        sharded: Whether the optimizer's states are sharded over data parallel.
        precision: Type of weights and activations.
        dropout: Whether the model drops out (keeps masks).
        memory_of: Whose peak a source prints: the ``fullest`` pipeline rank's or the ``last``'s.
    """

    recompute: str = "none"
    flash: bool = True
    single_gradients: bool = True
    overlap: bool = False
    sharded: bool = False
    precision: str = "bf16"
    dropout: bool = False
    memory_of: str = "fullest"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run, ready for the planner's engine.

    Args:
        layers: Decoder layers of each pipeline rank's chunks: ``layers[rank][virtual stage]``.
    """

    run: Run
    job: Job
    cluster: Cluster
    outer: Outer
    layers: tuple[tuple[int, ...], ...]
    policy: Recompute
    assumed: tuple[str, ...]
    memory_of: str = "fullest"

    @property
    def kind(self) -> str:
        """The device kind."""
        return self.outer.kinds[0]

    @property
    def memory_bytes(self) -> int:
        """Memory of one device."""
        return self.cluster.kinds[self.kind].memory_bytes


class UnusableError(Exception):
    """A run that cannot be put in the planner's terms; the text is the reason."""


def make_case(run: Run, setting: Setting) -> Case:
    """Return the case of ``run``.

    Raises:
        UnusableError: A size is missing that cannot be assumed, or the run is of a kind that is
            not modelled.
    """
    try:
        return _make(run, setting)
    except MemXError as error:
        raise UnusableError(str(error).splitlines()[0]) from error


def _make(run: Run, setting: Setting) -> Case:
    assumed: list[str] = []
    if _FULLY_SHARDED.search(run.zero):
        raise UnusableError("fully sharded data parallelism (ZeRO-3, FSDP) is not modelled")
    if _LOW_PRECISION.search(run.precision):
        raise UnusableError("8-bit products are not modelled")
    model = _model(run, setting, assumed)
    sizes = _sizes(run, setting, assumed)
    train = _train(run, setting, assumed)
    cluster = _cluster(run, assumed)
    world, pp = sizes.world_size, sizes.pipeline_model_parallel_size
    per_stage = world // pp
    kind = cluster.used_kinds[0]
    if pp > 1 and run.peak_mem_gib:
        assumed.append("memory_of")
    layers = stage_layers(run, model, sizes)
    return Case(
        run=run,
        job=Job(model=model, train=train),
        cluster=cluster,
        outer=Outer(
            sizes=sizes,
            kinds=(kind,) * pp,
            ranks=tuple(tuple(range(i * per_stage, (i + 1) * per_stage)) for i in range(pp)),
        ),
        layers=layers,
        policy=_policy(run, setting, assumed, max(map(max, layers))),
        assumed=tuple(assumed),
        memory_of=setting.memory_of,
    )


def _model(run: Run, setting: Setting, assumed: list[str]) -> ModelShape:
    assert run.hidden and run.layers and run.heads and run.seq
    llama = bool(_LLAMA.search(run.model))
    if run.vocab is None:
        assumed.append("vocab")
    if run.ffn is None:
        assumed.append("ffn")
    if not run.flash:
        assumed.append("flash")
    given = run.flash.lower()
    fused = setting.flash if not given else not given.startswith(("none", "false", "unfused"))
    ffn = run.ffn or (round(run.hidden * 8 / 3 / 256) * 256 if llama else 4 * run.hidden)
    moe = None
    if run.moe_experts and run.moe_experts > 1:
        moe = MoEShape(
            num_experts=run.moe_experts,
            router_topk=run.moe_topk or 2,
            ffn_hidden_size=ffn,
            layer_pattern=(True,) * run.layers,
        )
    drop = 0.1 if setting.dropout and not llama else 0.0
    shape = ModelShape(
        num_layers=run.layers,
        hidden_size=run.hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=run.heads,
        num_query_groups=run.kv_heads or run.heads,
        kv_channels=max(1, run.hidden // run.heads),
        seq_length=run.seq,
        max_position_embeddings=run.seq,
        vocab_size=run.vocab or _DEFAULT_VOCABULARY[llama],
        position_embedding_type="rope" if llama else "learned_absolute",
        swiglu=llama,
        add_bias_linear=not llama,
        normalization="RMSNorm" if llama else "LayerNorm",
        untie_embeddings_and_output_weights=llama,
        attention_backend="flash" if fused else "unfused",
        hidden_dropout=drop,
        attention_dropout=drop,
        moe=moe,
    )
    return _nearest(shape, run.params_b)


def _nearest(shape: ModelShape, params_b: float | None) -> ModelShape:
    """Return the shape tied or not, gated or not, whose parameters are nearest those stated."""
    if not params_b:
        return shape
    choices = [
        replace(shape, untie_embeddings_and_output_weights=untied, swiglu=gated)
        for untied in (shape.untie_embeddings_and_output_weights, True, False)
        for gated in (shape.swiglu, True, False)
    ]
    best = min(choices, key=lambda item: abs(item.total_parameters() / (params_b * 1e9) - 1))
    mine = abs(shape.total_parameters() / (params_b * 1e9) - 1)
    # A count printed as "7" tells nothing within its rounding.
    return shape if mine < 0.05 and params_b == round(params_b, 1) else best


def _sizes(run: Run, setting: Setting, assumed: list[str]) -> ParallelSizes:
    world = run.num_gpus or 1
    given = {"tp": run.tp, "pp": run.pp, "cp": run.cp, "ep": run.ep, "vpp": run.vpp}
    if world > 1 and run.tp is None and run.pp is None and run.dp != world:
        raise UnusableError("tp and pp are not stated")
    for name in ("tp", "pp"):
        if given[name] is None:
            assumed.append(name)
    size = {name: value or 1 for name, value in given.items()}
    model_parallel = size["tp"] * size["pp"] * size["cp"]
    dp = run.dp or max(1, world // model_parallel)
    if model_parallel * dp != world:
        raise UnusableError("tp x pp x cp x dp is not the number of GPUs")
    if not run.gbs:
        raise UnusableError("gbs is not stated")
    if not run.mbs:
        raise UnusableError("mbs is not stated")
    if run.seq_parallel is None:
        assumed.append("seq_parallel")
    parallel = run.seq_parallel
    if parallel is None:
        # nanotron reduces and scatters by default; Megatron does where it is asked to.
        parallel = "nanotron" in run.framework
    if run.gbs % (run.mbs * dp):
        raise UnusableError("gbs is not a multiple of mbs x dp")
    if size["vpp"] > 1 and run.gbs // (run.mbs * dp) % size["pp"]:
        raise UnusableError("virtual stages with micro-batches that are no multiple of pp")
    sharded = run.dist_opt or run.zero in ("1", "2")
    if run.dist_opt is None and not run.zero:
        assumed.append("dist_opt")
        sharded = setting.sharded
    return ParallelSizes(
        tensor_model_parallel_size=size["tp"],
        pipeline_model_parallel_size=size["pp"],
        data_parallel_size=dp,
        context_parallel_size=size["cp"],
        expert_model_parallel_size=size["ep"],
        expert_tensor_parallel_size=size["tp"] if size["ep"] == 1 else 1,
        virtual_pipeline_model_parallel_size=size["vpp"],
        micro_batch_size=run.mbs,
        global_batch_size=run.gbs,
        sequence_parallel=parallel and size["tp"] > 1,
        use_distributed_optimizer=bool(sharded),
    )


def _train(run: Run, setting: Setting, assumed: list[str]) -> TrainSettings:
    precision = next((p for p in ("bf16", "fp16", "fp32") if p in run.precision.lower()), None)
    if precision is None:
        assumed.append("precision")
        precision = setting.precision
    return TrainSettings(
        global_batch_size=run.gbs or 1,
        precision=precision,
        accumulate_allreduce_grads_in_fp32=precision == "bf16" and setting.single_gradients,
        overlap_grad_reduce=setting.overlap,
    )


def _policy(run: Run, setting: Setting, assumed: list[str], layers: int) -> Recompute:
    text = run.recompute.lower()
    if not text:
        assumed.append("recompute")
        text = setting.recompute
    if text.startswith("full"):
        method, _, count = text.partition("/")[2].partition("/")
        if method == "block" and count.isdigit():
            return Recompute.full("block", min(int(count), layers))
        return Recompute.full("uniform", int(count) if count.isdigit() else 1)
    if text.startswith("selective"):
        listed = re.search(r"\[(.*?)\]", text)
        modules = listed.group(1).replace(",", " ").split() if listed else ["core_attn"]
        return Recompute.selective(*modules)
    return Recompute()


def _cluster(run: Run, assumed: list[str]) -> Cluster:
    world = run.num_gpus or 1
    if run.gpus_per_node is None:
        assumed.append("gpus_per_node")
    each = min(run.gpus_per_node or _GPUS_PER_NODE, world)
    return _nodes(device_kind(run.gpu), world, each)


@lru_cache(maxsize=1024)
def _nodes(kind: str, world: int, each: int) -> Cluster:
    nodes = [
        Node(name=f"node{i}", device_kind=kind, num_devices=min(each, world - i * each))
        for i in range(-(-world // each))
    ]
    link, between = catalogue_link(kind), catalogue_link(kind, between_nodes=True)
    return Cluster(
        name=f"{world} x {kind}",
        nodes=tuple(nodes),
        kinds={kind: catalogue()[kind]},
        intra_node={kind: link} if link else {},
        inter_node={f"{kind}|{kind}": between} if between else {},
    )


@lru_cache(maxsize=256)
def device_kind(gpu: str) -> str:
    """Return the catalogue's name of a GPU as sources print it, e.g. ``NVIDIA H100-SXM5-80GB``.

    Raises:
        UnusableError: The catalogue does not know it.
    """
    words = re.sub(r"[^a-z0-9]+", " ", gpu.lower()).split()
    text = " ".join(words)
    gigabytes = re.search(r"\b(\d+) ?gb\b", text)
    known = catalogue()
    families = {name: re.split(r"-(?=\d+gb|pcie)", name)[0].replace("-", " ") for name in known}
    found = [
        name
        for name, family in families.items()
        if re.search(rf"\b{re.escape(family)}(?![a-z0-9])", text)
        or re.search(rf"\b{re.escape(family.replace(' ', ''))}(?![a-z0-9])", text)
    ]
    if not found:
        raise UnusableError(f"the catalogue does not know the GPU {gpu!r}")
    longest = max(len(families[name]) for name in found)
    found = [name for name in found if len(families[name]) == longest]
    wanted = [name for name in found if ("pcie" in name) == ("pcie" in words or "nvl" in words)]
    found = wanted or found
    size = int(gigabytes.group(1)) if gigabytes else None

    def distance(name: str) -> float:
        held = known[name].memory_bytes / 1024**3
        return abs(held - size) if size else -held

    return min(found, key=distance)
