"""Writes a prepared set: arrays first, then the manifest that publishes them."""

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mgk import __version__
from mgk._util.files import FileSpec, sync, umask, write_hashed
from mgk.data.errors import DataError
from mgk.data.manifest import MANIFEST, SOURCES, ArraySpec, Manifest, read_manifest
from mgk.data.sources import Record

_UNFINISHED = ".unfinished-"
_BUILD = re.compile("[0-9a-f]{16}")
_ROWS_AT_ONCE = 256
_STALE_SECONDS = 3600.0


class Example(NamedTuple):
    """A labelled example: one sequence of small token ids, or two."""

    split: str
    sequences: tuple[bytes, ...]
    label: int


class _OpenArray:
    def __init__(self, path: Path, rows: NDArray[Any]) -> None:
        self.path, self.dtype, self.row_shape = path, rows.dtype.newbyteorder("<"), rows.shape[1:]
        self.length = self.bytes = 0
        self.hash = hashlib.sha256()
        self.file: IO[bytes] = path.open("wb")

    def append(self, rows: NDArray[Any]) -> None:
        if rows.shape[1:] != self.row_shape or rows.dtype.newbyteorder("<") != self.dtype:
            wanted = f"{self.dtype} {self.row_shape}"
            raise ValueError(f"rows of {rows.dtype} {rows.shape[1:]}, not {wanted}")
        data = np.ascontiguousarray(rows, self.dtype).tobytes()
        self.file.write(data)
        self.hash.update(data)
        self.length += len(rows)
        self.bytes += len(data)


class SetWriter:
    """Takes the arrays of a set piece by piece."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self.record = Record()
        self._arrays: dict[tuple[str, str], _OpenArray] = {}
        self._files: dict[str, FileSpec] = {}

    def append(self, split: str, name: str, rows: NDArray[Any]) -> None:
        """Add rows to an array of a split; the first ones set its type."""
        path = self.folder / f"{split}.{name}.bin"
        with named_errors(path):
            if (split, name) not in self._arrays:
                self._arrays[split, name] = _OpenArray(path, rows)
            self._arrays[split, name].append(rows)

    def append_examples(self, examples: Iterable[Example]) -> None:
        """Add labelled sequences: ``tokens``, ``offsets``, ``labels``."""
        waiting: dict[str, list[Example]] = {}
        for example in examples:
            rows = waiting.setdefault(example.split, [])
            rows.append(example)
            if len(rows) == _ROWS_AT_ONCE:
                self._append_rows(waiting.pop(example.split))
        for rows in waiting.values():
            self._append_rows(rows)

    def _append_rows(self, rows: list[Example]) -> None:
        split = rows[0].split
        sequences = [sequence for row in rows for sequence in row.sequences]
        if (split, "offsets") not in self._arrays:
            self.append(split, "offsets", np.zeros(1, np.int64))
        tokens = self._arrays.get((split, "tokens"))
        before = tokens.length if tokens else 0
        ends = np.cumsum([len(sequence) for sequence in sequences]) + before
        self.append(split, "tokens", np.frombuffer(b"".join(sequences), np.uint8))
        self.append(split, "offsets", ends)
        self.append(split, "labels", np.array([row.label for row in rows], np.uint8))

    def add_file(self, name: str, data: bytes) -> None:
        """Add a file that is no array."""
        path = self.folder / name
        with named_errors(path):
            path.write_bytes(data)
            sync(path)
        self._files[name] = FileSpec(len(data), hashlib.sha256(data).hexdigest())

    def close(self) -> None:
        """Close the files after a failure, which may be a full disk."""
        for array in self._arrays.values():
            with suppress(OSError):
                array.file.close()

    def finish(self) -> tuple[dict[str, dict[str, ArraySpec]], dict[str, FileSpec]]:
        """Make everything durable; the arrays of the splits, and all files."""
        splits: dict[str, dict[str, ArraySpec]] = {}
        order = {"train": 0, "validation": 1, "test": 2}
        arrays = sorted(self._arrays.items(), key=lambda item: order[item[0][0]])
        for (split, name), array in arrays:
            with named_errors(array.path):
                array.file.close()
                sync(array.path)
            file, shape = array.path.name, (array.length, *array.row_shape)
            splits.setdefault(split, {})[name] = ArraySpec(file, array.dtype.str, shape)
            self._files[file] = FileSpec(array.bytes, array.hash.hexdigest())
        return splits, self._files


@contextmanager
def writing(folder: Path, task: str, options: dict[str, Any], *, synthetic: bool) -> Iterator[SetWriter]:
    """Write a set; without an error it replaces an older one, else leaves it."""
    with named_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        building = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
    writer = SetWriter(building)
    try:
        yield writer
        with named_errors(folder):
            _publish(writer, folder, task=task, synthetic=synthetic, options=options)
    finally:
        writer.close()
        shutil.rmtree(building, ignore_errors=True)


def _publish(writer: SetWriter, folder: Path, **fields: Any) -> None:
    old = _build_of(folder)
    record = json.dumps(asdict(writer.record), indent=1) + "\n"
    writer.add_file(SOURCES, record.encode())
    splits, files = writer.finish()
    # Named after the content: processes that prepare the same set agree on it.
    hashes = json.dumps({name: spec.sha256 for name, spec in sorted(files.items())})
    build = hashlib.sha256(hashes.encode()).hexdigest()[:16]
    sources = writer.record.files
    manifest = Manifest(
        **fields,
        mgk=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        build=build,
        facts=writer.facts,
        sources={"files": len(sources), "bytes": sum(file.bytes for file in sources)},
        splits=splits,
        files=files,
    )
    _place(writer.folder, folder / build, files)
    write_hashed(folder / MANIFEST, manifest.to_json())
    if old is not None and old != build:
        shutil.rmtree(folder / old, ignore_errors=True)


def _place(building: Path, target: Path, files: dict[str, FileSpec]) -> None:
    """Name the finished folder; where the name exists, move the files there."""
    building.chmod(0o777 & ~umask())  # mkdtemp gives it to the owner alone
    try:
        os.rename(building, target)
    except OSError:
        if not target.is_dir():
            raise
        for name in files:
            os.replace(building / name, target / name)
    sync(target)
    sync(target.parent)


def _build_of(folder: Path) -> str | None:
    try:
        manifest = read_manifest(folder)
    except DataError:  # it is about to be replaced
        return None
    if manifest is None or not _BUILD.fullmatch(manifest.build):
        return None
    return manifest.build


def _remove_stale(folder: Path) -> None:
    """Remove what killed processes left: folders not written for an hour."""
    present, oldest = _build_of(folder), time.time() - _STALE_SECONDS
    for path in folder.iterdir():
        is_old = bool(_BUILD.fullmatch(path.name)) and path.name != present
        if not is_old and not path.name.startswith(_UNFINISHED):
            continue
        with suppress(FileNotFoundError):  # another process removes it
            if max(p.stat().st_mtime for p in (path, *path.iterdir())) < oldest:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def named_errors(place: Path) -> Iterator[None]:
    """An ``OSError`` becomes a ``DataError`` with the place."""
    try:
        yield
    except OSError as error:
        path, reason = str(error.filename or place), error.strerror or error
        raise DataError(f"cannot write {path!r}: {reason}") from None
