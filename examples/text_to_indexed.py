"""Turn folders or files of text into Megatron's ``.bin`` and ``.idx``, byte by byte.

    python examples/text_to_indexed.py --input DOCS --output data/docs --suffix .txt .rst

Each file is one document, encoded by Megatron's byte-level tokenizer and closed by an end-of-text
token. Train on it with ``--tokenizer-type NullTokenizer --vocab-size N``; N is printed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

VOCAB_SIZE = 512


def documents(inputs: list[str], suffixes: list[str]) -> Iterator[tuple[Path, str]]:
    """Yield (path, text) of every readable file, sorted, so that the data is the same each time."""
    for name in inputs:
        root = Path(name)
        files = [root] if root.is_file() else sorted(root.rglob("*"))
        for file in files:
            if not file.is_file() or (not root.is_file() and file.suffix not in suffixes):
                continue
            try:
                text = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if text.strip():
                yield file, text


def python_documentation() -> Iterator[tuple[str, str]]:
    """Yield (module, documentation) of the installed Python's standard library."""
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in ("antigravity", "this", "idlelib", "turtledemo"):
            continue
        try:
            module = importlib.import_module(name)
        except Exception:  # a module of another system
            continue
        parts = [module.__doc__ or ""]
        for key in sorted(vars(module)):
            thing = vars(module)[key]
            if getattr(thing, "__module__", None) == name and isinstance(thing.__doc__, str):
                parts.append(f"{key}: {thing.__doc__}")
        text = "\n\n".join(part for part in parts if part.strip())
        if text.strip():
            yield name, text


def main() -> int:
    """Write the two files and print what they hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--input", nargs="+", default=[], help="files or folders of text")
    parser.add_argument(
        "--python-documentation",
        action="store_true",
        help="also take the documentation texts of the installed Python",
    )
    parser.add_argument("--output", required=True, help="path without .bin and .idx")
    parser.add_argument("--suffix", nargs="+", default=[".txt", ".md", ".rst"])
    parser.add_argument("--max-bytes", type=int, default=None, help="stop after so much text")
    options = parser.parse_args()
    if not options.input and not options.python_documentation:
        parser.error("nothing to read: give --input or --python-documentation")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from megatron.core.tokenizers.text.libraries import ByteLevelTokenizer

    tokenizer = ByteLevelTokenizer(vocab_size=VOCAB_SIZE)
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    # NullTokenizer takes the last number of the vocabulary as end of text.
    end = VOCAB_SIZE - 1
    builder = IndexedDatasetBuilder(f"{output}.bin.tmp", dtype=numpy.uint16)
    count = size = 0
    texts: list[Iterator[tuple[object, str]]] = [documents(options.input, options.suffix)]
    if options.python_documentation:
        texts.append(python_documentation())
    for source in texts:
        for _, text in source:
            if options.max_bytes is not None and size >= options.max_bytes:
                break
            tokens = [*tokenizer.text_to_ids(text), end]
            builder.add_document(torch.tensor(tokens, dtype=torch.int64), [len(tokens)])
            count, size = count + 1, size + len(tokens)
    if not count:
        print("text_to_indexed: no text was found", file=sys.stderr)
        return 2
    builder.finalize(f"{output}.idx")
    os.replace(f"{output}.bin.tmp", f"{output}.bin")
    print(f"{count} documents, {size} tokens in {output}.bin; --vocab-size {VOCAB_SIZE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
