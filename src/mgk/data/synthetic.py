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
_SPLITS = [(part, *item) for part, item in enumerate(SIZES.items())]

_TOPICS = b"parsing trees,speech sounds,word meanings,machine translation,question answering".split(b",")
_GOOD = b"wonderful moving brilliant charming superb".split()
_BAD = b"dreadful boring clumsy tedious awful".split()
_FILLER = b"the film,its story,this scene,every actor,the music,a long ending,was,seemed".split(b",")
_WORDS = b"the of a river town built near old bridge in year was and".split()


def prepare(writer: SetWriter, job: Job) -> None:
    """Generate the sample of the task."""
    name, seed = job.task.name.removeprefix(SYNTHETIC), int(job.options["seed"])
    if name == "listops":
        limits = {"min_length": 4, "max_length": 64, "max_depth": 5, "max_args": 5}
        listops.prepare(writer, replace(job, workers=1, options={"seed": seed, **SIZES, **limits}))
    elif name == "pathfinder":
        drawn = {"seed": seed, **SIZES, "difficulty": "easy"}
        pathfinder.prepare(writer, replace(job, workers=1, options=drawn))
    elif job.task.kind == "image":
        _write_images(writer, seed, 32 if name == "image" else 28)
    elif job.task.kind == "language":
        texts = ((split, _text(seed, part, 4 * count)) for part, split, count in _SPLITS)
        write_text(writer, "byte" if name in ("plain", "bytes") else "word", texts)
    else:
        writer.facts.update(BYTES)
        make = _pair if job.task.kind == "pair" else _review
        writer.append_examples(
            Example(split, make(Stream(seed, part, place), place % 2), place % 2)
            for part, split, count in _SPLITS
            for place in range(count)
        )
    job.on_step(1, 1)


def _review(stream: Stream, label: int) -> tuple[bytes, ...]:
    """Filler with words of praise (label 1) or of blame (label 0)."""
    words = _pick(stream, _FILLER, 20 + int(stream.below(40, 1)[0]))
    spots = stream.below(len(words), 4)
    for spot, verdict in zip(spots, _pick(stream, _GOOD if label else _BAD, 4), strict=True):
        words[spot] = verdict
    return (b" ".join(words),)


def _pair(stream: Stream, label: int) -> tuple[bytes, ...]:
    """Texts on one topic (label 1) or on two (label 0)."""
    first = stream.below(len(_TOPICS), 1)[0]
    step = stream.below(len(_TOPICS) - 1, 1)[0]
    second = first if label else (first + 1 + step) % len(_TOPICS)
    topics = (_TOPICS[first], _TOPICS[second])
    return tuple(b" ".join([topic, *_pick(stream, _WORDS, 30)]) for topic in topics)


def _write_images(writer: SetWriter, seed: int, side: int) -> None:
    """A bright bar whose place is the label, on noise; 32 x 32 has colour."""
    writer.facts.update(PIXELS, height=side, width=side)
    for part, split, count in _SPLITS:
        labels = np.arange(count) % 10
        images = Stream(seed, part).below(96, count * side * side).reshape(count, side, side)
        for image, label in zip(images, labels, strict=True):
            image[:, 2 + 2 * label : 4 + 2 * label] += 128
        grey = images.astype(np.uint8)
        if side == 32:
            writer.append(split, "colour", np.stack([grey, grey // 2, 255 - grey], -1))
        writer.append(split, "tokens", grey.reshape(count, -1))
        writer.append(split, "labels", labels.astype(np.uint8))


def _text(seed: int, part: int, count: int) -> bytes:
    return b"".join(_sentence(Stream(seed, part, place)) for place in range(count))


def _sentence(stream: Stream) -> bytes:
    """Words, each of which limits the choice of the next."""
    word = int(stream.below(len(_WORDS), 1)[0])
    words = []
    for step in stream.below(3, 12).tolist():
        words.append(_WORDS[word])
        word = (word * 2 + 1 + step) % len(_WORDS)
    return b" ".join(words) + b" .\n"


def _pick(stream: Stream, words: list[bytes], count: int) -> list[bytes]:
    return [words[place] for place in stream.below(len(words), count)]
