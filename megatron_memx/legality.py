"""What Megatron refuses, loops on or silently gets wrong: rules with reasons, by release.

Each rule was read in Megatron's source or tried on the releases that it names. ``check`` judges one
configuration; ``megatron_memx.pins`` judges the options that a user wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_memx.errors import LegalityError
from megatron_memx.job import Job
from megatron_memx.model import ModelShape
from megatron_memx.parallel import ParallelSizes, Recompute
from megatron_memx.plan import Chunk
from megatron_memx.versions import release

# Modules that selective recomputation knows in every supported release.
RECOMPUTE_MODULES = [
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
    "gdn_norm_out",
]
_NEEDS_TRANSFORMER_ENGINE = {"layernorm", "moe_act", "gdn_norm_out"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """One broken rule: a short name, the reason with its numbers, a legal value, the flag."""

    rule: str
    message: str
    fix: str | None = None
    flag: str | None = None

    def error(self) -> LegalityError:
        """Return this violation as an error to raise."""
        return LegalityError(self.message, fix=self.fix, flag=self.flag)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the environment has.

    Args:
        megatron: Release of megatron-core, e.g. ``0.19.2``.
        fused_norms: Whether Transformer Engine's or Apex's norms are there.
        transformer_engine: Whether Transformer Engine is there.
    """

    megatron: str
    transformer_engine: bool = False
    fused_norms: bool = False

    @property
    def release(self) -> tuple[int, int]:
        """(major, minor) of Megatron."""
        return release(self.megatron)


def check_sizes(job: Job, sizes: ParallelSizes, facts: Facts) -> list[Violation]:
    """Return the rules that parallel sizes break, whatever the split."""
    model = job.model
    return [
        *_tensor_rules(model, sizes, facts),
        *_expert_rules(model, sizes),
        *_schedule_rules(job, sizes, facts),
    ]


def check_chunks(job: Job, chunks: Sequence[Sequence[Chunk]], facts: Facts) -> list[Violation]:
    """Return the rules that a split and its recomputation break.

    Args:
        chunks: For each pipeline rank its chunks in order of virtual stage.
    """
    found: list[Violation] = []
    policies = {chunk.recompute for rank in chunks for chunk in rank}
    for policy in sorted(policies, key=lambda item: item.label):
        found += check_recompute(job, policy, facts)
    last = chunks[-1][-1]
    for rank, row in enumerate(chunks):
        for chunk in row:
            if chunk.mtp_num_layers and chunk is not last:
                found.append(
                    Violation(
                        rule="mtp-last",
                        message=f"stage {rank} chunk {chunk.virtual_stage} holds MTP layers, which "
                        "stand behind all decoder layers, before the loss",
                    )
                )
        layers = sum(chunk.num_layers for chunk in row)
        keeps = job.train.save or job.train.load
        if layers == 0 and keeps and len(chunks) > 1:
            found.append(
                Violation(
                    rule="empty-stage-checkpoint",
                    message=f"stage {rank} holds no layer and the job uses checkpoints: Megatron "
                    "saves such a stage without a model and cannot load it",
                    fix="at least one layer on each stage",
                    flag="--pipeline-model-parallel-layout",
                )
            )
    if last.mtp_num_layers and last.num_layers == 0:
        found.append(
            Violation(
                rule="mtp-alone",
                message="the MTP layers stand alone in the last slot: every transfer then first "
                "exchanges shapes, and interleaved schedules hang",
                fix="at least one decoder layer beside them",
                flag="--pipeline-model-parallel-layout",
            )
        )
    return found


def check_recompute(job: Job, policy: Recompute, facts: Facts) -> list[Violation]:
    """Return the rules that one recompute policy breaks for this job."""
    model, found = job.model, []
    modules = set(policy.modules)
    unknown = sorted(modules - set(RECOMPUTE_MODULES))
    flag = "--recompute-modules"
    if unknown:
        found.append(
            Violation(
                rule="recompute-module-unknown",
                message=f"Megatron {facts.megatron} cannot recompute {', '.join(unknown)}",
                fix=", ".join(RECOMPUTE_MODULES),
                flag=flag,
            )
        )
    if "mlp" in modules and model.add_bias_linear:
        found.append(
            Violation(
                rule="recompute-mlp-bias",
                message="recomputing mlp with biases makes Megatron's backward pass recurse "
                "without end",
                fix="--disable-bias-linear, or another module",
                flag=flag,
            )
        )
    if not facts.transformer_engine or model.transformer_impl == "local":
        for name in sorted(modules & _NEEDS_TRANSFORMER_ENGINE):
            found.append(
                Violation(
                    rule="recompute-needs-te",
                    message=f"recomputing {name} asks for Transformer Engine, which is not used "
                    "here: Megatron ends with a NameError",
                    fix="core_attn, or --transformer-impl transformer_engine with it installed",
                    flag=flag,
                )
            )
    if "moe_act" in modules and not job.has("moe_grouped_gemm"):
        found.append(
            Violation(
                rule="recompute-moe-act",
                message="recomputing moe_act works with grouped GEMM only",
                fix="--moe-grouped-gemm",
                flag=flag,
            )
        )
    if "mla_up_proj" in modules and model.mla is None:
        found.append(
            Violation(
                rule="recompute-mla",
                message="recomputing mla_up_proj without multi-latent attention",
                fix="--multi-latent-attention, or another module",
                flag=flag,
            )
        )
    if "shared_experts" in modules and job.has("moe_shared_expert_overlap"):
        found.append(
            Violation(
                rule="recompute-shared-overlap",
                message="recomputing shared_experts excludes --moe-shared-expert-overlap",
                fix="leave --moe-shared-expert-overlap out",
                flag=flag,
            )
        )
    if job.has("overlap_moe_expert_parallel_comm") and policy.granularity == "full":
        found.append(
            Violation(
                rule="recompute-ep-overlap",
                message="full recomputation excludes --overlap-moe-expert-parallel-comm",
                fix="selective recomputation, or none",
                flag="--recompute-granularity",
            )
        )
    if job.has("cpu_offloading_num_layers") and policy.granularity != "none":
        found.append(
            Violation(
                rule="recompute-offload",
                message="recomputation excludes --cpu-offloading-num-layers",
                fix="one of the two",
                flag="--cpu-offloading-num-layers",
            )
        )
    return found


def uniform_group_legal(policy: Recompute, num_layers: int, facts: Facts) -> Violation | None:
    """Return the rule that a uniform group size breaks on a chunk of ``num_layers`` layers.

    Up to 0.16 the groups had to divide the chunk (an IndexError otherwise); 0.17 clamps the last.
    """
    size = policy.num_layers or 0
    if policy.method != "uniform" or num_layers == 0 or num_layers % max(size, 1) == 0:
        return None
    if facts.release >= (0, 17):
        return None
    divisors = [d for d in range(1, num_layers + 1) if num_layers % d == 0]
    near = sorted(divisors, key=lambda d: (abs(d - size), d))[:2]
    return Violation(
        rule="uniform-divides",
        message=f"uniform recomputation in groups of {size} on {num_layers} layers: Megatron "
        f"{facts.megatron} needs a divisor (0.17 and later do not)",
        fix=" or ".join(map(str, sorted(near))),
        flag="--recompute-num-layers",
    )


def _tensor_rules(model: ModelShape, sizes: ParallelSizes, facts: Facts) -> list[Violation]:
    tp, cp = sizes.tensor_model_parallel_size, sizes.context_parallel_size
    flag = "--tensor-model-parallel-size"
    found = []
    for what, value in (
        ("num_attention_heads", model.num_attention_heads),
        ("ffn_hidden_size", model.ffn_hidden_size),
        ("hidden_size", model.hidden_size),
    ):
        if value % tp:
            found.append(
                Violation(
                    rule="tp-divides",
                    message=f"{what} {value} is not a multiple of tp {tp}",
                    fix=f"a divisor of {value}",
                    flag=flag,
                )
            )
    groups = model.num_query_groups
    divides = groups % tp == 0
    if not divides and (facts.release < (0, 16) or tp % groups):
        rule = "a multiple of tp" if facts.release < (0, 16) else "a multiple or a divisor of tp"
        found.append(
            Violation(
                rule="query-groups",
                message=f"num_query_groups {groups} with tp {tp}: Megatron {facts.megatron} needs "
                + rule,
                fix=f"tp {groups}, or Megatron 0.16 and later" if tp % groups == 0 else f"{groups}",
                flag=flag,
            )
        )
    if cp > 1 and model.seq_length % (2 * cp):
        found.append(
            Violation(
                rule="cp-divides",
                message=f"seq_length {model.seq_length} is not a multiple of 2 x cp = {2 * cp}",
                flag="--context-parallel-size",
            )
        )
    if cp > 1 and (model.transformer_impl == "local" or not facts.transformer_engine):
        found.append(
            Violation(
                rule="cp-needs-te",
                message=f"cp {cp} needs Transformer Engine's attention, which is not used here",
                fix="1",
                flag="--context-parallel-size",
            )
        )
    if model.mla is not None and (
        model.transformer_impl == "local" or not facts.transformer_engine
    ):
        found.append(
            Violation(
                rule="mla-needs-te",
                message="multi-latent attention needs Transformer Engine's kernel: Megatron's "
                "local one does not take its head sizes",
                fix="install transformer-engine, or leave --multi-latent-attention out",
                flag="--multi-latent-attention",
            )
        )
    if sizes.sequence_parallel:
        if not facts.fused_norms or (model.transformer_impl == "local" and not facts.fused_norms):
            found.append(
                Violation(
                    rule="sp-norm",
                    message="sequence parallelism needs the norms of Transformer Engine or Apex; "
                    "torch's own refuse it",
                    fix="install one of them, or leave the flag out",
                    flag="--sequence-parallel",
                )
            )
        if model.seq_length % tp:
            found.append(
                Violation(
                    rule="sp-divides",
                    message=f"seq_length {model.seq_length} is not a multiple of tp {tp}",
                    flag="--sequence-parallel",
                )
            )
    return found


def _expert_rules(model: ModelShape, sizes: ParallelSizes) -> list[Violation]:
    ep, etp = sizes.expert_model_parallel_size, sizes.expert_tensor_parallel_size
    pp, world = sizes.pipeline_model_parallel_size, sizes.world_size
    if model.moe is None:
        if ep > 1:
            return [
                Violation(
                    rule="ep-without-experts",
                    message=f"ep {ep} for a model without experts",
                    fix="1, or --num-experts",
                    flag="--expert-model-parallel-size",
                )
            ]
        return []
    found = []
    if model.moe.num_experts % ep:
        found.append(
            Violation(
                rule="ep-divides",
                message=f"num_experts {model.moe.num_experts} is not a multiple of ep {ep}",
                flag="--expert-model-parallel-size",
            )
        )
    if world % (etp * ep * pp):
        found.append(
            Violation(
                rule="expert-world",
                message=f"world {world} is not a multiple of etp {etp} x ep {ep} x pp {pp} = "
                f"{etp * ep * pp}",
                fix="a smaller ep, or etp 1",
                flag="--expert-tensor-parallel-size",
            )
        )
    if model.add_bias_linear and ep * etp == 1:
        found.append(
            Violation(
                rule="moe-bias",
                message="experts with biases on a single rank (ep 1, etp 1): Megatron adds the "
                "bias in place to a view, and autograd ends the first step",
                fix="--disable-bias-linear, or ep 2 or more",
                flag="--disable-bias-linear",
            )
        )
    if sizes.tensor_model_parallel_size > 1 and not sizes.sequence_parallel:
        found.append(
            Violation(
                rule="moe-tp-sp",
                message="experts with tp > 1 need sequence parallelism while training",
                fix="tp 1, or sequence parallelism",
                flag="--sequence-parallel",
            )
        )
    return found


def _schedule_rules(job: Job, sizes: ParallelSizes, facts: Facts) -> list[Violation]:
    pp = sizes.pipeline_model_parallel_size
    vpp = sizes.virtual_pipeline_model_parallel_size
    m = sizes.num_microbatches
    if vpp == 1:
        return []
    flag = "--pipeline-model-parallel-layout"
    found = []
    if pp == 1:
        found.append(Violation(rule="vpp-pp", message="virtual stages need pp > 1", flag=flag))
    overlap = not job.has("no_overlap_p2p_communication") and facts.release >= (0, 18)
    if pp == 2 and not overlap:
        found.append(
            Violation(
                rule="vpp-pp2-overlap",
                message="virtual stages with pp 2 need overlapped transfers"
                + (
                    f", which Megatron {facts.megatron} gets wrong (mended in 0.18)"
                    if facts.release < (0, 18)
                    else ""
                ),
                fix="pp 3 or more, or no virtual stages",
                flag=flag,
            )
        )
    if m < pp or m % pp:
        found.append(
            Violation(
                rule="vpp-microbatches",
                message=f"{m} micro-batches with virtual stages: must be a multiple of pp {pp}",
                fix=f"{max(pp, m // pp * pp)} or {(m // pp + 1) * pp} micro-batches",
                flag="--global-batch-size",
            )
        )
    if job.model.hybrid:
        found.append(
            Violation(
                rule="vpp-hybrid",
                message="virtual stages of a hybrid model get no number of their own, so no "
                "recompute policy could be theirs",
                fix="one segment a pipeline rank",
            )
        )
    return found
