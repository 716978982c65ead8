"""The only part that touches the insides of torch and Megatron, inside the rank processes.

One module a seam, each with a ``PATCH``; :mod:`registry` applies them. ``apply`` is called once,
before the user's script is imported; ``verify`` after it has ended.
"""

from __future__ import annotations

from megatron_memx.patches.registry import Context, Patch

from megatron_memx.errors import UpstreamChangedError


def all_patches() -> tuple[Patch, ...]:
    """Return every patch in the order in which they are applied."""
    from megatron_memx.patches import (
        arguments,
        checkpoint,
        dataset,
        hybrid,
        recompute,
        schedule,
    )

    return (
        arguments.PATCH,
        dataset.PATCH,
        hybrid.PATCH,
        recompute.PATCH,
        checkpoint.RESHARDABLE,
        checkpoint.TORCH_ADAM,
        checkpoint.STAMP_PATCH,
        schedule.PATCH,
    )


def apply(context: Context) -> None:
    """Install the platform shim and every patch that ``context`` needs; idempotent.

    Raises:
        UpstreamChangedError: The installed Megatron's code is unknown to a needed patch.
        BadInputError: The platform is unknown or its torch plug-in is missing.
    """
    from megatron_memx.patches import platform
    from megatron_memx.patches.registry import apply_all

    if context.platform is not None:
        platform.install(context.platform)
    apply_all(all_patches(), context)


def verify() -> None:
    """Refuse to call a run good in which a needed patch never ran.

    Raises:
        UpstreamChangedError: Names the patches.
    """
    from megatron_memx.patches.registry import never_fired

    silent = never_fired(all_patches())
    if silent:
        raise UpstreamChangedError(
            f"the script ended but these patches never ran: {', '.join(silent)}; the run did not "
            "follow its plan",
            fix="check that the script trains with megatron.training of this environment",
        )
