"""Turns running text into word ids in one pass, whatever its size, with the vocabulary of its training part.

Words get provisional ids in the order in which they appear; at the end these are mapped to the final ones, sorted by
frequency as an adaptive softmax wants them. So the text is read, split and looked up once, and only a piece of it is
in memory at a time.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from mgk.data.writer import SetWriter, named_errors

EOS, UNKNOWN = b"<eos>", b"<unk>"

_IDS_AT_ONCE = 1 << 22


class _Table(dict[bytes, int]):
    """Word -> provisional id; a new word gets the next one."""

    def __missing__(self, word: bytes) -> int:
        self[word] = len(self)
        return self[word]


class WordEncoder:
    """Takes the text of the splits in any order, then writes their ids and the vocabulary."""

    def __init__(self, writer: SetWriter) -> None:
        self._writer = writer
        self._table = _Table()
        self._scratch: dict[str, IO[bytes]] = {}
        self._counts = np.zeros(0, np.int64)
        self._table[EOS], self._table[UNKNOWN]

    def add(self, split: str, pieces: Iterable[bytes]) -> None:
        """Add to the text of a split, in pieces that end with a line; every line ends with ``<eos>``."""
        path = self._writer.folder / f"{split}.scratch"
        if split not in self._scratch:
            with named_errors(path):
                self._scratch[split] = path.open("w+b")
        for piece in pieces:
            words = piece.replace(b"\n", b" <eos> ").split()
            ids = np.fromiter(map(self._table.__getitem__, words), np.int32, len(words))
            with named_errors(path):
                self._scratch[split].write(ids.tobytes())
            if split == "train":
                counts = np.bincount(ids, minlength=len(self._table))
                counts[: len(self._counts)] += self._counts
                self._counts = counts

    def finish(self) -> list[bytes]:
        """Write all splits with their final ids; the vocabulary: ``<eos>``, then by falling frequency."""
        words = list(self._table)
        counts = np.zeros(len(words), np.int64)
        counts[: len(self._counts)] = self._counts
        seen = [place for place in np.flatnonzero(counts).tolist() if words[place] != EOS]
        order = [0, *sorted(seen, key=lambda place: (-counts[place], words[place]))]
        if counts[1] == 0:  # a word that the training text does not have needs a name in the others
            order.append(1)
        final = np.full(len(words), order.index(1), np.uint16 if len(order) <= 1 << 16 else np.int32)
        final[order] = np.arange(len(order))
        for split, file in self._scratch.items():
            with named_errors(Path(file.name)):
                file.seek(0)  # writes what is still in the buffer
            for ids in _read_ids(file):
                self._writer.append(split, "tokens", final[ids])
            file.close()
            Path(file.name).unlink()
        return [words[place] for place in order]


def line_pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same text cut after line ends; a last line without an end gets one."""
    rest = b""
    for chunk in chunks:
        head, end, tail = (rest + chunk).rpartition(b"\n")
        rest = tail
        if end:
            yield head + end
    if rest:
        yield rest + b"\n"


def _read_ids(file: IO[bytes]) -> Iterator[NDArray[np.int32]]:
    while data := file.read(4 * _IDS_AT_ONCE):
        yield np.frombuffer(data, np.int32)
