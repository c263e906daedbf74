"""What a prepared set holds: counts, lengths, classes, first examples."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from mgk.data.catalog import Task, find_task
from mgk.data.manifest import Manifest
from mgk.data.preparation import prepared
from mgk.data.splits import Split
from mgk.data.wikitext import VOCABULARY_FILE

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


def inspect(name: str, *, folder: Path | None = None, first: int = 3) -> tuple[Manifest, list[SplitSummary]]:
    """The manifest of a prepared set and a summary of each of its splits."""
    place, manifest = prepared(name, folder)
    task = find_task(name)
    vocabulary = _vocabulary(place, manifest)
    return manifest, [_summary(task, Split(place, manifest, split), vocabulary, first) for split in manifest.splits]


def _summary(task: Task, split: Split, vocabulary: list[str], first: int) -> SplitSummary:
    tokens = split["tokens"]
    if task.kind == "language":
        end = vocabulary.index("<eos>") if vocabulary else ord("\n")
        offsets = np.concatenate([[0], np.flatnonzero(tokens == end) + 1])
    elif task.kind == "image":
        offsets = np.arange(len(tokens) + 1) * tokens.shape[1]
    else:
        offsets = split["offsets"]
    lengths = np.diff(offsets)
    flat = tokens.reshape(-1)
    each = 2 if task.kind == "pair" else 1
    rows = [flat[start:end] for start, end in pairwise(offsets[: each * first + 1])]
    labels = split["labels"] if "labels" in split else np.zeros(0, np.uint8)
    texts = [_readable(task, row.tolist(), len(row), vocabulary) for row in rows]
    if len(labels):
        texts = [f"{label}: {text}" for label, text in zip(np.repeat(labels[:first], each), texts, strict=True)]
    return SplitSummary(
        name=split.name,
        examples=split.manifest.examples(split.name),
        shortest=int(lengths.min()) if len(lengths) else 0,
        mean=float(lengths.mean()) if len(lengths) else 0.0,
        longest=int(lengths.max()) if len(lengths) else 0,
        histogram=_histogram(lengths),
        classes=np.bincount(labels, minlength=task.num_labels).tolist(),
        first=texts,
    )


def _histogram(lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[tuple[int, int, int]]:
    if not len(lengths):
        return []
    low, high = int(lengths.min()), int(lengths.max())
    width = -(-(high - low + 1) // _BINS)
    counts = np.bincount((lengths - low) // width)
    return [(low + i * width, min(low + (i + 1) * width - 1, high), int(count)) for i, count in enumerate(counts)]


def _readable(task: Task, row: list[int], length: int, vocabulary: list[str]) -> str:
    shown = row[:_SHOWN_TOKENS]
    if task.kind == "image":
        return f"{length} pixels, {min(row)} to {max(row)}, mean {sum(row) / length:.1f}"
    if vocabulary:
        text = " ".join(vocabulary[token] for token in shown)
    else:
        text = repr(bytes(shown).decode("utf-8", "replace"))
    return text + (" ..." if length > len(shown) else "")


def _vocabulary(folder: Path, manifest: Manifest) -> list[str]:
    """The words of the ids, or nothing where a token is a byte or a pixel."""
    if VOCABULARY_FILE in manifest.files:
        return (folder / manifest.build / VOCABULARY_FILE).read_text(encoding="utf-8").split("\n")[:-1]
    return list(manifest.facts.get("vocabulary", []))
