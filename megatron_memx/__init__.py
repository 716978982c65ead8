"""MemX: plan and launch Megatron-LM pre-training on mixed GPU clusters.

Importing this package costs nothing: no torch, no Megatron, no numpy.
"""

from __future__ import annotations

import os as _os
from typing import Any

__version__ = "0.1.0"

# In a checkout, `patches/` and `launch/` stand beside this folder; in an installation, inside it.
# Looking in both makes every import the same from a wheel, an editable install and a checkout.
_checkout = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if all(
    _os.path.isfile(_os.path.join(_checkout, folder, "__init__.py"))
    for folder in ("patches", "launch")
):
    __path__.append(_checkout)

_PUBLIC = {
    "Plan": "megatron_memx.plan",
    "Cluster": "megatron_memx.cluster",
    "ModelShape": "megatron_memx.model",
    "ParallelSizes": "megatron_memx.parallel",
    "Recompute": "megatron_memx.parallel",
}
__all__ = ["Cluster", "ModelShape", "ParallelSizes", "Plan", "Recompute", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
