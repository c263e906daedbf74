"""The vocabulary of a task: what its token ids mean."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mgk.data import listops
from mgk.data.image import PIXELS
from mgk.data.manifest import Manifest
from mgk.data.preparation import prepared
from mgk.data.task_registry import SYNTHETIC, find_task
from mgk.data.text import BYTES
from mgk.data.words import EOS, UNKNOWN, VOCABULARY_FILE

Unit = Literal["symbol", "byte", "pixel", "word"]


@dataclass(frozen=True)
class Vocabulary:
    """The ids of a task.

    Attributes:
        unit: what an id stands for: a symbol of ListOps, a byte, a grey pixel, or a word.
        size: how many ids there are, special ones included.
        tokens: the symbol or word of every id; None for bytes and pixels.
        shift: of a byte, as its id is byte + shift.
        pad_id: the id that pads rows of different lengths; None where rows have one length.
        eos_id: the id after every line of running text in words.
        unk_id: the id of words that the training text does not have.
    """

    unit: Unit
    size: int
    tokens: tuple[str, ...] | None = None
    shift: int = 0
    pad_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None


def vocabulary(name: str, *, folder: Path | str | None = None) -> Vocabulary:
    """The ids of a task.

    Args:
        name: the task's.
        folder: the folder of all sets; the data folder if not given. Only running text needs to be prepared there.

    Returns:
        The vocabulary.
    """
    task = find_task(name)
    if task.kind == "language":
        return prepared_vocabulary(*prepared(name, folder))
    if task.kind == "image":
        return _from_facts(PIXELS)
    return _from_facts(listops.FACTS if task.name.removeprefix(SYNTHETIC) == "listops" else BYTES)


def prepared_vocabulary(folder: Path, manifest: Manifest) -> Vocabulary:
    """The ids of a prepared set."""
    if VOCABULARY_FILE not in manifest.files:
        return _from_facts(manifest.facts)
    words = (folder / manifest.build / VOCABULARY_FILE).read_text(encoding="utf-8").split("\n")[:-1]
    return Vocabulary(
        "word", len(words), tuple(words), eos_id=words.index(EOS.decode()), unk_id=words.index(UNKNOWN.decode())
    )


def _from_facts(facts: dict[str, Any]) -> Vocabulary:
    tokens = tuple(facts["vocabulary"]) if "vocabulary" in facts else None
    return Vocabulary(facts["unit"], facts["vocab_size"], tokens, facts["shift"], facts["pad_id"])
