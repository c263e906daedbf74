"""WikiText-2 and WikiText-103: ``wiki.{train,valid,test}.tokens``, words between spaces, ``<eos>`` after every line."""

from mgk.data.preparation import Job
from mgk.data.words import WordEncoder
from mgk.data.writer import SetWriter

SPLITS = {"wiki.train.tokens": "train", "wiki.valid.tokens": "validation", "wiki.test.tokens": "test"}


def prepare(writer: SetWriter, job: Job) -> None:
    """Read the official files; one process is enough for several million words a second."""
    encoder = WordEncoder(writer)
    for split, file in job.source.parts(r"(wiki\.(?:train|valid|test)\.tokens)", SPLITS):
        encoder.add(split, file.text_pieces())
    encoder.finish()
