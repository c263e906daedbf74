"""A prepared set on disk and its verification. Imports neither torch nor NumPy.

``FOLDER/TASK/manifest.json`` names the subfolder of the files: replacing it
replaces the set, so at every moment there is the old one or the new one. It holds
its own SHA-256 and that of every file.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mgk._util.files import FileSpec, read_json, read_verified, wrong_files
from mgk.data.errors import UsageError, fail
from mgk.data.sources import Record

FORMAT = 3
MANIFEST = "manifest.json"
SOURCES = "sources.json"


@dataclass(frozen=True)
class ArraySpec:
    """One array of a split: a headerless little-endian file."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The record of a prepared set."""

    task: str
    synthetic: bool  # a sample, never to be reported as the real task
    mgk: str  # the version that prepared it
    created: str  # UTC, ISO 8601
    build: str  # the subfolder of the files
    options: dict[str, Any]
    facts: dict[str, Any]  # such as vocab_size and pad_id
    sources: dict[str, int]  # number and bytes of the files it was made from
    splits: dict[str, dict[str, ArraySpec]]
    files: dict[str, FileSpec]  # every file in the subfolder
    format: int = FORMAT

    def examples(self, split: str) -> int:
        """How many examples a split has; tokens of running text."""
        arrays = self.splits[split]
        return arrays["labels" if "labels" in arrays else "tokens"].shape[0]

    def to_json(self) -> dict[str, Any]:
        """The manifest as JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Manifest":
        """Read JSON data; other data is a Key-, Type- or ``AttributeError``."""
        splits: dict[str, dict[str, ArraySpec]] = {}
        for split, arrays in data["splits"].items():
            for name, spec in arrays.items():
                array = ArraySpec(**{**spec, "shape": tuple(spec["shape"])})
                splits.setdefault(split, {})[name] = array
        files = {name: FileSpec(**spec) for name, spec in data["files"].items()}
        return cls(**{**data, "splits": splits, "files": files})


def data_folder() -> Path:
    """The folder of all prepared sets: ``MGK_DATA``, else the platform's."""
    if chosen := os.environ.get("MGK_DATA"):
        return Path(chosen)
    try:
        from platformdirs import user_data_path
    except ModuleNotFoundError:
        raise UsageError("no data folder: set MGK_DATA to one, or pip install 'mgk[data]'") from None
    return user_data_path("mgk", appauthor=False) / "data"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of the set in this folder; None where there is none."""
    path = folder / MANIFEST
    try:
        data = read_json(path)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            advice = "prepare the set anew with this version of mgk"
            fail(str(path), f"this is not a manifest of format {FORMAT}; {advice}")
        return Manifest.from_json(read_verified(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"this is not a manifest or a corrupt one ({error})"
        fail(str(path), f"{what}; prepare the set anew")


def read_record(folder: Path, manifest: Manifest) -> Record:
    """The source files that the set was made from."""
    path = folder / manifest.build / SOURCES
    try:
        return Record.from_json(read_json(path))
    except (OSError, ValueError, TypeError, KeyError) as error:
        fail(str(path), f"cannot be read ({error})")


def verify(folder: Path, manifest: Manifest) -> list[str]:
    """A sentence for every file that does not match the manifest."""
    return [
        f"{folder / manifest.build / name}: this file of the prepared set {wrong}"
        for name, wrong in wrong_files(folder / manifest.build, manifest.files)
    ]
