"""Retrieval: pairs of papers (AAN) as bytes; label 1: cited.

``new_aan_pairs.{train,eval,test}.tsv``: label, id1, id2, text1, text2; no quoting.
"""

from collections.abc import Iterator

from mgk.data.errors import check_text, fail
from mgk.data.preparation import Job
from mgk.data.sources import Source
from mgk.data.text import BYTES
from mgk.data.writer import Example, SetWriter

SPLITS = {
    "new_aan_pairs.train.tsv": "train",
    "new_aan_pairs.eval.tsv": "validation",
    "new_aan_pairs.test.tsv": "test",
}
_LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}


def prepare(writer: SetWriter, job: Job) -> None:
    """Read the official files."""
    writer.facts.update(BYTES)
    writer.append_examples(_read(job.source))


def _read(source: Source) -> Iterator[Example]:
    for name, file in source.parts(r"(new_aan_pairs\.(?:train|eval|test)\.tsv)", SPLITS):
        for line, where in file.lines():
            columns = line.split(b"\t")
            if len(columns) != 5:
                fail(where, f"{len(columns)} columns instead of 5 (label, id1, id2, text1, text2)")
            label, _, _, first, second = columns
            if label not in _LABELS:
                fail(where, f"the label must be 0 or 1, got {label[:20]!r}")
            check_text(line, where)
            if not first or not second:
                fail(where, "one of the two texts is empty")
            yield Example(SPLITS[name], (first, second), _LABELS[label])
