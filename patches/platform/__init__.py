"""The shim of each platform: what makes Megatron's ``torch.cuda`` calls answer for it."""

from __future__ import annotations

import importlib
import importlib.util

from megatron_memx.errors import BadInputError
from megatron_memx.platforms import get


def install(name: str) -> None:
    """Make ``torch.cuda`` answer for the platform.

    Raises:
        BadInputError: Unknown platform, or one whose torch plug-in is missing here.
    """
    platform = get(name)
    if name == "cpu":
        from megatron_memx.patches.platform import cpu

        cpu.install()
        return
    if platform.package is not None:
        if importlib.util.find_spec(platform.package) is None:
            raise BadInputError(
                f"platform {name} needs {platform.package}, which is not installed; planning works "
                "without it, launching does not",
                fix=f"install {platform.package} for your torch",
                flag="--memx-platform",
            )
        importlib.import_module(platform.package)
