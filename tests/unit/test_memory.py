"""Memory by component, with integers worked out by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from jobs import cluster, facts, job, kind

from megatron_memx.cost.memory import chunk_cost, rank_memory, stage_parameters
from megatron_memx.cost.prior import CatalogueProvider
from megatron_memx.cost.units import UnitKey
from megatron_memx.parallel import ParallelSizes, Recompute
from megatron_memx.plan import Chunk


def chunk(layers: int, *, first: int = 0, policy: Recompute | None = None, **more: bool) -> Chunk:
    return Chunk(
        virtual_stage=0,
        first_layer=first,
        num_layers=layers,
        recompute=policy or Recompute(),
        **more,
    )


def test_uneven_stages_charge_the_heaviest() -> None:
    """Field report 14's shape: 8 layers as 1 2 2 3; the last one holds three and the head."""
    read = job(untie_embeddings_and_output_weights=True)
    sizes = ParallelSizes(pipeline_model_parallel_size=4, global_batch_size=16)
    layer = 12 * 64 * 64 + 13 * 64
    table = 1024 * 64  # 1000 padded to 128s
    splits = [(0, 1), (1, 2), (3, 2), (5, 3)]
    held = []
    for index, (first, count) in enumerate(splits):
        piece = chunk(count, first=first, embedding=index == 0, loss=index == 3)
        held.append(sum(stage_parameters(read, sizes, [piece])))
    assert held == [
        layer + table + 128 * 64,
        2 * layer,
        2 * layer,
        3 * layer + 2 * 64 + table,
    ]


def test_a_tied_output_layer_is_held_twice_over_two_stages() -> None:
    read = job()
    sizes = ParallelSizes(pipeline_model_parallel_size=2, global_batch_size=16)
    last = sum(stage_parameters(read, sizes, [chunk(4, first=4, loss=True)]))
    one = ParallelSizes(global_batch_size=16)
    both = sum(stage_parameters(read, one, [chunk(8, embedding=True, loss=True)]))
    assert both == read.model.total_parameters()
    layer = read.model.layer_parameters(0).total
    assert last == 4 * layer + 2 * 64 + 1024 * 64


def test_distributed_optimizer_shards_states_only() -> None:
    read = job(bf16=True)
    provider = CatalogueProvider(read, cluster(("gpu", 4)))
    found = {}
    for sharded in (False, True):
        sizes = ParallelSizes(
            data_parallel_size=4, global_batch_size=16, use_distributed_optimizer=sharded
        )
        piece = chunk(8, embedding=True, loss=True)
        cost = chunk_cost(read, sizes, "gpu", piece, provider)
        memory = rank_memory(
            read, sizes, [piece], [cost], pipeline_rank=0, step=provider.step("gpu")
        )
        found[sharded] = memory.breakdown_bytes
    count = read.model.total_parameters()
    assert found[False]["parameters"] == 2 * count
    assert found[False]["gradients"] == 4 * count
    assert found[False]["optimizer"] == 12 * count
    assert found[True]["optimizer"] == 12 * count // 4


def test_experts_shard_over_ep_and_etp_not_tp() -> None:
    """Field report 15: 8 experts under tp 2, ep 4, etp 1."""
    read = job(num_experts=8, moe_router_topk=2, disable_bias_linear=True)
    layer = read.model.layer_parameters(0, tp=2, ep=4, etp=1)
    assert layer.expert == 2 * (2 * 64 * 256)
    provider = CatalogueProvider(read, cluster(("gpu", 8)))
    saved = {
        ep: provider.unit(
            UnitKey(
                kind="gpu", unit="moe_layer", tp=1, ep=ep, etp=1, micro_batch_size=1, seq_length=128
            )
        ).saved_bytes
        for ep in (1, 4)
    }
    assert saved[1] == saved[4]  # routed activations do not shrink with ep


def test_uniform_groups_have_a_best_size() -> None:
    """Field report 22: one input a group against a group's whole activations."""
    read = job(num_layers=8, bf16=True)
    provider = CatalogueProvider(read, cluster(("gpu", 4)))
    sizes = ParallelSizes(global_batch_size=16)
    need = {}
    for size in (1, 2, 4, 8):
        cost = chunk_cost(
            read, sizes, "gpu", chunk(8, policy=Recompute.full("uniform", size)), provider
        )
        need[size] = cost.saved_bytes + max(cost.forward_bytes, cost.backward_bytes)
    assert min(need, key=lambda size: need[size]) < 8
    assert need[8] > need[1]


def test_quadratic_growth_with_the_sequence() -> None:
    """Field report 13's kind: unfused attention grows with the square of the sequence."""

    def saved(seq: int) -> float:
        read = job(seq_length=seq, max_position_embeddings=seq, transformer_impl="local")
        provider = CatalogueProvider(read, cluster(("gpu", 1)))
        key = UnitKey(kind="gpu", unit="layer", tp=1, micro_batch_size=1, seq_length=seq)
        return provider.unit(key).saved_bytes

    assert saved(16384) / saved(8192) > 3.5


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4))
def test_recomputing_more_never_holds_more(layers: int, count: int, mbs: int) -> None:
    read = job(bf16=True, transformer_impl="local", attention_backend="unfused")
    provider = CatalogueProvider(read, cluster(("gpu", 1), kinds=[kind()]))
    sizes = ParallelSizes(micro_batch_size=mbs, global_batch_size=16 * mbs)
    less = chunk_cost(read, sizes, "gpu", chunk(layers), provider)
    block = Recompute.full("block", min(count, layers))
    more = chunk_cost(read, sizes, "gpu", chunk(layers, policy=block), provider)
    assert more.saved_bytes < less.saved_bytes
    assert more.backward_s > less.backward_s
    assert facts().transformer_engine


@given(
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((512, 1024, 4096)),
    st.sampled_from((Recompute(), Recompute.full("uniform", 1), Recompute.selective("mlp"))),
    st.integers(1, 4),
)
def test_memory_grows_with_micro_batch_sequence_and_micro_batches(
    pp: int, mbs: int, seq: int, policy: Recompute, groups: int
) -> None:
    """Under fused attention: the others' kernels are chosen by shape."""

    def peaks(mbs: int, seq: int, num_microbatches: int) -> list[int]:
        read = job(
            num_layers=8, seq_length=seq, max_position_embeddings=seq, attention_backend="flash"
        )
        sizes = ParallelSizes(
            pipeline_model_parallel_size=pp,
            micro_batch_size=mbs,
            global_batch_size=mbs * num_microbatches,
        )
        provider = CatalogueProvider(read, cluster(("gpu", pp)))
        found = []
        for rank in range(pp):
            piece = chunk(
                8 // pp,
                first=rank * 8 // pp,
                policy=policy,
                embedding=rank == 0,
                loss=rank == pp - 1,
            )
            cost = chunk_cost(read, sizes, "gpu", piece, provider)
            found.append(
                rank_memory(
                    read, sizes, [piece], [cost], pipeline_rank=rank, step=provider.step("gpu")
                ).peak_bytes
            )
        return found

    base = peaks(mbs, seq, groups)
    for more in (peaks(2 * mbs, seq, groups), peaks(mbs, 2 * seq, groups)):
        assert all(large >= small for large, small in zip(more, base, strict=True))
    later = peaks(mbs, seq, groups + 1)
    assert all(large >= small for large, small in zip(later, base, strict=True))
