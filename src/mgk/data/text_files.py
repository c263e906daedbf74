"""Any text file as running text; its last parts are validation and test."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mgk.data.errors import UsageError, fail
from mgk.data.preparation import Job
from mgk.data.sources import Source, SourceFile
from mgk.data.words import WordEncoder
from mgk.data.writer import SetWriter

UNITS = ("byte", "word")
FACTS: dict[str, Any] = {"unit": "byte", "vocab_size": 256, "pad_id": None, "shift": 0}
_ANY = r"[^/]+"


def prepare(writer: SetWriter, job: Job) -> None:
    """Cut one file, at line ends, into three parts."""
    unit = job.options["unit"]
    if unit not in UNITS:
        raise UsageError(f"the unit must be one of {', '.join(UNITS)}, got {unit!r}")
    percents, size = checked_percents(job.options), _size(job.source)
    parts = (part for file in job.source.files(_ANY) for part in cut(file, size, percents))
    write_text(writer, unit, parts)


def checked_percents(options: Mapping[str, Any]) -> dict[str, int]:
    """The share of each split, in per cent."""
    validation, test = options["validation_percent"], options["test_percent"]
    if min(validation, test) < 1 or validation + test > 90:
        given = f"{validation} and {test} per cent"
        raise UsageError(f"validation and test must leave a training part, got {given}")
    return {"train": 100 - validation - test, "validation": validation, "test": test}


def write_text(writer: SetWriter, unit: str, parts: Iterable[tuple[str, bytes]]) -> None:
    """Write (split, text) pieces of running text by bytes or by words."""
    if unit == "byte":
        writer.facts.update(FACTS)
        for split, text in parts:
            writer.append(split, "tokens", np.frombuffer(text, np.uint8))
        return
    encoder = WordEncoder(writer)
    for split, text in parts:
        encoder.add(split, [text if text.endswith(b"\n") else text + b"\n"])
    encoder.finish()


def _size(source: Source) -> int:
    """The bytes of the one file, which may be compressed."""
    sizes = [sum(map(len, file.text_chunks())) for file in source.files(_ANY)]
    if len(sizes) > 1:
        raise UsageError(f"the source {str(source.path)!r} holds several files: give one of them")
    if not any(sizes):
        fail(str(source.path), "the file is empty")
    return sizes[0]


def cut(file: SourceFile, size: int, percents: Mapping[str, int]) -> Iterator[tuple[str, bytes]]:
    """Pieces of a file with their splits, which begin at line starts."""
    before = {"validation": percents["train"], "test": 100 - percents["test"]}
    shares = {split: size * percent // 100 for split, percent in before.items()}
    splits, split, done = list(shares), "train", 0
    for lines in file.text_pieces():
        piece = lines[: size - done]  # no line end that was not there
        while splits:
            end = piece.find(b"\n", max(shares[splits[0]] - done, 0)) + 1
            if not end or done + end == size:  # nothing left for it
                break
            yield split, piece[:end]
            piece, done, split = piece[end:], done + end, splits.pop(0)
        yield split, piece
        done += len(piece)
    if splits:
        parts = "a training, a validation and a test part"
        fail(file.where, f"{size} bytes with too few lines for {parts}")
