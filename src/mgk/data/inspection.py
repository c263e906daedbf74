"""What a prepared set holds: counts, lengths, classes, first examples. Does not import torch."""

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
    """One split.

    Attributes:
        name: the split's.
        examples: how many; for running text, how many tokens.
        shortest: the fewest tokens of a sequence; of running text, of a line.
        mean: the average.
        longest: the most.
        histogram: (from, to, how many) of the lengths; both ends belong to the bin.
        classes: how many examples have each label.
        first: the first examples, readable.
    """

    name: str
    examples: int
    shortest: int
    mean: float
    longest: int
    histogram: list[tuple[int, int, int]]
    classes: list[int]
    first: list[str]


def inspect(name: str, *, folder: Path | str | None = None, first: int = 3) -> tuple[Manifest, list[SplitSummary]]:
    """The manifest of a prepared set and a summary of each of its splits."""
    place, manifest = prepared(name, folder)
    task = find_task(name)
    vocabulary = prepared_vocabulary(place, manifest)
    return manifest, [_summary(task, Split(place, manifest, split), vocabulary, first) for split in manifest.splits]


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
        texts = [f"{label}: {text}" for label, text in zip(np.repeat(labels[:first], each), texts, strict=True)]
    low, high, mean = (lengths.min(), lengths.max(), lengths.mean()) if len(lengths) else (0, 0, 0)
    width = -(-(high - low + 1) // _BINS)
    bins = enumerate(np.bincount((lengths - low) // width))
    return SplitSummary(
        name=split.name,
        examples=len(split),
        shortest=int(low),
        mean=float(mean),
        longest=int(high),
        histogram=[(int(low + i * width), int(min(low + (i + 1) * width - 1, high)), int(n)) for i, n in bins],
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
