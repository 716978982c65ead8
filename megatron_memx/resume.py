"""Whether a job can go on from its checkpoint under a plan, judged before anything starts.

The plan and its layout are stamped beside each checkpoint (``memx_plan.json`` in its folder), so
that the next job knows under which split it was written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_memx.errors import BadInputError
from megatron_memx.job import Job
from megatron_memx.plan import Plan

STAMP = "memx_plan.json"
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """Under what a checkpoint was written."""

    layout: str
    label: str
    use_distributed_optimizer: bool
    fully_reshardable: bool
    sound_optimizer: bool


def stamp_of(plan: Plan, *, fully_reshardable: bool, sound_optimizer: bool) -> dict[str, object]:
    """Return the content of a stamp file.

    Args:
        sound_optimizer: Whether a fully reshardable save of this run writes every bucket rightly
            (Megatron up to 0.19 does not; MemX mends it).
    """
    return {
        "schema": 1,
        "signature": plan.signature,
        "layout": plan.layout,
        "label": plan.parallel.label,
        "use_distributed_optimizer": plan.parallel.use_distributed_optimizer,
        "fully_reshardable": fully_reshardable,
        "sound_optimizer": sound_optimizer,
    }


def read_stamp(checkpoint: Path) -> Stamp | None:
    """Return the stamp of a checkpoint folder, or None if it has none that can be read."""
    try:
        data = json.loads((checkpoint / STAMP).read_text(encoding="utf-8"))
        return Stamp(
            layout=str(data["layout"]),
            label=str(data["label"]),
            use_distributed_optimizer=bool(data["use_distributed_optimizer"]),
            fully_reshardable=bool(data["fully_reshardable"]),
            sound_optimizer=bool(data["sound_optimizer"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint below ``folder`` by Megatron's tracker file."""
    try:
        text = (folder / TRACKER).read_text(encoding="utf-8").strip()
    except OSError:
        return None
    name = f"iter_{int(text):07d}" if text.isdigit() else text
    found = folder / name
    return found if found.is_dir() else None


def check_resume(plan: Plan, job: Job) -> None:
    """Refuse a checkpoint that cannot be read under the plan.

    Raises:
        BadInputError: Says why, and what would work.
    """
    train = job.train
    if train.save and "save_interval" not in job.typed and "save_retain_interval" not in job.typed:
        raise BadInputError(
            "--save without --save-interval: Megatron stops with an assertion that says nothing",
            fix="--save-interval 1000",
            flag="--save-interval",
        )
    if not train.load:
        return
    checkpoint = latest(Path(train.load))
    if checkpoint is None:
        return  # nothing to resume: Megatron starts afresh and says so
    stamp = read_stamp(checkpoint)
    sharded = (checkpoint / ".metadata").exists() or (checkpoint / "metadata.json").exists()
    if not sharded:
        layout = stamp.layout if stamp else None
        if layout != plan.layout:
            raise BadInputError(
                f"{checkpoint} is in the old torch format, one file a rank; it was written under "
                f"layout {layout or '(unknown)'} and the plan has {plan.layout}",
                fix="the same layout, or convert it to torch_dist with the old one first",
                flag="--ckpt-format",
            )
        return
    if stamp is None:
        return  # written without MemX; Megatron reads any torch_dist checkpoint or says why not
    skips = any(name in job.typed for name in ("no_load_optim", "finetune"))
    if skips or not stamp.use_distributed_optimizer:
        return
    moved = (stamp.layout, stamp.label) != (plan.layout, plan.parallel.label)
    if moved and not stamp.fully_reshardable:
        raise BadInputError(
            f"{checkpoint}: its distributed optimizer was saved for layout {stamp.layout} "
            f"({stamp.label}); it cannot be resharded to {plan.layout} ({plan.parallel.label})",
            fix="the plan that it was written under, or --no-load-optim; save with "
            "--dist-ckpt-optim-fully-reshardable to be free of this",
            flag="--no-load-optim",
        )
    if stamp.fully_reshardable and not stamp.sound_optimizer:
        raise BadInputError(
            f"{checkpoint}: its optimizer state was written by a Megatron that damages every "
            "gradient bucket but the first (up to 0.19) without MemX's mend",
            fix="--no-load-optim, or an older checkpoint",
            flag="--no-load-optim",
        )
