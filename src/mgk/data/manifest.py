"""A prepared set on disk and its verification. Imports neither torch nor NumPy.

``FOLDER/TASK/manifest.json`` names the subfolder of the files: replacing it
replaces the set, so at every moment there is the old one or the new one.
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mgk._util.files import file_hash
from mgk.data.errors import UsageError, fail
from mgk.data.sources import Record

FORMAT = 2
MANIFEST = "manifest.json"
SOURCES = "sources.json"


@dataclass(frozen=True)
class FileSpec:
    """Size and hash of a file."""

    bytes: int
    sha256: str


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
        """As JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Manifest":
        """From JSON data; other data is a Key-, Type- or ``AttributeError``."""
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
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            fail(str(path), f"this is not a manifest of format {FORMAT}; prepare the set anew with this version of mgk")
        return Manifest.from_json(data)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fail(str(path), f"this is not a manifest or a corrupt one ({error}); prepare the set anew")


def read_record(folder: Path, manifest: Manifest) -> Record:
    """The source files that the set was made from."""
    path = folder / manifest.build / SOURCES
    try:
        return Record.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        fail(str(path), f"cannot be read ({error})")


def verify(folder: Path, manifest: Manifest, *, thorough: bool) -> list[str]:
    """A sentence for every file that is missing or differs from the manifest.

    If not ``thorough``, only files newer than the manifest are hashed. If all
    hashes are right, as after a copy, the manifest gets a new time.
    """
    finished = (folder / MANIFEST).stat().st_mtime_ns
    errors, is_hashed = [], False
    for name, spec in manifest.files.items():
        path = folder / manifest.build / name
        try:
            status = path.stat()
        except OSError:
            errors.append(f"{path}: this file of the prepared set is missing")
            continue
        if status.st_size != spec.bytes:
            errors.append(f"{path}: {status.st_size} bytes instead of {spec.bytes}")
        elif thorough or status.st_mtime_ns > finished:
            is_hashed = True
            if file_hash(path) != spec.sha256:
                errors.append(f"{path}: the content is not what was prepared (its SHA-256 differs)")
    if is_hashed and not errors:
        with suppress(OSError):  # a read-only folder
            os.utime(folder / MANIFEST)
    return errors
