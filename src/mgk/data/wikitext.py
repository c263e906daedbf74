"""WikiText-2 and WikiText-103: ``wiki.{train,valid,test}.tokens``, words between spaces, ``<eos>`` after every line."""

from collections.abc import Iterator

from mgk.data.errors import check_text, fail
from mgk.data.job import Job
from mgk.data.sources import SourceFile
from mgk.data.words import WordEncoder, line_pieces
from mgk.data.writer import SetWriter

SPLITS = {"wiki.train.tokens": "train", "wiki.valid.tokens": "validation", "wiki.test.tokens": "test"}
VOCABULARY_FILE = "vocabulary.txt"


def prepare(writer: SetWriter, job: Job) -> None:
    """Read the official files; one process is enough for several million words a second."""
    encoder = WordEncoder(writer)
    for split, file in job.source.parts(r"(wiki\.(?:train|valid|test)\.tokens)", SPLITS):
        encoder.add(split, checked_lines(file))
    finish(writer, encoder)


def checked_lines(file: SourceFile) -> Iterator[bytes]:
    """The text in pieces of whole lines, each looked at whether it is text."""
    offset = 0
    for piece in line_pieces(file.stream.chunks()):
        check_text(piece, file.where, offset)
        offset += len(piece)
        yield piece
    if offset == 0:
        fail(file.where, "the file is empty")


def finish(writer: SetWriter, encoder: WordEncoder) -> None:
    """Write the ids and the vocabulary."""
    vocabulary = encoder.finish()
    writer.add_file(VOCABULARY_FILE, b"".join(word + b"\n" for word in vocabulary))
    writer.facts.update(vocab_size=len(vocabulary), pad_id=None, shift=0, unit="word")
