"""What a prepared set holds. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mgk.data.manifest import Manifest
from mgk.data.preparation import prepared
from mgk.data.splits import Split
from mgk.data.task_registry import Task, find_task
from mgk.data.vocabularies import Vocabulary, prepared_vocabulary

_BINS = 8
_SHOWN_TOKENS = 60


@dataclass(frozen=True)
class SplitSummary:
    """One split; lengths are those of sequences, or of lines of running text."""

    name: str
    examples: int  # tokens of running text
    shortest: int
    mean: float
    longest: int
    histogram: list[tuple[int, int, int]]  # from, to (included), how many
    classes: list[int]  # how many examples have each label
    first: list[str]  # readable


def inspect(
    name: str, *, folder: Path | str | None = None, first: int = 3
) -> tuple[Manifest, list[SplitSummary]]:
    """The manifest of a prepared set, and a summary of each split."""
    place, manifest = prepared(name, folder)
    task = find_task(name)
    vocabulary = prepared_vocabulary(place, manifest)
    splits = [Split(place, manifest, split) for split in manifest.splits]
    return manifest, [_summary(task, split, vocabulary, first) for split in splits]


def _summary(task: Task, split: Split, vocabulary: Vocabulary, first: int) -> SplitSummary:
    tokens = split["tokens"]
    if task.kind == "language":
        end = ord("\n") if vocabulary.eos_id is None else vocabulary.eos_id
        offsets = np.concatenate([[0], np.flatnonzero(tokens == end) + 1])
    elif task.kind == "image":
        offsets = np.arange(len(tokens) + 1) * tokens.shape[1]
    else:
        offsets = split["offsets"]
    lengths = np.diff(offsets)
    flat = tokens.reshape(-1)
    each = 2 if task.kind == "pair" else 1
    shown = range(each * first)
    if task.kind == "language":  # no empty lines
        shown = np.flatnonzero(lengths > 1)[:first].tolist()
    rows = [flat[offsets[i] : offsets[i + 1]] for i in shown if i < len(lengths)]
    labels = split["labels"] if "labels" in split else np.zeros(0, np.uint8)
    texts = [_readable(task, row.tolist(), vocabulary) for row in rows]
    if len(labels):
        repeated = np.repeat(labels[:first], each)
        texts = [f"{label}: {text}" for label, text in zip(repeated, texts, strict=True)]
    low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    width = -(-(high - low + 1) // _BINS)
    counts = np.bincount((lengths - low) // width).tolist()
    lows = range(low, high + 1, width)
    return SplitSummary(
        name=split.name,
        examples=len(split),
        shortest=low,
        mean=float(lengths.mean()) if len(lengths) else 0.0,
        longest=high,
        histogram=[(at, min(at + width - 1, high), n) for at, n in zip(lows, counts, strict=False)],
        classes=np.bincount(labels, minlength=task.num_labels).tolist(),
        first=texts,
    )


def _readable(task: Task, row: list[int], vocabulary: Vocabulary) -> str:
    if task.kind == "image":
        return f"{len(row)} pixels, {min(row)} to {max(row)}, mean {sum(row) / len(row):.1f}"
    shown = row[:_SHOWN_TOKENS]
    if vocabulary.tokens is not None:
        text = " ".join(vocabulary.tokens[token] for token in shown)
    else:
        text = repr(bytes(shown).decode("utf-8", "replace"))
    return text + (" ..." if len(row) > len(shown) else "")
