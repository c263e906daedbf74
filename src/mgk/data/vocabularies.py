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
        tokens: the symbol or word of every id; None for bytes and pixels.
        shift: the id of a byte is byte + shift.
        pad_id: None where all rows have one length.
        eos_id: comes after every line of running text in words.
        unk_id: stands for words that the training text does not have.
    """

    unit: Unit
    size: int
    tokens: tuple[str, ...] | None = None
    shift: int = 0
    pad_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None


def vocabulary(name: str, *, folder: Path | str | None = None) -> Vocabulary:
    """The ids of a task; only running text needs to be prepared in ``folder``."""
    task = find_task(name)
    if task.kind == "language":
        return prepared_vocabulary(*prepared(name, folder))
    if task.kind == "image":
        return _from_facts(PIXELS)
    is_listops = name.removeprefix(SYNTHETIC) == "listops"
    return _from_facts(listops.FACTS if is_listops else BYTES)


def prepared_vocabulary(folder: Path, manifest: Manifest) -> Vocabulary:
    """The ids of a prepared set."""
    if VOCABULARY_FILE not in manifest.files:
        return _from_facts(manifest.facts)
    path = folder / manifest.build / VOCABULARY_FILE
    words = path.read_text(encoding="utf-8").split("\n")[:-1]
    eos_id, unk_id = words.index(EOS.decode()), words.index(UNKNOWN.decode())
    return Vocabulary("word", len(words), tuple(words), eos_id=eos_id, unk_id=unk_id)


def _from_facts(facts: dict[str, Any]) -> Vocabulary:
    tokens = tuple(facts["vocabulary"]) if "vocabulary" in facts else None
    return Vocabulary(facts["unit"], facts["vocab_size"], tokens, facts["shift"], facts["pad_id"])
