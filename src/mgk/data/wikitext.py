"""WikiText-2 and WikiText-103: ``wiki.{train,valid,test}.tokens``, words between spaces, ``<eos>`` after every line."""

from collections.abc import Iterator

from mgk.data.errors import check_text, fail
from mgk.data.job import Job
from mgk.data.sources import SourceFile
from mgk.data.words import WordEncoder, line_pieces
from mgk.data.writer import SetWriter

SPLITS = {"train": "train", "valid": "validation", "test": "test"}
VOCABULARY_FILE = "vocabulary.txt"
_CHUNK = 1 << 23


def prepare(writer: SetWriter, job: Job) -> None:
    """Read the official files; one process is enough for several million words a second."""
    encoder = WordEncoder(writer)
    missing = dict(SPLITS)
    for file in job.source.files(r"wiki\.(train|valid|test)\.tokens"):
        name = file.match[1]
        if missing.pop(name, None) is None:
            fail(file.where, f"a second file for {name!r}; give the folder of one of them as the source")
        encoder.add(SPLITS[name], checked_lines(file))
    if missing:
        fail(str(job.source.path), f"{', '.join(f'wiki.{name}.tokens' for name in missing)} not found")
    finish(writer, encoder)


def checked_lines(file: SourceFile) -> Iterator[bytes]:
    """The text in pieces of whole lines, each looked at whether it is text."""
    offset = 0
    for piece in line_pieces(iter(lambda: file.stream.read(_CHUNK), b"")):
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
