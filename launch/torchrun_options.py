"""Where torchrun's own words end and the script begins, without importing torch.

torchrun's parser resolves abbreviations before it looks for the script, so that ``--r 1`` behind a
script can be taken for ``--redirects`` or called ambiguous. Here the words are split first, by
torchrun's full option names; what stands behind the script is never parsed at all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_memx.errors import BadInputError

SWITCHES = frozenset(
    ["standalone", "module", "no_python", "run_path", "virtual_local_rank", "help"]
)
WITH_VALUE = frozenset(
    (
        "nnodes nproc_per_node rdzv_backend rdzv_endpoint rdzv_id rdzv_conf max_restarts "
        "monitor_interval start_method event_log_handler role log_dir redirects tee "
        "log_line_prefix_template local_ranks_filter duplicate_stdout_filters "
        "duplicate_stderr_filters node_rank master_addr master_port local_addr logs_specs "
        "numa_binding signals_to_handle shutdown_timeout print_completion"
    ).split()
)
_SHORT = {"m": "module", "r": "redirects", "t": "tee", "h": "help"}
# torchrun reads these from PET_<NAME> where the option is not given.
_DEFAULTS = {"nnodes": "1:1", "nproc_per_node": "1", "node_rank": "0", "rdzv_backend": "static"}


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """A torchrun command line in its parts.

    Args:
        launcher: torchrun's words, as given.
        values: Option name -> value (switches: ``""``).
        script: Script path, module name or program; None if there is none.
        arguments: The script's words, untouched.
    """

    launcher: tuple[str, ...]
    values: dict[str, str] = field(default_factory=dict)
    script: str | None = None
    arguments: tuple[str, ...] = ()

    def value(self, name: str) -> str | None:
        """Return an option's value, its PET_ variable, or torchrun's default."""
        if name in self.values:
            return self.values[name]
        return os.environ.get(f"PET_{name.upper()}") or _DEFAULTS.get(name)

    def on(self, name: str) -> bool:
        """Whether a switch is set, by option or PET_ variable."""
        return name in self.values or os.environ.get(f"PET_{name.upper()}", "0") == "1"

    @property
    def num_nodes(self) -> int:
        """Most nodes of the job (``--nnodes`` may be a range)."""
        text = str(self.value("nnodes"))
        try:
            return int(text.rsplit(":", maxsplit=1)[-1])
        except ValueError:
            raise BadInputError(
                f"--nnodes {text!r} is neither a number nor a range",
                fix="1, or 1:4",
                flag="--nnodes",
            ) from None


def split(words: Sequence[str]) -> Invocation:
    """Split a command line into torchrun's words, the script and the script's words.

    Raises:
        BadInputError: An option that torchrun does not have (no abbreviations), or one that lacks
            its value.
    """
    values: dict[str, str] = {}
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--":
            rest = words[index + 1 :]
            return _invocation(words[:index], values, rest)
        if not word.startswith("-") or word == "-":
            return _invocation(words[:index], values, words[index:])
        name, value, takes = option_at(word, words[index + 1 :])
        values[name] = value
        index += 1 + takes
    return _invocation(words, values, ())


def _invocation(launcher: Sequence[str], values: dict[str, str], rest: Sequence[str]) -> Invocation:
    return Invocation(
        launcher=tuple(launcher),
        values=values,
        script=rest[0] if rest else None,
        arguments=tuple(rest[1:]),
    )


def option_at(word: str, behind: Sequence[str]) -> tuple[str, str, int]:
    """Return (name, value, words taken from behind)."""
    if word.startswith("--"):
        flag, sign, value = word.partition("=")
        name = flag[2:].replace("-", "_")
    else:
        name = _SHORT.get(word[1], "")
        flag, sign, value = word[:2], word[2:], word[2:].removeprefix("=")
    if name in SWITCHES and not sign:
        return name, "", 0
    if name in WITH_VALUE:
        if sign:
            return name, value, 0
        if behind:
            return name, behind[0], 1
        raise BadInputError(f"torchrun option {flag} needs a value", flag=flag)
    raise _unknown(flag)


def _unknown(flag: str) -> BadInputError:
    import difflib

    if flag.startswith("--memx-") or flag == "--auto-parallel":
        return BadInputError(
            f"{flag} stands before the script; MemX's options stand behind it",
            fix=f"memx-torchrun ... script.py {flag} ...",
            flag=flag,
        )
    known = ["--" + name.replace("_", "-") for name in sorted(SWITCHES | WITH_VALUE)]
    near = [name for name in known if name.startswith(flag)] or difflib.get_close_matches(
        flag, known, n=2
    )
    return BadInputError(
        f"{flag} is not an option of torchrun (abbreviations are not taken)",
        fix=" or ".join(near) if near else "torchrun's options stand before the script",
        flag=flag,
    )
