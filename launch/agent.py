"""torchrun itself, in a process of its own, told apart from its script's words beforehand.

``python -m megatron_memx.launch.agent RUN_DIR COUNT <COUNT torchrun words> MODULE <arguments>``
runs MODULE on every rank. Only torchrun's words are parsed by torchrun's parser.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron_memx.errors import EXIT_OK, EXIT_TRAINING_FAILED

FAILURE_FILE = "failure.json"


def namespace(launcher: list[str], module: str, arguments: list[str]) -> Any:
    """Return the arguments of ``torch.distributed.run.run``."""
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args([*launcher, module])
    parsed.training_script_args = arguments
    single = str(parsed.nnodes).rpartition(":")[2] == "1"
    chosen = parsed.rdzv_endpoint or parsed.master_port is not None or parsed.standalone
    if single and parsed.rdzv_backend == "static" and not chosen:
        # One node needs no agreed port: a free one cannot collide with another job's.
        parsed.standalone = True
    return parsed


def main(words: list[str]) -> int:
    """Run the agent and return its exit code; a failed rank is written to the run folder."""
    run_dir, count = Path(words[0]), int(words[1])
    launcher, rest = words[2 : 2 + count], words[2 + count :]
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import run

    try:
        run(namespace(launcher, rest[0], rest[1:]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        data = {"rank": rank, "exit_code": failure.exitcode, "pid": failure.pid}
        (run_dir / FAILURE_FILE).write_text(json.dumps(data), encoding="utf-8")
        return EXIT_TRAINING_FAILED
    except SignalException as error:
        return 128 + int(error.sigval)
    return EXIT_OK


if __name__ == "__main__":
    # Nothing here may be left to interpreter shutdown: threads of the store can hang it.
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
