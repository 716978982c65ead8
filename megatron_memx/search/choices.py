"""What one stage may choose from: recompute policies, and the options worth keeping."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_memx.job import Job
from megatron_memx.legality import Facts, check_recompute, uniform_group_legal
from megatron_memx.parallel import Recompute
from megatron_memx.pins import Constraints
from megatron_memx.search.evaluate import StageOption

# Block policies are offered at this many numbers of layers, whatever the chunk's size.
_BLOCK_STEPS = 8


def policies(job: Job, pins: Constraints, facts: Facts, layers: int) -> list[Recompute]:
    """Return the policies offered to a chunk of ``layers`` layers."""
    if pins.recompute is not None:
        return [pins.recompute]
    offered = [Recompute()]
    # A fused kernel recomputes attention anyway: nothing would be saved.
    if not job.model.flash_attention:
        offered.append(Recompute.selective("core_attn"))
    step = max(1, layers // _BLOCK_STEPS)
    blocks = sorted({*range(step, layers + 1, step), layers} - {0})
    offered += [Recompute.full("block", count) for count in blocks]
    groups = [size for size in (2, 4, 8) if size <= layers]
    offered += [Recompute.full("uniform", size) for size in groups]
    return [
        policy
        for policy in offered
        if not check_recompute(job, policy, facts)
        and uniform_group_legal(policy, layers, facts) is None
    ]


def pareto(options: Sequence[StageOption]) -> list[StageOption]:
    """Return the options that no other beats in both time and memory, fastest first."""
    kept: list[StageOption] = []
    ranked = sorted(options, key=lambda option: (option.busy_s, option.memory.peak_bytes))
    for option in ranked:
        if not kept or option.memory.peak_bytes < kept[-1].memory.peak_bytes:
            kept.append(option)
    return kept
