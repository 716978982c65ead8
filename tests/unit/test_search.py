"""The search against brute force, and the field reports about splits."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import cluster, facts, job, kind

from megatron_memx.cost.prior import CatalogueProvider
from megatron_memx.errors import InfeasibleError
from megatron_memx.objective import PROFILES, TIME_ONLY, Weights, phi
from megatron_memx.parallel import Recompute
from megatron_memx.pins import constraints
from megatron_memx.search.choices import policies
from megatron_memx.search.evaluate import Evaluator
from megatron_memx.search.search import SearchRequest, SearchResult, search
from megatron_memx.search.space import Outer, outer_space
from megatron_memx.search.table import Rows, Tables


def request(
    read, world, *, weights: Weights | None = PROFILES["default"], margin: float = 0.05, **more
) -> SearchRequest:
    environment = facts(more.pop("megatron", "0.19.2"), engine=more.pop("engine", True))
    return SearchRequest(
        job=read,
        cluster=world,
        provider=CatalogueProvider(read, world),
        pins=constraints(read, world.num_devices, environment),
        facts=environment,
        weights=weights,
        margin=margin,
        **more,
    )


def outers_of(asked: SearchRequest) -> list[Outer]:
    found = outer_space(asked.job, asked.cluster, asked.pins, asked.facts)
    return [item for item in found if isinstance(item, Outer)]


def layers_of(result: SearchResult) -> list[list[int]]:
    return [[chunk.num_layers for chunk in stage.chunks] for stage in result.best.stages]


def brute_force(asked: SearchRequest, result: SearchResult) -> float:
    """Return the least Phi over every split and every Pareto policy, judged one by one."""
    best = float("inf")
    for outer in outers_of(asked):
        sizes = outer.sizes
        pp, vpp = sizes.pipeline_model_parallel_size, sizes.virtual_pipeline_model_parallel_size
        evaluator = Evaluator(
            asked.job, asked.cluster, asked.provider, outer, margin=asked.margin, absolute=False
        )
        each = asked.job.model.num_layers // vpp
        for cuts in combinations(range(1, each), pp - 1):
            edges = [0, *cuts, each]
            rows = []
            for rank in range(pp):
                first, count = edges[rank], edges[rank + 1] - edges[rank]
                options = [
                    evaluator.option(
                        rank, tuple(v * each + first for v in range(vpp)), (count,) * vpp, policy
                    )
                    for policy in policies(asked.job, asked.pins, asked.facts, count)
                ]
                fitting = [option for option in options if option.fits]
                rows.append(
                    [
                        option
                        for option in fitting
                        if not any(
                            (other.busy_s, other.memory.peak_bytes)
                            != (option.busy_s, option.memory.peak_bytes)
                            and other.busy_s <= option.busy_s
                            and other.memory.peak_bytes <= option.memory.peak_bytes
                            for other in fitting
                        )
                    ]
                )
            for stages in product(*rows):
                item = evaluator.evaluate(stages)
                best = min(best, phi(item.time_s, item.loads, result.weights, result.reference))
    return best


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layers=st.integers(2, 6),
    pp=st.integers(1, 3),
    batch=st.sampled_from([4, 8]),
    slow=st.floats(20, 100),
    small=st.floats(0.02, 16),
    profile=st.sampled_from([*PROFILES.values(), TIME_ONLY]),
    fused=st.booleans(),
)
def test_small_spaces_are_searched_exactly(
    layers: int, pp: int, batch: int, slow: float, small: float, profile: Weights, fused: bool
) -> None:
    if layers < pp:
        layers = pp
    world = cluster(
        ("gpu", 1),
        *[("weak", 1)] * (pp - 1),
        kinds=[kind(), kind("weak", memory_gib=small, tflops=slow)],
    )
    read = job(
        num_layers=layers,
        hidden_size=512,
        seq_length=512,
        max_position_embeddings=512,
        global_batch_size=batch,
        bf16=True,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=pp,
        micro_batch_size=1,
        **({} if fused else {"transformer_impl": "local"}),
    )
    asked = request(read, world, weights=profile)
    try:
        result = search(asked)
    except InfeasibleError:
        return
    assert result.exhaustive
    assert result.phi == pytest.approx(brute_force(asked, result), rel=1e-9)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    vpp=st.sampled_from([1, 2]),
    sharded=st.booleans(),
    mixture=st.sampled_from([None, "1", "2", "([0]*2+[1]*6)"]),
)
def test_tables_say_what_the_evaluator_says(vpp: int, sharded: bool, mixture: str | None) -> None:
    more = {} if mixture is None else {"num_experts": 4, "moe_layer_freq": mixture}
    read = job(
        num_layers=8,
        bf16=True,
        transformer_impl="local",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=2,
        micro_batch_size=2,
        use_distributed_optimizer=sharded,
        **more,
    )
    asked = request(read, cluster(("gpu", 4)))
    pairs = [
        (layers, policy)
        for layers in range(1, 9)
        for policy in policies(read, asked.pins, asked.facts, layers)
    ]
    rows = Rows.of(pairs)
    tables = Tables(read, asked.cluster, asked.provider, rows, margin=asked.margin, absolute=False)
    outers = [
        outer
        for outer in outers_of(asked)
        if outer.sizes.virtual_pipeline_model_parallel_size == vpp
    ]
    assert outers
    for outer in outers:
        evaluator = Evaluator(
            read, asked.cluster, asked.provider, outer, margin=asked.margin, absolute=False
        )
        each = 8 // vpp
        for rank, first in ((0, 0), (1, 1)):
            table = tables.stage(outer.sizes, "gpu", rank, first)
            for index in range(0, len(table.row), 7):
                layers = int(table.layers[index])
                if first + layers > each:
                    continue
                option = evaluator.option(
                    rank,
                    tuple(v * each + first for v in range(vpp)),
                    (layers,) * vpp,
                    rows.policies[int(table.row[index])],
                )
                assert table.busy_s[index] == pytest.approx(option.busy_s)
                assert table.load[index] == pytest.approx(option.load, rel=1e-6)


def test_layers_that_do_not_divide_are_spread() -> None:
    """Field report 2: 30 over four stages is 7 or 8 each, none lost."""
    read = job(
        num_layers=30,
        hidden_size=1024,
        bf16=True,
        pipeline_model_parallel_size=4,
        tensor_model_parallel_size=1,
        micro_batch_size=1,
    )
    layers = [row[0] for row in layers_of(search(request(read, cluster(("gpu", 4)))))]
    assert sum(layers) == 30
    assert all(6 <= count <= 9 for count in layers)


def test_every_stage_holds_a_layer() -> None:
    """Field report 4: 42 over 16 stages; none is empty."""
    read = job(
        num_layers=42,
        hidden_size=1024,
        bf16=True,
        pipeline_model_parallel_size=16,
        tensor_model_parallel_size=4,
        micro_batch_size=1,
        global_batch_size=64,
        disable_bias_linear=True,
    )
    world = cluster(*[("gpu", 8)] * 8)
    layers = [row[0] for row in layers_of(search(request(read, world)))]
    assert sum(layers) == 42
    assert set(layers) <= {1, 2, 3, 4}


def test_a_slow_kind_gets_fewer_layers_and_a_small_one_recomputes() -> None:
    read = job(
        num_layers=16,
        hidden_size=2048,
        seq_length=2048,
        max_position_embeddings=2048,
        bf16=True,
        global_batch_size=16,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=2,
        micro_batch_size=1,
        transformer_impl="local",
    )
    world = cluster(
        ("fast", 1), ("slow", 1), kinds=[kind("fast", memory_gib=80), kind("slow", tflops=40)]
    )
    result = search(request(read, world, weights=TIME_ONLY))
    by_kind = dict(zip(result.best.outer.kinds, layers_of(result), strict=True))
    assert by_kind["slow"][0] < by_kind["fast"][0]
    assert len({*result.best.outer.kinds}) == 2


def test_pins_narrow_the_search_and_are_kept() -> None:
    read = job(
        bf16=True,
        pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Ett|ttttttL",
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=4,
    )
    result = search(request(read, cluster(("gpu", 2))))
    assert layers_of(result) == [[2], [6]]
    assert [stage.chunks[0].recompute for stage in result.best.stages] == [
        Recompute.full("block", 2),
        Recompute.full("block", 4),
    ]


def test_core_attention_is_not_offered_under_flash() -> None:
    """Field report 23."""
    pins = constraints(job(), 1, facts())
    offered = policies(job(), pins, facts(), 4)
    assert not any(policy.granularity == "selective" for policy in offered)
    local = job(transformer_impl="local")
    offered = policies(local, constraints(local, 1, facts()), facts(), 4)
    assert Recompute.selective("core_attn") in offered


def test_infeasible_names_the_nearest_miss() -> None:
    read = job(num_layers=8, hidden_size=4096, bf16=True, micro_batch_size=1)
    with pytest.raises(InfeasibleError) as error:
        search(request(read, cluster(("gpu", 1), kinds=[kind(memory_gib=4)])))
    message = str(error.value)
    assert "stage 0" in message
    assert "short by" in message
    assert error.value.exit_code == 3


def test_the_same_job_gives_the_same_plan() -> None:
    read = job(num_layers=12, hidden_size=1024, bf16=True)
    first, second = (search(request(read, cluster(("gpu", 4)))) for _ in range(2))
    assert first.best.outer == second.best.outer
    assert layers_of(first) == layers_of(second)
    assert first.phi == second.phi


def test_tensor_groups_stay_inside_a_node_and_stages_on_one_kind() -> None:
    read = job(num_layers=8, hidden_size=1024, bf16=True)
    world = cluster(("a", 2), ("b", 4), kinds=[kind("a"), kind("b")])
    for outer in outers_of(request(read, world)):
        for name, ranks in zip(outer.kinds, outer.ranks, strict=True):
            assert {world.devices[rank][2] for rank in ranks} == {name}
        assert outer.sizes.tensor_model_parallel_size <= 2


def test_auto_weights_follow_margin_and_spread() -> None:
    read = job(num_layers=8, hidden_size=512, bf16=True)
    roomy = search(request(read, cluster(("gpu", 2)), weights=None))
    assert roomy.weights.name == "auto: throughput"
    mixed = cluster(("a", 1), ("b", 1), kinds=[kind("a"), kind("b", tflops=20)])
    assert search(request(read, mixed, weights=None)).weights.name == "auto: default"


def test_phi_of_the_reference_is_one() -> None:
    read = job(num_layers=8, hidden_size=512, bf16=True)
    result = search(request(read, cluster(("gpu", 2))))
    reference = result.reference
    same = np.array([reference.peak])
    assert phi(reference.time_s, same.tolist(), TIME_ONLY, reference) == pytest.approx(1.0)
    assert result.phi <= 1.0 + 1e-9


def test_seven_devices_and_a_batch_of_256() -> None:
    """Field report 9, without pins: the nearest batches and a number of ranks are offered."""
    read = job(num_layers=4, global_batch_size=256, micro_batch_size=2)
    with pytest.raises(InfeasibleError) as error:
        search(request(read, cluster(("gpu", 7))))
    assert "256 is not a multiple of micro_batch_size 2 x data_parallel_size 7 = 14" in str(
        error.value
    )
    assert error.value.fix == "--global-batch-size 252 or 266, or 4 rank(s)"


def test_what_is_not_about_the_batch_offers_its_own_remedy() -> None:
    read = job(tensor_model_parallel_size=2, pipeline_model_parallel_size=1, sequence_parallel=True)
    with pytest.raises(InfeasibleError) as error:
        search(request(read, cluster(("gpu", 2)), engine=False))
    assert error.value.flag == "--sequence-parallel"
    assert "Apex" in str(error.value)
