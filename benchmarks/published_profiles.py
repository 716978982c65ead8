"""Convert published per-layer profiles to a `runs.csv` that `memx evaluate` fits on.

    python benchmarks/published_profiles.py FOLDER runs.csv

FOLDER is `sailor/Planner/sailor_planner/profiles` of eth-easl/sailor (MIT): one file a model and
GPU, micro-batch -> tensor-parallel size -> layer -> [forward s, backward s, update s]. Each
(micro-batch, size) becomes the run that it is a profile of: one micro-batch through all layers on
one tensor-parallel group, then the optimizer's step. What the source does not tell stays blank.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator
from pathlib import Path

from megatron_memx.evaluation.runs import COLUMNS

# layers, hidden, ffn, heads, kv heads, sequence, vocabulary: the models' public configurations.
_MODELS = {
    "OPT-350": (24, 1024, 4096, 16, 16, 2048, 50272),
    "GPT-Neo-2.7": (32, 2560, 10240, 20, 20, 2048, 50257),
    "OPT-30": (48, 7168, 28672, 56, 56, 2048, 50272),
    "LLAMA-3-8": (32, 4096, 14336, 32, 8, 2048, 128256),
}
_GPUS = {
    "A100-40": "A100-40GB",
    "A100-80": "A100-80GB",
    "GH-96": "GH200-96GB",
    "V100-16": "V100-16GB",
    "RTX-3090": "RTX 3090",
}


def rows(folder: Path) -> Iterator[dict[str, object]]:
    """Yield one run a profile; files of GPUs or models that are not known are skipped."""
    for file in sorted(folder.glob("*.json")):
        model, _, gpu = file.stem.partition("_")
        if model not in _MODELS or gpu not in _GPUS:
            continue
        layers, hidden, ffn, heads, groups, seq, vocab = _MODELS[model]
        for mbs, sizes in json.loads(file.read_text(encoding="utf-8")).items():
            for tp, profile in sizes.items():
                # Embedding, layers and head: another count is another model's file.
                if len(profile) not in (layers + 2, layers + 3):
                    continue
                yield {
                    **{"source": "sailor-profiles", "row_ref": f"{file.stem} mbs {mbs} tp {tp}"},
                    **{"model": model, "layers": layers, "hidden": hidden, "ffn": ffn},
                    **{"heads": heads, "kv_heads": groups, "seq": seq, "vocab": vocab},
                    **{"gpu": _GPUS[gpu], "num_gpus": tp, "gpus_per_node": tp, "tp": tp, "pp": 1},
                    **{"dp": 1, "mbs": mbs, "gbs": mbs, "seq_parallel": "false"},
                    **{"dist_opt": "false", "recompute": "none", "framework": "Sailor"},
                    "iter_time_s": sum(map(sum, profile.values())),
                    "notes": "sum of per-layer profiles; precision is not told",
                }


def main() -> int:
    """Convert."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    found = list(rows(options.folder))
    if not found:
        parser.error(f"{options.folder} has no file of a known model and GPU, <model>_<gpu>.json")
    with options.output.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(found)
    print(f"{options.output}: {len(found)} runs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
