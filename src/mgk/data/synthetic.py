"""Tiny synthetic samples of every task, for tests, examples and a first try."""

from dataclasses import replace

import numpy as np

from mgk.data import listops, pathfinder
from mgk.data.image import PIXELS
from mgk.data.preparation import Job
from mgk.data.random_bits import Stream
from mgk.data.task_registry import SYNTHETIC
from mgk.data.text import BYTES
from mgk.data.text_files import write_text
from mgk.data.writer import Example, SetWriter

SIZES = {"train": 256, "validation": 64, "test": 64}

_TOPICS = (b"parsing trees", b"speech sounds", b"word meanings", b"machine translation", b"question answering")
_GOOD = (b"wonderful", b"moving", b"brilliant", b"charming", b"superb")
_BAD = (b"dreadful", b"boring", b"clumsy", b"tedious", b"awful")
_FILLER = (b"the film", b"its story", b"this scene", b"every actor", b"the music", b"a long ending", b"was", b"seemed")
_WORDS = (b"the", b"of", b"a", b"river", b"town", b"built", b"near", b"old", b"bridge", b"in", b"year", b"was", b"and")


def prepare(writer: SetWriter, job: Job) -> None:
    """Generate the sample of the task."""
    name, seed = job.task.name.removeprefix(SYNTHETIC), int(job.options["seed"])
    if name == "listops":
        limits = {"min_length": 4, "max_length": 64, "max_depth": 5, "max_args": 5}
        listops.prepare(writer, replace(job, workers=1, options={"seed": seed, **SIZES, **limits}))
    elif name == "pathfinder":
        pathfinder.prepare(writer, replace(job, workers=1, options={"seed": seed, **SIZES, "difficulty": "easy"}))
    elif job.task.kind == "image":
        _write_images(writer, seed, 32 if name == "image" else 28)
    elif job.task.kind == "language":
        texts = (
            (split, b"".join(_sentence(Stream(seed, number, place)) for place in range(4 * count)))
            for number, (split, count) in enumerate(SIZES.items())
        )
        write_text(writer, "byte" if name == "plain" else "word", texts)
    else:
        writer.facts.update(BYTES)
        make = _pair if job.task.kind == "pair" else _review
        writer.append_examples(
            Example(split, make(Stream(seed, number, place), place % 2), place % 2)
            for number, (split, count) in enumerate(SIZES.items())
            for place in range(count)
        )
    job.on_step(1, 1)


def _review(stream: Stream, label: int) -> tuple[bytes, ...]:
    """Filler with words of praise (label 1) or of blame (label 0)."""
    words = _pick(stream, _FILLER, 20 + int(stream.below(40, 1)[0]))
    for spot, word in zip(stream.below(len(words), 4), _pick(stream, _GOOD if label else _BAD, 4), strict=True):
        words[spot] = word
    return (b" ".join(words),)


def _pair(stream: Stream, label: int) -> tuple[bytes, ...]:
    """Texts on one topic (label 1) or on two (label 0)."""
    first, step = (int(stream.below(limit, 1)[0]) for limit in (len(_TOPICS), len(_TOPICS) - 1))
    topics = (first, first if label else (first + 1 + step) % len(_TOPICS))
    return tuple(b" ".join([_TOPICS[topic], *_pick(stream, _WORDS, 30)]) for topic in topics)


def _write_images(writer: SetWriter, seed: int, side: int) -> None:
    """A bright bar whose place is the label, on noise; colour where the real set has it."""
    writer.facts.update(PIXELS, height=side, width=side)
    for number, (split, count) in enumerate(SIZES.items()):
        labels = np.arange(count) % 10
        images = Stream(seed, number).below(96, count * side * side).reshape(count, side, side)
        for image, label in zip(images, labels, strict=True):
            image[:, 2 + 2 * label : 4 + 2 * label] += 128
        grey = images.astype(np.uint8)
        if side == 32:
            writer.append(split, "colour", np.stack([grey, grey // 2, 255 - grey], -1))
        writer.append(split, "tokens", grey.reshape(count, -1))
        writer.append(split, "labels", labels.astype(np.uint8))


def _sentence(stream: Stream) -> bytes:
    """Words, each of which limits the choice of the next."""
    word = int(stream.below(len(_WORDS), 1)[0])
    words = []
    for step in stream.below(3, 12).tolist():
        words.append(_WORDS[word])
        word = (word * 2 + 1 + step) % len(_WORDS)
    return b" ".join(words) + b" .\n"


def _pick(stream: Stream, words: tuple[bytes, ...], count: int) -> list[bytes]:
    return [words[place] for place in stream.below(len(words), count)]
