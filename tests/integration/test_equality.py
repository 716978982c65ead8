"""A plan trains exactly what stock Megatron trains with the same split; only memory differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_MODEL, TINY_TRAINING
from runs import NONE, SELECTIVE, Run, block, plan_for, run_plan, run_stock, uniform

from megatron_memx.megatron_args import without_options
from megatron_memx.report.measured import read_measured
from megatron_memx.versions import megatron_version, release

pytestmark = pytest.mark.megatron
WORDS = [*TINY_MODEL, *TINY_TRAINING]
MODERN = release(megatron_version() or "0.0") >= (0, 18)


def equal(plan_run: Run, stock: Run) -> None:
    """Losses and gradient norms of every step are the same numbers, bit for bit."""
    assert len(stock.steps) == 3
    assert plan_run.steps == stock.steps


@pytest.fixture(scope="module")
def stock_uneven(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("stock")
    return run_stock(
        2,
        folder,
        *("--micro-batch-size", "1", "--pipeline-model-parallel-size", "2"),
        *("--pipeline-model-parallel-layout", "Ettt|tL"),
        env={"MEMX_CACHE_DIR": str(folder / "cache")},
    )


@pytest.mark.parametrize(
    "policies",
    [
        [[block(2)], [SELECTIVE]],
        [[uniform(2)], [NONE]],
        [[SELECTIVE], [block(1)]],
    ],
    ids=["block-selective", "uniform-none", "selective-block"],
)
def test_uneven_pipeline_with_mixed_recomputation(
    policies: list[list[Any]], stock_uneven: Run, tmp_path: Path
) -> None:
    plan = plan_for([[3], [1]], WORDS, recompute=policies)
    run = run_plan(plan, tmp_path)
    equal(run, stock_uneven)
    for rank, row in enumerate(policies):
        policy = row[0]
        wanted = None if policy.granularity == "none" else policy.granularity
        assert run.ranks[rank]["layers"] == [
            [[3, 1][rank], wanted, policy.method, policy.num_layers]
        ]


def test_memory_falls_on_exactly_the_stage_that_recomputes(tmp_path: Path) -> None:
    plain = plan_for([[3], [1]], WORDS)
    first = plan_for([[3], [1]], WORDS, recompute=[[block(3)], [NONE]])
    peaks = []
    for index, plan in enumerate((plain, first)):
        cache = tmp_path / f"cache{index}"
        run_plan(plan, tmp_path / str(index), env={"MEMX_CACHE_DIR": str(cache)})
        (run_dir,) = (cache / "runs").iterdir()
        measured = read_measured(run_dir, num_microbatches=4)
        assert measured is not None or (run_dir / "rank_0.json").exists()
        import json

        peaks.append(
            [
                max(
                    step["peak_allocated_bytes"] or 0
                    for step in json.loads((run_dir / f"rank_{rank}.json").read_text())["steps"]
                )
                for rank in (0, 1)
            ]
        )
    (a0, a1), (b0, b1) = peaks
    assert b0 < 0.9 * a0
    assert abs(b1 - a1) < 0.01 * a1


@pytest.mark.skipif(not MODERN, reason="0.17 gets virtual stages with overlap wrong by itself")
def test_virtual_stages_with_a_policy_each(tmp_path: Path) -> None:
    words = [*WORDS]
    words[words.index("--num-layers") + 1] = "6"
    policies = [[block(1), SELECTIVE], [uniform(2), NONE]]
    plan = plan_for([[1, 2], [2, 1]], words, recompute=policies)
    run = run_plan(plan, tmp_path / "plan", model=words)
    stock = run_stock(
        2,
        tmp_path / "stock",
        *("--micro-batch-size", "1", "--pipeline-model-parallel-size", "2"),
        *("--pipeline-model-parallel-layout", "Et|tt|tt|tL"),
        model=words,
    )
    equal(run, stock)
    assert run.ranks[1]["layers"] == [[2, "full", "uniform", 2], [1, None, None, None]]


def test_tensor_parallel(tmp_path: Path) -> None:
    plan = plan_for([[4]], WORDS, tensor_model_parallel_size=2, recompute=[[block(2)]])
    run = run_plan(plan, tmp_path / "plan")
    stock = run_stock(
        2,
        tmp_path / "stock",
        *("--micro-batch-size", "1", "--tensor-model-parallel-size", "2"),
    )
    equal(run, stock)


def test_data_parallel_with_distributed_optimizer(tmp_path: Path) -> None:
    plan = plan_for(
        [[4]],
        WORDS,
        data_parallel_size=2,
        use_distributed_optimizer=True,
        recompute=[[uniform(3)]],
    )
    run = run_plan(plan, tmp_path / "plan")
    stock = run_stock(
        2, tmp_path / "stock", *("--micro-batch-size", "1", "--use-distributed-optimizer")
    )
    equal(run, stock)


@pytest.mark.skipif(not MODERN, reason="0.17 has no HybridModel")
def test_hybrid_model_of_a_gpt_like_pattern(tmp_path: Path) -> None:
    """A layer of the plan is an attention and an MLP of the pattern; block policies count both."""
    words = [*without_options(WORDS, {"num_layers"}), "--hybrid-layer-pattern", "*-*-*-*-"]
    plan = plan_for([[3], [1]], words, recompute=[[block(2)], [SELECTIVE]])
    run = run_plan(plan, tmp_path / "plan", model=words, env={"TEST_HYBRID": "1"})
    stock_words = [*words]
    stock_words[stock_words.index("*-*-*-*-")] = "*-*-*-|*-"
    stock = run_stock(
        2,
        tmp_path / "stock",
        *("--micro-batch-size", "1", "--pipeline-model-parallel-size", "2"),
        model=stock_words,
        env={"TEST_HYBRID": "1"},
    )
    equal(run, stock)
    assert run.ranks[0]["layers"] == [[6, "full", "block", 4]]
    assert run.ranks[1]["layers"] == [[2, "selective", None, None]]


def test_stage_order_is_applied_by_ranks(stock_uneven: Run, tmp_path: Path) -> None:
    """Stage 0 on launcher rank 1: the same training, other processes."""
    plan = plan_for([[3], [1]], WORDS, rank_order=[1, 0])
    run = run_plan(plan, tmp_path)
    equal(run, stock_uneven)


@pytest.mark.slow
def test_virtual_stages_on_three_ranks_of_any_release(tmp_path: Path) -> None:
    """0.17 runs them without the overlap that it gets wrong; the plan sees to that."""
    words = [*WORDS]
    words[words.index("--num-layers") + 1] = "8"
    words[words.index("--global-batch-size") + 1] = "6"
    policies = [[block(1), NONE], [SELECTIVE, uniform(2)], [NONE, block(1)]]
    run = run_plan(
        plan_for([[1, 2], [1, 2], [1, 1]], words, recompute=policies),
        tmp_path / "plan",
        model=words,
    )
    stock = run_stock(
        3,
        tmp_path / "stock",
        *("--micro-batch-size", "1", "--pipeline-model-parallel-size", "3"),
        *("--pipeline-model-parallel-layout", "Et|t|t|tt|tt|tL"),
        *([] if MODERN else ["--no-overlap-p2p-communication"]),
        model=words,
    )
    equal(run, stock)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "stock_words", "more"),
    [
        (
            [[2], [1], [2], [1]],
            ["--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout"]
            + ["Ett|t|tt|tL"],
            {"recompute": [[block(1)], [SELECTIVE], [uniform(2)], [NONE]]},
        ),
        (
            [[4], [2]],
            ["--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout"]
            + ["Etttt|ttL", "--tensor-model-parallel-size", "2"],
            {"tensor_model_parallel_size": 2, "recompute": [[uniform(3)], [SELECTIVE]]},
        ),
        (
            [[4], [2]],
            ["--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout"]
            + ["Etttt|ttL", "--use-distributed-optimizer"],
            {
                "data_parallel_size": 2,
                "use_distributed_optimizer": True,
                "recompute": [[block(4)], [NONE]],
            },
        ),
    ],
    ids=["pp4", "tp2-pp2", "dp2-pp2-distributed-optimizer"],
)
def test_four_ranks(
    layers: list[list[int]], stock_words: list[str], more: dict[str, Any], tmp_path: Path
) -> None:
    words = [*WORDS]
    words[words.index("--num-layers") + 1] = "6"
    run = run_plan(plan_for(layers, words, **more), tmp_path / "plan", model=words)
    stock = run_stock(4, tmp_path / "stock", "--micro-batch-size", "1", *stock_words, model=words)
    equal(run, stock)
