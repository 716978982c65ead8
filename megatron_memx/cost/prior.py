"""Costs from the catalogue alone: a roofline with efficiencies, used where nothing was measured."""

from __future__ import annotations

from functools import lru_cache

from megatron_memx.cluster import Cluster, DeviceKind, Link
from megatron_memx.cost.activations import footprint
from megatron_memx.cost.communication import all_reduce_s
from megatron_memx.cost.compute import UnitWork, unit_work
from megatron_memx.cost.units import MASK, StepCost, UnitCost, UnitKey
from megatron_memx.job import Job

# Shares of the peaks that training reaches where no efficiency was published, and the time that
# starts one kernel. Intervals below say how rough they are.
MATMUL_EFFICIENCY = 0.65
BANDWIDTH_EFFICIENCY = 0.75
KERNEL_START_S = {"cpu": 30e-6}
DEFAULT_KERNEL_START_S = 5e-6
PRIOR_LOG_SIGMA = 0.20
PRIOR_MEMORY_LOG_SIGMA = 0.08
# Adam reads parameter, gradient and two moments and writes three of them, in single precision.
_OPTIMIZER_MOVED_BYTES = 28.0
FIXED_S = {"cpu": 8e-3}
DEFAULT_FIXED_S = 20e-3


class CatalogueProvider:
    """A :class:`~megatron_memx.cost.units.UnitProvider` without measurements."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self._job = job
        self._cluster = cluster
        self.basis = "the device catalogue and a roofline; nothing was measured on these devices"
        self.unit = lru_cache(maxsize=None)(self._unit)

    def work(self, key: UnitKey) -> UnitWork:
        """Return the operators of a unit."""
        return unit_work(self._job.model, key, element_bytes=self._job.train.parameter_bytes)

    def _unit(self, key: UnitKey) -> UnitCost:
        kind = self._cluster.kinds[key.kind]
        work = self.work(key)
        forward, backward = self.times(kind, key, work)
        memory = footprint(self._job.model, key, self._job.train.parameter_bytes)
        return UnitCost(
            forward_s=forward,
            backward_s=backward,
            saved_bytes=memory.saved_bytes,
            transient_bytes=memory.transient_bytes,
            log_sigma=0.0 if key.unit == MASK else PRIOR_LOG_SIGMA,
            memory_log_sigma=PRIOR_MEMORY_LOG_SIGMA,
        )

    def times(self, kind: DeviceKind, key: UnitKey, work: UnitWork) -> tuple[float, float]:
        """Return (forward, backward) seconds by the roofline."""
        rate = kind.flops(self._job.train.precision) * (kind.matmul_efficiency or MATMUL_EFFICIENCY)
        bandwidth = kind.memory_bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY
        start = KERNEL_START_S.get(kind.platform, DEFAULT_KERNEL_START_S)

        def seconds(flops: float, moved: float, operators: float) -> float:
            return max(flops / rate + moved / bandwidth, operators * start)

        forward = seconds(work.matmul_flops, work.moved_bytes, work.operators)
        backward = seconds(2 * work.matmul_flops, 2 * work.moved_bytes, 2 * work.operators)
        again = work.recomputed_flops / rate + work.recomputed_bytes / bandwidth
        reduce_s = all_reduce_s(work.reduced_bytes, key.tp, self._tensor_link(key))
        if key.recompute == "full":
            again = max(again, work.operators * start) + reduce_s
        return forward + reduce_s, backward + again + reduce_s

    def _tensor_link(self, key: UnitKey) -> Link:
        ranks = self._cluster.ranks_of_kind(key.kind)
        return self._cluster.link(ranks[0], ranks[0])

    def step(self, kind: str) -> StepCost:
        """Return the per-iteration cost on a device kind."""
        device = self._cluster.kinds[kind]
        return StepCost(
            optimizer_s_per_parameter=_OPTIMIZER_MOVED_BYTES
            / (device.memory_bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY),
            optimizer_s=1e-3,
            # Gradients kept in 16 bits are copied to 32 for the step.
            optimizer_bytes_per_parameter=4.0 * (self._job.train.gradient_bytes < 4),
            optimizer_bytes=0.0,
            fixed_s=FIXED_S.get(device.platform, DEFAULT_FIXED_S),
        )
