"""From request to plan: what the signature is made of, and what a plan says about itself."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from jobs import cluster, facts, job, kind

from megatron_memx.cache.signature import differences, signature
from megatron_memx.cache.store import PlanCache
from megatron_memx.errors import BadInputError, LegalityError
from megatron_memx.options import MemXOptions
from megatron_memx.plan import Plan
from megatron_memx.planner import Request, make_plan, make_request

VERSIONS = {"megatron_core": "0.19.2", "torch": "2.14.1", "megatron_memx": "0.1.0"}


def request(world=None, options: MemXOptions | None = None, **more: object) -> Request:
    return make_request(
        job(bf16=True, **more),
        world or cluster(("gpu", 4)),
        options or MemXOptions(),
        facts=facts(),
        versions=VERSIONS,
    )


def differing(first: Request, second: Request) -> set[str]:
    found = differences(first.fields({}), second.fields({}))
    return {name.split("[")[0] for name, _, _ in found}


def test_a_plan_explains_itself_and_round_trips() -> None:
    asked = request()
    plan = make_plan(asked, {"gpu": []})
    assert plan.signature == signature(asked.fields({"gpu": []}))
    assert Plan.from_dict(json.loads(plan.to_json())).to_dict() == plan.to_dict()
    assert plan.num_layers == 8
    assert plan.versions == VERSIONS
    assert "nothing was measured" in plan.origin["basis"]
    assert plan.objective["weights"] == {"alpha": 0.4, "beta": 0.2, "gamma": 0.4}
    assert plan.prediction is not None
    assert plan.prediction.iteration_time_low_s < plan.prediction.iteration_time_s
    assert all(item["reason"] for item in plan.runners_up)
    for stage in plan.stages:
        assert stage.prediction is not None
        total = sum(stage.prediction.memory_breakdown_bytes.values())
        assert total == pytest.approx(stage.prediction.peak_memory_bytes, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"seq_length": 64, "max_position_embeddings": 64}, {"model.seq_length"}),
        ({"tensor_model_parallel_size": 1}, {"pins.tensor_model_parallel_size"}),
        ({"use_flash_attn": True}, {"options.use_flash_attn"}),
        ({"lr": "2"}, set()),
        ({"save": "/somewhere", "save_interval": 5}, {"checkpoints"}),
    ],
)
def test_what_changes_the_signature(change: dict[str, object], fields: set[str]) -> None:
    """Field report 30: each is a miss that names its field; the learning rate is none."""
    found = differing(request(), request(**change))
    assert fields <= found
    if not fields:
        assert found == set()


def test_the_device_and_its_memory_are_in_the_signature() -> None:
    """Field report 31: another memory, or less of it free, is another plan."""
    base = request(cluster(("gpu", 4), kinds=[kind(memory_gib=141)]))
    smaller = request(cluster(("gpu", 4), kinds=[kind(memory_gib=80)]))
    used = request(
        cluster(("gpu", 4), kinds=[replace(kind(memory_gib=141), free_bytes=121 * 1024**3)])
    )
    assert "cluster.kinds.gpu.memory_bytes" in differing(base, smaller)
    assert differing(base, used) == {"cluster.kinds.gpu.capacity_bytes"}
    six = request(cluster(("gpu", 6)), global_batch_size=18)
    assert "world_size" in differing(base, six)


def test_a_miss_names_the_nearest_plan(tmp_path) -> None:
    cache = PlanCache(tmp_path)
    first = request()
    cache.put(first.fields({}), make_plan(first, {}))
    assert cache.lookup(first.fields({})).plan is not None
    missed = cache.lookup(request(seq_length=64).fields({}))
    assert missed.plan is None
    assert ("model.seq_length", 64, 128) in missed.why_miss


def test_absolute_balance_is_in_bytes() -> None:
    options = MemXOptions(memx_balance="absolute")
    plan = make_plan(request(options=options), {})
    assert plan.objective["balance"] == "absolute"
    assert plan.objective["reference"]["peak"] > 1e6


def test_margin_and_pins_are_checked() -> None:
    with pytest.raises(BadInputError, match="share of 0 or more"):
        request(options=MemXOptions(memx_memory_margin=1.5))
    with pytest.raises(LegalityError, match="does not divide"):
        request(tensor_model_parallel_size=3)


def test_mtp_stands_on_the_last_stage_and_is_left_alone() -> None:
    """Field report 24: stages recompute 6, 4, 2 and 0 layers beside one MTP layer."""
    from megatron_memx.legality import check_chunks
    from megatron_memx.parallel import Recompute
    from megatron_memx.plan import Chunk

    counts = [6, 4, 2, 0]
    chunks = [
        [
            Chunk(
                virtual_stage=0,
                first_layer=6 * rank,
                num_layers=6,
                embedding=rank == 0,
                loss=rank == 3,
                mtp_num_layers=int(rank == 3),
                recompute=Recompute.full("block", count) if count else Recompute(),
            )
        ]
        for rank, count in enumerate(counts)
    ]
    read = job(num_layers=24, mtp_num_layers=1, position_embedding_type="rope")
    assert check_chunks(read, chunks, facts()) == []
    plan = make_plan(request(num_layers=24, mtp_num_layers=1, pipeline_model_parallel_size=4), {})
    assert plan.layout.endswith("mL")
    data = plan.to_dict()
    data["stages"] = data["stages"][:3]
    with pytest.raises(BadInputError, match="3 stages for pipeline_model_parallel_size 4"):
        Plan.from_dict(data)
