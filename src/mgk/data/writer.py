"""Writes a prepared set: into a subfolder first, then the manifest that makes it the set, in one step."""

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
        self.dtype = rows.dtype.newbyteorder("<")
        self.row_shape = rows.shape[1:]
        self.length = 0
        self.hash = hashlib.sha256()
        self.file: IO[bytes] = path.open("wb")

    def append(self, rows: NDArray[Any]) -> None:
        if rows.shape[1:] != self.row_shape or rows.dtype.newbyteorder("<") != self.dtype:
            raise ValueError(f"rows of {rows.dtype} {rows.shape[1:]}, not {self.dtype} {self.row_shape}")
        data = np.ascontiguousarray(rows, self.dtype).tobytes()
        self.file.write(data)
        self.hash.update(data)
        self.length += len(rows)


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
            array = self._arrays.get((split, name))
            if array is None:
                array = self._arrays[split, name] = _OpenArray(path, rows)
            array.append(rows)

    def append_sequences(self, split: str, sequences: list[bytes]) -> None:
        """Add sequences of small token ids: the ids to ``tokens``, where each one ends to ``offsets``."""
        tokens = self._arrays.get((split, "tokens"))
        start = tokens.length if tokens is not None else 0
        if tokens is None:
            self.append(split, "offsets", np.zeros(1, np.int64))
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
        self.append(split, "tokens", np.frombuffer(b"".join(sequences), np.uint8))
        self.append(split, "offsets", start + lengths.cumsum())

    def append_examples(self, examples: Iterable[Example]) -> None:
        """Add labelled sequences, in pieces of a size that is quick to write."""
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
        self.append_sequences(split, [sequence for row in rows for sequence in row.sequences])
        self.append(split, "labels", np.fromiter((row.label for row in rows), np.uint8, len(rows)))

    def add_file(self, name: str, data: bytes) -> None:
        """Add a file that is no array."""
        path = self.folder / name
        with named_errors(path), path.open("wb") as file:
            file.write(data)
            _sync(file)
        self._files[name] = FileSpec(len(data), hashlib.sha256(data).hexdigest())

    def close(self) -> None:
        """Close the files; on a full disk the rest of a buffer may not fit any more, which is known by then."""
        for array in self._arrays.values():
            with suppress(OSError):
                array.file.close()

    def finish(self) -> tuple[dict[str, dict[str, ArraySpec]], dict[str, FileSpec]]:
        """Bring everything to the disk; the arrays of the splits, and all files."""
        splits: dict[str, dict[str, ArraySpec]] = {}
        order = {"train": 0, "validation": 1, "test": 2}
        for (split, name), array in sorted(self._arrays.items(), key=lambda item: order[item[0][0]]):
            path = Path(array.file.name)
            with named_errors(path):
                _sync(array.file)
            file = path.name
            splits.setdefault(split, {})[name] = ArraySpec(file, array.dtype.str, (array.length, *array.row_shape))
            self._files[file] = FileSpec(array.file.tell(), array.hash.hexdigest())
        return splits, self._files


@contextmanager
def writing(folder: Path, task: str, options: dict[str, Any], *, synthetic: bool) -> Iterator[SetWriter]:
    """Write the set of a task into ``folder``; on leaving without an error it takes the place of an older one.

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
    writer.close()
    # Named after the content: two processes that prepare the same set at once agree, and neither removes the other's.
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
    _write_manifest(folder, manifest)
    if old is not None and old != build:
        shutil.rmtree(folder / old, ignore_errors=True)


def _place(building: Path, target: Path, files: dict[str, FileSpec]) -> None:
    """Give the finished folder its name; a folder of that name is kept file by file where it is whole."""
    building.chmod(0o777 & ~_umask())  # mkdtemp makes folders that only their owner reads
    try:
        os.rename(building, target)
    except OSError:
        if not target.is_dir():
            raise
        for name in files:
            os.replace(building / name, target / name)
    _sync_folder(target)
    _sync_folder(target.parent)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{MANIFEST}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(manifest.to_json(), file, indent=1)
            file.write("\n")
            _sync(file)
        Path(temporary).chmod(0o666 & ~_umask())
        os.replace(temporary, folder / MANIFEST)
        _sync_folder(folder)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _build_of(folder: Path) -> str | None:
    try:
        manifest = read_manifest(folder)
    except DataError:  # it is about to be replaced
        return None
    return None if manifest is None or not _BUILD.fullmatch(manifest.build) else manifest.build


def _remove_stale(folder: Path) -> None:
    """Remove what killed processes left behind, where nothing was written for an hour: no process is at work there."""
    present = _build_of(folder)
    for path in folder.iterdir():
        is_ours = path.name.startswith(_UNFINISHED) or (_BUILD.fullmatch(path.name) and path.name != present)
        if is_ours and time.time() - _last_write(path) > _STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _last_write(folder: Path) -> float:
    times = [time.time()]  # of a folder that another process is just removing
    with suppress(FileNotFoundError):
        times = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
    return max(times)


@contextmanager
def named_errors(place: Path) -> Iterator[None]:
    """An error of the operating system comes out as a ``DataError`` with the place that could not be written."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {str(error.filename or place)!r}: {error.strerror or error}") from None


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":  # elsewhere a folder cannot be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
