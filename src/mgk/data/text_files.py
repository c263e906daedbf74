"""Any text file as running text, by bytes or by words; the last parts are validation and test."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mgk.data.errors import UsageError, fail
from mgk.data.preparation import Job
from mgk.data.sources import Source
from mgk.data.words import WordEncoder
from mgk.data.writer import SetWriter

UNITS = ("byte", "word")
FACTS: dict[str, Any] = {"unit": "byte", "vocab_size": 256, "pad_id": None, "shift": 0}
_ANY = r"[^/]+"


def prepare(writer: SetWriter, job: Job) -> None:
    """Read one file, in pieces, and cut it, at line ends, into three parts."""
    options = job.options
    if options["unit"] not in UNITS:
        raise UsageError(f"the unit must be one of {', '.join(UNITS)}, got {options['unit']!r}")
    validation, test = options["validation_percent"], options["test_percent"]
    if min(validation, test) < 1 or validation + test > 90:
        raise UsageError(f"validation and test must leave a training part, got {validation} and {test} per cent")
    write_text(writer, options["unit"], _parts(job.source, _size(job.source), validation, test))


def write_text(writer: SetWriter, unit: str, parts: Iterable[tuple[str, bytes]]) -> None:
    """Write pieces of running text, each with its split, by bytes or by words."""
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
    """How many bytes the one file has; it may be compressed, so it is read to the end."""
    sizes = [sum(map(len, file.chunks())) for file in source.files(_ANY)]
    if len(sizes) > 1:
        raise UsageError(f"the source {str(source.path)!r} holds several files: give one of them")
    if not any(sizes):
        fail(str(source.path), "the file is empty")
    return sizes[0]


def _parts(source: Source, size: int, validation: int, test: int) -> Iterator[tuple[str, bytes]]:
    """The text in pieces with their splits; a split begins at the first line after its share of bytes."""
    shares = {"validation": size * (100 - validation - test) // 100, "test": size * (100 - test) // 100}
    splits, split, done = list(shares), "train", 0
    for file in source.files(_ANY):
        for lines in file.text_pieces():
            piece = lines[: size - done]  # without the line end that a last line did not have
            while splits:
                end = piece.find(b"\n", max(shares[splits[0]] - done, 0)) + 1
                if not end or done + end == size:  # nothing would be left for the split
                    break
                yield split, piece[:end]
                piece, done, split = piece[end:], done + end, splits.pop(0)
            yield split, piece
            done += len(piece)
        if splits:
            fail(file.where, f"{size} bytes with too few lines for a training, a validation and a test part")
