"""The record of a prepared set: what it was made from, how, and what its files must be.

``FOLDER/TASK/manifest.json`` names the subfolder that holds the files. Replacing this one file is what makes a new set
take the place of an old one, so at every moment there is the one or the other.
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mgk.data.errors import fail
from mgk.data.sources import Record, file_hash

FORMAT = 2
MANIFEST = "manifest.json"
SOURCES = "sources.json"


@dataclass(frozen=True)
class ArraySpec:
    """One array of a split: a headerless little-endian file of this type and shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FileSpec:
    """What a file of the set must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The record, as it lies in the file.

    Attributes:
        task: the task's name.
        synthetic: whether this is a made-up sample, never to be reported as the real task.
        mgk: the version of the library that prepared it.
        created: UTC, ISO 8601.
        build: the subfolder of the files.
        options: those of the preparation, by name.
        facts: what a model needs to know, such as ``vocab_size`` and ``pad_id``.
        sources: how many files it was made from and how many bytes they had; ``sources.json`` has each one's hash.
        splits: the arrays of every split, by name.
        files: every file in the subfolder.
    """

    task: str
    synthetic: bool
    mgk: str
    created: str
    build: str
    options: dict[str, Any]
    facts: dict[str, Any]
    sources: dict[str, int]
    splits: dict[str, dict[str, ArraySpec]]
    files: dict[str, FileSpec]
    format: int = FORMAT

    def examples(self, split: str) -> int:
        """How many examples a split has; for running text, how many tokens."""
        arrays = self.splits[split]
        return arrays["labels" if "labels" in arrays else "tokens"].shape[0]

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Manifest":
        """From JSON data; ``KeyError`` or ``TypeError`` when it is something else."""
        splits = {
            split: {name: ArraySpec(spec["file"], spec["dtype"], tuple(spec["shape"])) for name, spec in arrays.items()}
            for split, arrays in data["splits"].items()
        }
        files = {name: FileSpec(**spec) for name, spec in data["files"].items()}
        return cls(**{**data, "splits": splits, "files": files})


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of the set in this folder, or None where there is none."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        fail(str(path), f"this is not a manifest ({error}); prepare the set anew")
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        fail(str(path), f"this is not a manifest of format {FORMAT}; prepare the set anew with this version of mgk")
    try:
        return Manifest.from_json(data)
    except (KeyError, TypeError, AttributeError) as error:
        fail(str(path), f"this manifest is damaged ({error}); prepare the set anew")


def damage(folder: Path, manifest: Manifest, *, thorough: bool) -> list[str]:
    """One sentence for every file of the set that is missing or not what the manifest says.

    Without ``thorough`` a file is read only when it was written after the manifest, as its size is wrong or its hash
    the same otherwise. Where all that were read are as they should be, as after a copy of the set, the manifest gets a
    new time, so that the next look is quick again.
    """
    sealed = (folder / MANIFEST).stat().st_mtime_ns
    found, was_read = [], False
    for name, spec in manifest.files.items():
        path = folder / manifest.build / name
        try:
            status = path.stat()
        except OSError:
            found.append(f"{path}: this file of the prepared set is missing")
            continue
        if status.st_size != spec.bytes:
            found.append(f"{path}: {status.st_size} bytes instead of {spec.bytes}")
        elif thorough or status.st_mtime_ns > sealed:
            was_read = True
            if file_hash(path) != spec.sha256:
                found.append(f"{path}: the content is not what was prepared (its SHA-256 differs)")
    if was_read and not found:
        with suppress(OSError):  # a folder that is only readable
            os.utime(folder / MANIFEST)
    return found


def read_record(folder: Path, manifest: Manifest) -> Record:
    """What the set was made from."""
    path = folder / manifest.build / SOURCES
    try:
        return Record.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        fail(str(path), f"cannot be read ({error})")
