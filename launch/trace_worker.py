"""A process that traces: tasks come in as lines of JSON, results go out the same way.

One import of Megatron serves every task. Nothing here needs a GPU or the memory that it counts.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from megatron_memx.launch.supervisor import die_with_parent


def prepare_environment(environment: dict[str, str]) -> None:
    """Set what has to stand before torch and Megatron are imported."""
    environment["TORCHDYNAMO_DISABLE"] = "1"
    # Megatron asks for it with tensor parallelism and does not use it here.
    environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"


def answer(line: str) -> dict[str, Any]:
    """Trace one task and return its bytes, or what Megatron said against it."""
    from megatron_memx.patches.trace.stage import TraceTask, trace

    data = json.loads(line)
    data["words"] = tuple(data["words"])
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]  # Megatron sets them for one attention backend and refuses the next
    try:
        return {"result": asdict(trace(TraceTask(**data)))}
    except (Exception, SystemExit) as error:  # whatever Megatron refuses with is the answer
        return {"error": f"{type(error).__name__}: {error}".strip()}


def main() -> None:
    """Answer every line of the standard input."""
    die_with_parent()
    # What Megatron prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    prepare_environment(os.environ)  # type: ignore[arg-type]
    from megatron_memx.patches.platform import cpu
    from megatron_memx.patches.trace import world

    cpu.install()
    world.import_megatron()
    for line in sys.stdin:
        answers.write(json.dumps(answer(line)) + "\n")


if __name__ == "__main__":
    main()
