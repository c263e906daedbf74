"""Retrieval: pairs of papers of the ACL Anthology Network as bytes; label 1: the one cites the other.

``new_aan_pairs.{train,eval,test}.tsv``: label, id1, id2, text1, text2; no header, no quoting.
"""

from collections.abc import Iterator

from mgk.data.errors import check_text, fail
from mgk.data.job import Job
from mgk.data.sources import Source
from mgk.data.text import BYTES
from mgk.data.writer import Example, SetWriter

SPLITS = {
    "new_aan_pairs.train.tsv": "train",
    "new_aan_pairs.eval.tsv": "validation",
    "new_aan_pairs.test.tsv": "test",
}
_COLUMNS = ("label", "id1", "id2", "text1", "text2")
_LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}


def prepare(writer: SetWriter, job: Job) -> None:
    """Read the official files."""
    writer.facts.update(BYTES)
    writer.append_examples(_read(job.source))


def _read(source: Source) -> Iterator[Example]:
    for split, file in source.parts(r"(new_aan_pairs\.(?:train|eval|test)\.tsv)", SPLITS):
        number = 0
        for number, line in enumerate(file.stream.lines(), 1):
            yield Example(split, *_pair(line, f"{file.where}, line {number}"))
        if number == 0:
            fail(file.where, "the file is empty")


def _pair(line: bytes, where: str) -> tuple[tuple[bytes, bytes], int]:
    columns = line.rstrip(b"\r").split(b"\t")
    if len(columns) != len(_COLUMNS):
        fail(where, f"{len(columns)} columns instead of {len(_COLUMNS)} ({', '.join(_COLUMNS)})")
    label, _, _, first, second = columns
    if label not in _LABELS:
        fail(where, f"the label must be 0 or 1, got {label[:20]!r}")
    check_text(line, where)
    if not first or not second:
        fail(where, "one of the two texts is empty")
    return (first, second), _LABELS[label]
