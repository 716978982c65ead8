"""Costs from the catalogue and calibrated efficiencies: a roofline, where no unit was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from megatron_memx.cluster import Cluster, DeviceKind, Link
from megatron_memx.cost.activations import footprint
from megatron_memx.cost.calibration import Calibration
from megatron_memx.cost.communication import all_reduce_s
from megatron_memx.cost.compute import Product, UnitWork, unit_work
from megatron_memx.cost.efficiency import Efficiency, assumed, reached_links
from megatron_memx.cost.units import MASK, StepCost, UnitCost, UnitKey
from megatron_memx.job import Job

# Intervals say how rough a roofline is.
PRIOR_LOG_SIGMA = 0.20
PRIOR_MEMORY_LOG_SIGMA = 0.08
# Adam reads parameter, gradient and two moments and writes three of them, in single precision.
_OPTIMIZER_MOVED_BYTES = 28.0
# Fused attention rebuilds the scores in its backward pass: five products for two.
_FUSED_BACKWARD = 2.5
# Between being bound by the device and by the processor that feeds it, time passes smoothly.
_SHARPNESS = 4.0


class CatalogueProvider:
    """A :class:`~megatron_memx.cost.units.UnitProvider` without measured units.

    Args:
        efficiencies: Terms of device kinds; the others are assumed.
        calibrations: The same from files, with what they rest on.
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        efficiencies: Mapping[str, Efficiency] | None = None,
        calibrations: Mapping[str, Calibration] | None = None,
    ) -> None:
        self._job = job
        self._calibrations = known = dict(calibrations or {})
        given = {**{kind: item.efficiency for kind, item in known.items()}, **(efficiencies or {})}
        self.efficiencies = {
            kind: given.get(kind) or assumed(cluster.kinds[kind]) for kind in cluster.used_kinds
        }
        self.cluster = reached_links(cluster, self.efficiencies)
        told = [f"{kind}: calibrated on {item.basis}" for kind, item in known.items()]
        if told:
            told += [f"{kind}: catalogue" for kind in cluster.used_kinds if kind not in known]
            self.basis = "; ".join(told)
        else:
            self.basis = (
                "the device catalogue and a roofline; nothing was measured on these devices"
            )
        self.unit = lru_cache(maxsize=None)(self._unit)

    def work(self, key: UnitKey) -> UnitWork:
        """Return the operators of a unit."""
        return unit_work(self._job.model, key, element_bytes=self._job.train.parameter_bytes)

    def _unit(self, key: UnitKey) -> UnitCost:
        kind = self.cluster.kinds[key.kind]
        work = self.work(key)
        forward, backward = self.times(kind, key, work)
        memory = footprint(self._job.model, key, self._job.train.parameter_bytes)
        return UnitCost(
            forward_s=forward,
            backward_s=backward,
            saved_bytes=memory.saved_bytes,
            forward_bytes=memory.forward_bytes,
            backward_bytes=memory.backward_bytes,
            log_sigma=0.0 if key.unit == MASK else self._log_sigma(key.kind),
            memory_log_sigma=PRIOR_MEMORY_LOG_SIGMA,
        )

    def _log_sigma(self, kind: str) -> float:
        known = self._calibrations.get(kind)
        return PRIOR_LOG_SIGMA if known is None else known.log_sigma

    def times(self, kind: DeviceKind, key: UnitKey, work: UnitWork) -> tuple[float, float]:
        """Return (forward, backward) seconds by the roofline."""
        reach = self.efficiencies[key.kind]
        peak = kind.flops(self._job.train.precision)
        bandwidth = kind.memory_bandwidth_bytes_per_s * reach.bandwidth

        def seconds(products: tuple[Product, ...], fused: float = 1.0) -> float:
            return sum(
                product.flops * fused / (peak * reach.attention)
                if product.fused
                else product.flops * _penalty(product, reach.half_size) / (peak * reach.matmul)
                for product in products
            )

        def bound(device_s: float, host_s: float) -> float:
            return float((device_s**_SHARPNESS + host_s**_SHARPNESS) ** (1 / _SHARPNESS))

        moved_s = work.moved_bytes / bandwidth
        again = seconds(work.recomputed) + work.recomputed_bytes / bandwidth
        link = self._tensor_link(key)
        # The bytes keep the device busy; starting a collective's steps is the host's and wire's.
        sent_s = all_reduce_s(work.reduced_bytes, key.tp, replace(link, latency_s=0.0))
        slowed = 1 + reach.crossing * key.tp * key.across_nodes
        start_s = work.operators * reach.kernel_start_s * slowed
        collect_s = 0.0
        if work.reduced_bytes:
            one_s = reach.collective_start_s + all_reduce_s(1.0, key.tp, link)
            collect_s = work.collectives * one_s * slowed
        repeats = 1 + (key.recompute == "full")
        forward = bound(seconds(work.products) + moved_s + sent_s, start_s + collect_s)
        backward = bound(
            2 * seconds(work.products, _FUSED_BACKWARD / 2)
            + 2 * moved_s
            + again
            + repeats * sent_s,
            # The backward pass has two kernels for one, but no more collectives.
            (1 + repeats) * start_s + repeats * collect_s,
        )
        return forward, backward

    def _tensor_link(self, key: UnitKey) -> Link:
        ranks = self.cluster.ranks_of_kind(key.kind)
        return self.cluster.group_link(ranks[: key.tp])

    def step(self, kind: str) -> StepCost:
        """Return the per-iteration cost on a device kind."""
        device, reach = self.cluster.kinds[kind], self.efficiencies[kind]
        known = self._calibrations.get(kind)
        return StepCost(
            optimizer_s_per_parameter=_OPTIMIZER_MOVED_BYTES
            / (device.memory_bandwidth_bytes_per_s * reach.optimizer),
            optimizer_s=1e-3,
            # Gradients kept in 16 bits are copied to 32 for the step.
            optimizer_bytes_per_parameter=4.0 * (self._job.train.gradient_bytes < 4),
            optimizer_bytes=0.0,
            fixed_s=reach.fixed_s,
            exposed=reach.exposed,
            transfer_s=reach.transfer_s,
            reserved_bytes=known.reserved_bytes if known else 0.0,
        )


def _penalty(product: Product, half_size: float) -> float:
    """Return by how much a product's sides keep it from the rate of large ones."""
    return (
        (1 + half_size / product.rows)
        * (1 + half_size / product.columns)
        * (1 + half_size / product.inner)
    )
