"""What a configuration asks for that nobody measured."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_memx.cost.units import MASK, UnitKey, UnitProvider


def gaps(keys: Iterable[UnitKey], provider: UnitProvider) -> list[str]:
    """Return which of a configuration's units lie outside what was measured, in words.

    Device kinds of which nothing was measured are left to the provider's own ``basis``.
    """
    costs = {key: provider.unit(key) for key in keys if key.unit != MASK}
    measured = {key.kind for key, cost in costs.items() if cost.measured}
    found: dict[str, None] = {}
    for key, cost in costs.items():
        if key.kind not in measured or cost.in_range:
            continue
        name = key.unit.replace("_", " ")
        if key.recompute != "none":
            name += f" under {key.recompute} recomputation"
        if cost.measured:
            where = f"micro-batch {key.micro_batch_size}, sequence {key.seq_length}"
            found[f"{key.kind}: {name} extrapolated to {where}"] = None
        else:
            found[f"{key.kind}: {name} at tp {key.tp} from the catalogue, not measured"] = None
    return list(found)
