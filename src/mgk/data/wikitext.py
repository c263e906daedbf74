"""WikiText: ``wiki.{train,valid,test}.tokens``, ``<eos>`` after every line."""

from mgk.data.preparation import Job
from mgk.data.words import WordEncoder
from mgk.data.writer import SetWriter

SPLITS = {
    "wiki.train.tokens": "train",
    "wiki.valid.tokens": "validation",
    "wiki.test.tokens": "test",
}


def prepare(writer: SetWriter, job: Job) -> None:
    """Read the official files."""
    encoder = WordEncoder(writer)
    for name, file in job.source.parts(r"(wiki\.(?:train|valid|test)\.tokens)", SPLITS):
        encoder.add(SPLITS[name], file.text_pieces())
    encoder.finish()
