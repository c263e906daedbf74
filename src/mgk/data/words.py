"""Running text of any size as word ids, by the vocabulary of its training part.

Words get provisional ids as they appear, at the end final ones by frequency, as an
adaptive softmax needs them: the text is read once, in pieces.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np

from mgk.data.writer import SetWriter, named_errors

EOS, UNKNOWN = b"<eos>", b"<unk>"
VOCABULARY_FILE = "vocabulary.txt"

_IDS_AT_ONCE = 1 << 22


class _Table(dict[bytes, int]):
    """Word -> provisional id; a new word gets the next one."""

    def __missing__(self, word: bytes) -> int:
        self[word] = len(self)
        return self[word]


class WordEncoder:
    """Takes the splits in any order, then writes ids and vocabulary."""

    def __init__(self, writer: SetWriter) -> None:
        self._writer = writer
        self._table = _Table({EOS: 0, UNKNOWN: 1})
        self._scratch: dict[str, IO[bytes]] = {}
        self._counts = np.zeros(0, np.int64)

    def add(self, split: str, pieces: Iterable[bytes]) -> None:
        """Add pieces of whole lines to a split, each with ``<eos>``."""
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

    def finish(self) -> None:
        """Write final ids and vocabulary, by falling frequency."""
        words = list(self._table)
        counts = np.zeros(len(words), np.int64)
        counts[: len(self._counts)] = self._counts
        seen = [place for place in counts.nonzero()[0].tolist() if place != 0]
        order = [0, *sorted(seen, key=lambda place: (-counts[place], words[place]))]
        if counts[1] == 0:  # other splits may have unknown words
            order.append(1)
        dtype = np.uint16 if len(order) <= 1 << 16 else np.int32
        final = np.full(len(words), order.index(1), dtype)
        final[order] = np.arange(len(order))
        for split, file in self._scratch.items():
            with named_errors(Path(file.name)):
                file.seek(0)  # flushes the buffer
            while data := file.read(4 * _IDS_AT_ONCE):
                self._writer.append(split, "tokens", final[np.frombuffer(data, np.int32)])
            file.close()
            Path(file.name).unlink()
        self._writer.add_file(VOCABULARY_FILE, b"".join(words[place] + b"\n" for place in order))
        self._writer.facts.update(vocab_size=len(order), pad_id=None, shift=0, unit="word")
