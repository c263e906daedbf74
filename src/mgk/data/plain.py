"""Any text file as running text, by bytes or by words; its last parts are the validation and the test split."""

from collections.abc import Iterator

import numpy as np

from mgk.data.errors import UsageError, check_text, fail
from mgk.data.job import Job
from mgk.data.sources import Source
from mgk.data.wikitext import finish
from mgk.data.words import WordEncoder
from mgk.data.writer import SetWriter

UNITS = ("byte", "word")
_PIECE = 1 << 23


def prepare(writer: SetWriter, job: Job) -> None:
    """Read one file and cut it, at line ends, into three parts."""
    options = job.options
    if options["unit"] not in UNITS:
        raise UsageError(f"the unit must be one of {', '.join(UNITS)}, got {options['unit']!r}")
    parts = _parts(*_read(job.source), options["validation_percent"], options["test_percent"])
    encoder = WordEncoder(writer)
    for split, text in parts.items():
        if options["unit"] == "byte":
            writer.append(split, "tokens", np.frombuffer(text, np.uint8))
        else:
            encoder.add(split, _pieces(text))
    if options["unit"] == "byte":
        writer.facts.update(vocab_size=256, pad_id=None, shift=0, unit="byte")
    else:
        finish(writer, encoder)


def _read(source: Source) -> tuple[bytes, str]:
    files = ((file.stream.read(), file.where) for file in source.files(r"[^/]+"))
    text, where = next(files, (b"", str(source.path)))
    if next(files, None) is not None:
        raise UsageError(f"the source {str(source.path)!r} holds several files: give one of them")
    if not text:
        fail(where, "the file is empty")
    check_text(text, where)
    return text, where


def _parts(text: bytes, where: str, validation: int, test: int) -> dict[str, bytes]:
    if min(validation, test) < 1 or validation + test > 90:
        raise UsageError(f"validation and test must leave a training part, got {validation} and {test} per cent")
    first = text.find(b"\n", len(text) * (100 - validation - test) // 100) + 1
    second = text.find(b"\n", max(first, len(text) * (100 - test) // 100)) + 1
    if not 0 < first < second < len(text):
        fail(where, f"{len(text)} bytes with too few lines for a training, a validation and a test part")
    return {"train": text[:first], "validation": text[first:second], "test": text[second:]}


def _pieces(text: bytes) -> Iterator[bytes]:
    """Pieces that end with a line."""
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + _PIECE) + 1 or len(text)
        piece = text[start:end]
        yield piece if piece.endswith(b"\n") else piece + b"\n"
        start = end
