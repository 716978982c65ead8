"""The user's own parallel options: field reports 2, 3, 4, 5, 7, 8, 9, 21, 22, 23."""

from __future__ import annotations

import pytest
from jobs import facts, job

from megatron_memx.errors import LegalityError
from megatron_memx.legality import check_chunks, check_recompute, check_sizes, uniform_group_legal
from megatron_memx.parallel import ParallelSizes, Recompute
from megatron_memx.pins import constraints
from megatron_memx.plan import Chunk


def refused(world: int = 8, version: str = "0.19.2", **more: object) -> LegalityError:
    with pytest.raises(LegalityError) as error:
        constraints(job(**more), world, facts(version))
    return error.value


def test_layers_that_vanish_are_refused() -> None:
    """Field report 2: 48 layers as 11 + 13 drop 24; 80 over 16 in pairs train 64."""
    error = refused(
        2,
        num_layers=48,
        pipeline_model_parallel_size=2,
        decoder_first_pipeline_num_layers=11,
        decoder_last_pipeline_num_layers=13,
    )
    assert "leave 24 layers unassigned of 48" in error.message
    error = refused(
        16,
        num_layers=80,
        pipeline_model_parallel_size=16,
        num_layers_per_virtual_pipeline_stage=2,
    )
    assert "5 a stage" in error.message
    assert "not a multiple of 2" in error.message


@pytest.mark.parametrize("version", ["0.15.3", "0.18.2"])
def test_last_stage_count_with_one_stage(version: str) -> None:
    """Field report 3."""
    error = refused(1, version, num_layers=20, decoder_last_pipeline_num_layers=1)
    assert error.flag == "--decoder-last-pipeline-num-layers"
    assert "pp 1" in error.message


def test_edges_larger_than_the_model() -> None:
    error = refused(
        2, num_layers=4, pipeline_model_parallel_size=2, decoder_last_pipeline_num_layers=6
    )
    assert "the model has 4 layers" in error.message


def test_uneven_last_stage_with_virtual_stages_becomes_a_layout() -> None:
    """Field report 5: each layer exactly once, 3 3 3 2 in both rounds."""
    pins = constraints(
        job(
            num_layers=22,
            pipeline_model_parallel_size=4,
            num_virtual_stages_per_pipeline_rank=2,
            decoder_last_pipeline_num_layers=4,
        ),
        4,
        facts(),
    )
    assert pins.split == (3, 3, 3, 2, 3, 3, 3, 2)
    assert sum(pins.split) == 22
    error = refused(
        4,
        num_layers=21,
        pipeline_model_parallel_size=4,
        num_virtual_stages_per_pipeline_rank=2,
        decoder_last_pipeline_num_layers=3,
    )
    assert "stage 3 holds 3 layers, not a multiple of 2" in error.message


def test_query_groups_depend_on_the_release() -> None:
    """Field report 7."""
    read = job(group_query_attention=True, num_query_groups=2, num_attention_heads=16)
    sizes = ParallelSizes(tensor_model_parallel_size=8, global_batch_size=16)
    old = check_sizes(read, sizes, facts("0.15.3"))
    assert [v.rule for v in old] == ["query-groups"]
    assert "num_query_groups 2 with tp 8" in old[0].message
    assert check_sizes(read, sizes, facts("0.16.0")) == []


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "etp"), [(4, 1, 4, 1), (1, 2, 2, 1)], ids=["tp4-ep4", "pp2-ep2"]
)
def test_expert_sizes_multiply_with_their_own_tensor_size(
    tp: int, pp: int, ep: int, etp: int
) -> None:
    """Field report 8: both are legal on 4 ranks."""
    read = job(num_experts=4, sequence_parallel=tp > 1)
    sizes = ParallelSizes(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        data_parallel_size=4 // (tp * pp),
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        global_batch_size=16,
        sequence_parallel=tp > 1,
    )
    assert check_sizes(read, sizes, facts()) == []


def test_expert_size_defaulted_to_tp_says_so() -> None:
    error = refused(
        4,
        num_experts=4,
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=4,
    )
    assert "etp 4 (defaulted to tp) x ep 4 (given)" in error.message
    assert error.flag == "--expert-tensor-parallel-size"


def test_batch_that_no_data_parallel_size_divides() -> None:
    """Field report 9: 256 on seven devices; 252, 266 or fewer devices."""
    error = refused(
        7,
        global_batch_size=256,
        micro_batch_size=2,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
    )
    assert "256 is not a multiple of micro_batch_size 2 x data_parallel_size 7 = 14" in (
        error.message
    )
    assert "252 or 266" in str(error.fix)
    assert "4 ranks" in str(error.fix)


def test_uniform_groups_must_divide_up_to_0_16() -> None:
    """Field report 21."""
    more = {
        "num_layers": 24,
        "pipeline_model_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 7,
    }
    error = refused(1, "0.16.0", **more)
    assert "groups of 7 on 24 layers" in error.message
    assert error.fix == "6 or 8"
    assert constraints(job(**more), 1, facts("0.17.0")).recompute == Recompute.full("uniform", 7)


def test_contradicting_recompute_flags_are_named() -> None:
    """Field report 22."""
    error = refused(1, recompute_activations=True, recompute_granularity="full")
    assert "--recompute-activations" in error.message
    assert "--recompute-granularity full" in error.message
    error = refused(1, recompute_method="uniform")
    assert error.flag == "--recompute-granularity"


def test_core_attention_under_flash_is_kept_with_a_warning() -> None:
    """Field report 23."""
    pins = constraints(job(recompute_activations=True), 1, facts())
    assert pins.recompute == Recompute.selective("core_attn")
    assert "saves nothing" in pins.warnings[0]
    local = constraints(job(recompute_activations=True, transformer_impl="local"), 1, facts())
    assert local.warnings == ()


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("Ettt|tttL", "2 layers unassigned"),
        ("|Etttt|tttt|L", "Megatron builds the embedding in the first slot"),
        ("tttt|ttttL", "one E stands first"),
        ("Etttt|tttt|L", "3 slots, not a multiple of pp 2"),
        ("Ettttm|ttttL", "MTP"),
    ],
)
def test_layouts_are_checked(layout: str, reason: str) -> None:
    error = refused(2, pipeline_model_parallel_size=2, pipeline_model_parallel_layout=layout)
    assert reason in error.message
    assert error.flag == "--pipeline-model-parallel-layout"


def test_a_pinned_layout_is_the_split() -> None:
    pins = constraints(
        job(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*3|t*5L"),
        2,
        facts(),
    )
    assert (pins.pp, pins.vpp, pins.split) == (2, 1, (3, 5))


def test_world_that_sizes_do_not_divide() -> None:
    error = refused(6, tensor_model_parallel_size=4)
    assert "tp 4 = 4 does not divide the 6 ranks" in error.message


def rules(policy: Recompute, *, engine: bool = True, **more: object) -> list[str]:
    return [v.rule for v in check_recompute(job(**more), policy, facts(engine=engine))]


def test_recompute_traps() -> None:
    """Each loops, crashes or does nothing in Megatron."""
    assert rules(Recompute.selective("mlp")) == ["recompute-mlp-bias"]
    assert rules(Recompute.selective("mlp"), disable_bias_linear=True) == []
    assert rules(Recompute.selective("layernorm"), engine=False) == ["recompute-needs-te"]
    assert rules(Recompute.selective("layernorm"), transformer_impl="local") == [
        "recompute-needs-te"
    ]
    assert rules(Recompute.selective("moe_act")) == ["recompute-moe-act"]
    assert rules(Recompute.selective("moe_act"), moe_grouped_gemm=True) == []
    assert rules(Recompute.selective("mla_up_proj")) == ["recompute-mla"]
    assert rules(Recompute.selective("nothing")) == ["recompute-module-unknown"]
    shared = {"moe_shared_expert_overlap": True}
    assert rules(Recompute.selective("shared_experts"), **shared) == ["recompute-shared-overlap"]
    overlap = {"overlap_moe_expert_parallel_comm": True}
    assert rules(Recompute.full("block", 1), **overlap) == ["recompute-ep-overlap"]
    assert rules(Recompute.full("block", 1), cpu_offloading_num_layers=1) == ["recompute-offload"]
    with pytest.raises(LegalityError, match="loops for ever"):
        Recompute.full("uniform", 0)


def chunk(layers: int, *, first: int = 0, mtp: int = 0, **more: bool) -> Chunk:
    return Chunk(virtual_stage=0, first_layer=first, num_layers=layers, mtp_num_layers=mtp, **more)


def test_split_traps() -> None:
    empty = [[chunk(8, embedding=True)], [chunk(0, first=8)], [chunk(0, first=8, loss=True)]]
    assert check_chunks(job(), empty, facts()) == []
    found = check_chunks(job(save="/x"), empty, facts())
    assert {v.rule for v in found} == {"empty-stage-checkpoint"}
    alone = [[chunk(8, embedding=True)], [chunk(0, first=8, mtp=1, loss=True)]]
    assert "mtp-alone" in [v.rule for v in check_chunks(job(), alone, facts())]
    early = [[chunk(4, embedding=True, mtp=1)], [chunk(4, first=4, loss=True)]]
    assert "mtp-last" in [v.rule for v in check_chunks(job(), early, facts())]


@pytest.mark.parametrize(
    ("version", "pp", "vpp", "batch", "rules_found"),
    [
        ("0.19.2", 2, 2, 16, []),
        ("0.17.1", 2, 2, 16, ["vpp-pp2-overlap"]),
        ("0.17.1", 4, 2, 16, []),
        ("0.19.2", 4, 2, 6, ["vpp-microbatches"]),
        ("0.19.2", 4, 2, 2, ["vpp-microbatches"]),
        ("0.19.2", 1, 2, 16, ["vpp-pp"]),
    ],
)
def test_interleaved_schedule_rules(
    version: str, pp: int, vpp: int, batch: int, rules_found: list[str]
) -> None:
    sizes = ParallelSizes(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        global_batch_size=batch,
    )
    found = check_sizes(job(global_batch_size=batch), sizes, facts(version))
    assert [v.rule for v in found] == rules_found


def test_single_experts_with_biases_are_refused() -> None:
    sizes = ParallelSizes(data_parallel_size=2, global_batch_size=16)
    found = check_sizes(job(num_experts=4), sizes, facts())
    assert [v.rule for v in found] == ["moe-bias"]
    assert check_sizes(job(num_experts=4, disable_bias_linear=True), sizes, facts()) == []


def test_sequence_parallel_needs_fused_norms() -> None:
    sizes = ParallelSizes(
        tensor_model_parallel_size=2, sequence_parallel=True, global_batch_size=16
    )
    assert [v.rule for v in check_sizes(job(), sizes, facts(engine=False))] == ["sp-norm"]
    assert check_sizes(job(), sizes, facts()) == []


def test_uniform_groups_are_clamped_from_0_17() -> None:
    assert uniform_group_legal(Recompute.full("uniform", 7), 24, facts("0.17.0")) is None
    assert uniform_group_legal(Recompute.full("uniform", 6), 24, facts("0.16.0")) is None


def test_the_bars_of_a_hybrid_pattern_are_a_pin() -> None:
    more = {"num_layers": None, "hybrid_layer_pattern": "*-*-*-|*-"}
    pins = constraints(job(pipeline_model_parallel_size=2, **more), 2, facts())
    assert (pins.pp, pins.vpp, pins.split) == (2, 1, (3, 1))
    error = refused(4, pipeline_model_parallel_size=4, **more)
    assert "2 segments, pp is 4" in error.message
