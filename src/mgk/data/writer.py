"""Writes a prepared set: arrays into a subfolder first, then the manifest that publishes them."""

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
from mgk._util.files import sync, umask, write_json
from mgk.data.errors import DataError
from mgk.data.manifest import MANIFEST, SOURCES, ArraySpec, FileSpec, Manifest, read_manifest
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
    """One array that grows at its end."""

    def __init__(self, path: Path, rows: NDArray[Any]) -> None:
        self.path, self.dtype, self.row_shape = path, rows.dtype.newbyteorder("<"), rows.shape[1:]
        self.length = self.bytes = 0
        self.hash = hashlib.sha256()
        self.file: IO[bytes] = path.open("wb")

    def append(self, rows: NDArray[Any]) -> None:
        if rows.shape[1:] != self.row_shape or rows.dtype.newbyteorder("<") != self.dtype:
            raise ValueError(f"rows of {rows.dtype} {rows.shape[1:]}, not {self.dtype} {self.row_shape}")
        data = np.ascontiguousarray(rows, self.dtype).tobytes()
        self.file.write(data)
        self.hash.update(data)
        self.length += len(rows)
        self.bytes += len(data)


class SetWriter:
    """Takes the arrays of a set piece by piece; ``writing`` publishes them at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self.record = Record()
        self._arrays: dict[tuple[str, str], _OpenArray] = {}
        self._files: dict[str, FileSpec] = {}

    def append(self, split: str, name: str, rows: NDArray[Any]) -> None:
        """Add rows to the array ``name`` of a split; the first rows decide its type."""
        path = self.folder / f"{split}.{name}.bin"
        with named_errors(path):
            if (split, name) not in self._arrays:
                self._arrays[split, name] = _OpenArray(path, rows)
            self._arrays[split, name].append(rows)

    def append_examples(self, examples: Iterable[Example]) -> None:
        """Add labelled sequences, in pieces of a size that is quick to write.

        ``tokens`` gets the ids of all sequences, ``offsets`` where each one ends, ``labels`` one label an example.
        """
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
        ends = np.cumsum([len(sequence) for sequence in sequences]) + (tokens.length if tokens else 0)
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
        """Close the files after a failure, which may be a full disk that does not take the last buffer."""
        for array in self._arrays.values():
            with suppress(OSError):
                array.file.close()

    def finish(self) -> tuple[dict[str, dict[str, ArraySpec]], dict[str, FileSpec]]:
        """Make everything durable; the arrays of the splits, and all files."""
        splits: dict[str, dict[str, ArraySpec]] = {}
        order = {"train": 0, "validation": 1, "test": 2}
        for (split, name), array in sorted(self._arrays.items(), key=lambda item: order[item[0][0]]):
            with named_errors(array.path):
                array.file.close()
                sync(array.path)
            file = array.path.name
            splits.setdefault(split, {})[name] = ArraySpec(file, array.dtype.str, (array.length, *array.row_shape))
            self._files[file] = FileSpec(array.bytes, array.hash.hexdigest())
        return splits, self._files


@contextmanager
def writing(folder: Path, task: str, options: dict[str, Any], *, synthetic: bool) -> Iterator[SetWriter]:
    """Write the set of a task into ``folder``; on leaving without an error it replaces an older one.

    Whatever stops it before that, a signal or a full disk, leaves the older set as it was.
    """
    with named_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        building = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
    writer = SetWriter(building)
    try:
        yield writer
        with named_errors(folder):
            _publish(folder, task, options, synthetic, writer)
    finally:
        writer.close()
        shutil.rmtree(building, ignore_errors=True)


def _publish(folder: Path, task: str, options: dict[str, Any], synthetic: bool, writer: SetWriter) -> None:
    old = _build_of(folder)
    writer.add_file(SOURCES, (json.dumps(asdict(writer.record), indent=1) + "\n").encode())
    splits, files = writer.finish()
    # Named after the content: two processes that prepare the same set at once agree on it.
    build = hashlib.sha256(json.dumps({n: f.sha256 for n, f in sorted(files.items())}).encode()).hexdigest()[:16]
    manifest = Manifest(
        task=task,
        synthetic=synthetic,
        mgk=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        build=build,
        options=options,
        facts=writer.facts,
        sources={"files": len(writer.record.files), "bytes": sum(file.bytes for file in writer.record.files)},
        splits=splits,
        files=files,
    )
    _place(writer.folder, folder / build, files)
    write_json(folder / MANIFEST, manifest.to_json())
    if old is not None and old != build:
        shutil.rmtree(folder / old, ignore_errors=True)


def _place(building: Path, target: Path, files: dict[str, FileSpec]) -> None:
    """Give the finished folder its name; where that exists, move the files into it."""
    building.chmod(0o777 & ~umask())  # mkdtemp makes folders that only their owner reads
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
    return None if manifest is None or not _BUILD.fullmatch(manifest.build) else manifest.build


def _remove_stale(folder: Path) -> None:
    """Remove what killed processes left behind: folders where nothing was written for an hour."""
    present, oldest = _build_of(folder), time.time() - _STALE_SECONDS
    for path in folder.iterdir():
        is_ours = path.name.startswith(_UNFINISHED) or (_BUILD.fullmatch(path.name) and path.name != present)
        with suppress(FileNotFoundError):  # another process is just removing it
            if is_ours and max(p.stat().st_mtime for p in (path, *path.iterdir())) < oldest:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def named_errors(place: Path) -> Iterator[None]:
    """An error of the operating system becomes a ``DataError`` with the place that could not be written."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {str(error.filename or place)!r}: {error.strerror or error}") from None
