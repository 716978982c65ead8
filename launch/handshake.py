"""Before anything else, the ranks agree that they run the same plan.

Each rank puts its plan's signature into the rendezvous store and reads everybody's. A rank with
another plan would build other layers, and the job would hang in its first collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from megatron_memx.errors import BadInputError

TIMEOUT_S = 120.0
_PREFIX = "megatron_memx/plan"


def check(signature: str, *, rank: int, world_size: int, store: Any) -> None:
    """Refuse unless every rank has put the same signature into ``store``.

    Args:
        store: Has ``set(key, value)`` and a blocking ``get(key)``.

    Raises:
        BadInputError: Names the ranks that run another plan, or that never answered.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store.set(f"{_PREFIX}/{attempt}/{rank}", signature)
    others: dict[str, list[int]] = {}
    for other in range(world_size):
        try:
            found = store.get(f"{_PREFIX}/{attempt}/{other}")
        except Exception as error:
            raise BadInputError(
                f"rank {rank}: rank {other} did not say within {TIMEOUT_S:.0f} s which plan it "
                f"runs ({type(error).__name__})",
                fix="look at what that rank printed; it ended, or it runs without MemX",
            ) from error
        text = found.decode() if isinstance(found, bytes) else str(found)
        others.setdefault(text, []).append(other)
    if set(others) != {signature}:
        listing = "; ".join(
            f"{text[:12]} on rank(s) {', '.join(map(str, ranks))}"
            for text, ranks in sorted(others.items())
        )
        raise BadInputError(
            f"the ranks run different plans: {listing}",
            fix="the same script arguments, MemX version and cluster file on every node, or "
            "--memx-plan with the same file",
            flag="--memx-plan",
        )


def open_store(environment: dict[str, str] | None = None) -> tuple[Any, Callable[[], None]]:
    """Return the job's store, and what keeps it open until it is called.

    torchrun's agent hosts a store for the ranks; where it does not, rank 0 does, in a way that
    ``torch.distributed`` can share afterwards.
    """
    from torch.distributed import TCPStore

    env = os.environ if environment is None else environment
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    by_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        env["MASTER_ADDR"],
        int(env["MASTER_PORT"]),
        world,
        is_master=rank == 0 and not by_agent,
        timeout=timedelta(seconds=TIMEOUT_S),
        wait_for_workers=False,
        multi_tenant=True,
    )
    kept = [store]
    return store, kept.clear
