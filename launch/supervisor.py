"""One child with everything below it: started, told to end, and gone when this returns.

The child gets a process group of its own. This process adopts orphans below it, so that ranks whose
agent died are found and ended; processes of anybody else are never touched. If this process is
killed outright, the kernel tells the child.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

GRACE_S = 40.0
_AFTER_GRACE_S = 5.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send ``number`` to this process when its parent dies."""
    _prctl(_PR_SET_PDEATHSIG, number)


def run(command: Sequence[str], environment: Mapping[str, str], *, grace_s: float = GRACE_S) -> int:
    """Run ``command`` to its end and return its exit code; 128 + n if signal n was sent to us.

    A signal to this process is passed on as SIGTERM, once; after ``grace_s`` (or a second signal)
    everything below is killed.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    received: list[int] = []

    def remember(number: int, _frame: object) -> None:
        received.append(number)

    before = {number: signal.signal(number, remember) for number in _FORWARDED}
    try:
        parent = os.getpid()

        def prepare() -> None:
            die_with_parent(signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        child = subprocess.Popen(
            list(command),
            env=dict(environment),
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509 - this process has no threads
        )
        code = _wait(child, received, grace_s)
    finally:
        end_leftovers()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + received[0] if received else code


def _wait(child: subprocess.Popen[bytes], received: list[int], grace_s: float) -> int:
    deadline: float | None = None
    while True:
        try:
            return child.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            pass
        if received and deadline is None:
            deadline = time.monotonic() + grace_s
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
        if deadline is not None and (time.monotonic() > deadline or len(received) > 1):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            return child.wait()


def end_leftovers() -> None:
    """End every process below this one: SIGTERM, a moment, SIGKILL; then collect them all."""
    if not list(descendants(os.getpid())):
        _reap()
        return
    for number, patience_s in ((signal.SIGTERM, _AFTER_GRACE_S), (signal.SIGKILL, _AFTER_GRACE_S)):
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            _reap()
            if not list(descendants(os.getpid())):
                return
            time.sleep(0.05)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def descendants(root: int) -> Iterator[int]:
    """Yield the living processes below ``root``, from the kernel's process table."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended in the meantime
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    todo = list(children.get(root, ()))
    while todo:
        pid = todo.pop()
        yield pid
        todo += children.get(pid, ())


def agent_command(
    launcher: Sequence[str], module: str, arguments: Sequence[str], run_dir: str
) -> list[str]:
    """Return the command of the agent that runs ``python -m module arguments`` on every rank."""
    return [
        sys.executable,
        "-m",
        "megatron_memx.launch.agent",
        run_dir,
        str(len(launcher)),
        *launcher,
        module,
        *arguments,
    ]
