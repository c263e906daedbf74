"""Reads the files of a folder or of an archive (.tar.gz, .tar.xz, .zip), one after the other.

An archive is read, never unpacked: no member, whatever its name, can be written anywhere.
"""

import gzip
import hashlib
import lzma
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, cast

from mgk.data.errors import DataError, UsageError, fail

_CHUNK = 1 << 20
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile)


@dataclass(frozen=True)
class Fingerprint:
    """What a source file was when it was read."""

    path: str
    bytes: int
    mtime_ns: int
    sha256: str


class SourceStream:
    """The bytes of one file; what breaks on the way comes out as a ``DataError`` with the place."""

    def __init__(self, stream: IO[bytes], where: str, raw: IO[bytes], on_read: Callable[[int], None]) -> None:
        self._stream, self._where, self._raw, self._on_read = stream, where, raw, on_read

    def read(self, size: int = -1) -> bytes:
        """The next ``size`` bytes, fewer at the end, or all that are left."""
        try:
            data = self._stream.read(size)
        except _DAMAGE as error:
            raise _damage(self._where, self._raw, error) from None
        self._on_read(self._raw.tell())
        return data

    def lines(self) -> Iterator[bytes]:
        """Lines without their ends, split at line feeds only."""
        rest = b""
        while chunk := self.read(_CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            yield from lines
        if rest:
            yield rest


@dataclass(frozen=True)
class SourceFile:
    """One file: its name within the source, its name for messages, the match of the pattern, and its content."""

    name: str
    where: str
    match: re.Match[str]
    stream: SourceStream


class Source:
    """A folder, an archive or a single file that holds a data set in its official layout.

    ``on_step`` is called with how many bytes of how many have been read.
    """

    def __init__(self, path: Path, on_step: Callable[[int, int], None] = lambda done, total: None) -> None:
        if not path.exists():
            raise UsageError(f"the source {str(path)!r} does not exist")
        self.path = path.absolute()
        self.used: dict[str, Path] = {}
        self._on_step = on_step

    def files(self, pattern: str) -> Iterator[SourceFile]:
        """The files whose path, from any folder on, fully matches the pattern; ".gz" files are unpacked on the way.

        A folder's files come in the order of their names, an archive's as they lie in it. Each is to be read before
        the next one is asked for.
        """
        wanted = re.compile(rf"(?:.*/)?(?:{pattern})(?:\.gz)?")
        if self.path.is_dir():
            yield from self._from_files(sorted(_files_below(self.path, wanted)), wanted)
        elif (kind := _archive_kind(self.path)) is None:
            yield from self._from_files([self.path] if wanted.fullmatch(self.path.name) else [], wanted)
        else:
            members = _zip_members(self.path) if kind == "zip" else _tar_members(self.path, kind)
            yield from self._from_archive(members, wanted)

    def fingerprints(self) -> list[Fingerprint]:
        """Size, time and hash of every file that ``files`` has given, or of the archive that held them."""
        return [fingerprint(path) for _, path in sorted(self.used.items())]

    def _from_files(self, paths: list[Path], wanted: re.Pattern[str]) -> Iterator[SourceFile]:
        total, done = sum(path.stat().st_size for path in paths), 0
        for path in paths:
            name = path.name if path == self.path else path.relative_to(self.path).as_posix()
            match = wanted.fullmatch(name)
            assert match is not None
            if not stat.S_ISREG(path.stat().st_mode):
                fail(str(path), "this is not a regular file")
            self.used[name] = path
            with path.open("rb") as raw:
                yield _source_file(name, str(path), match, raw, raw, partial(self._count, done, total))
            done += path.stat().st_size

    def _from_archive(
        self, members: Iterator[tuple[str, IO[bytes], IO[bytes]]], wanted: re.Pattern[str]
    ) -> Iterator[SourceFile]:
        self.used[self.path.name] = self.path
        count = partial(self._count, 0, self.path.stat().st_size)
        for name, stream, raw in members:
            match = wanted.fullmatch(name)
            if match is not None and _is_plain(name):
                yield _source_file(name, f"{self.path}, member {name}", match, stream, raw, count)

    def _count(self, before: int, total: int, position: int) -> None:
        if position:  # an empty file has nothing done, of which no time left can be told
            self._on_step(before + position, total)


def _files_below(folder: Path, wanted: re.Pattern[str]) -> Iterator[Path]:
    for inner, _, names in os.walk(folder):
        for name in names:
            path = Path(inner, name)
            if wanted.fullmatch(path.relative_to(folder).as_posix()):
                yield path


def fingerprint(path: Path) -> Fingerprint:
    """Size, time and hash of a file."""
    status = path.stat()
    return Fingerprint(str(path), status.st_size, status.st_mtime_ns, file_hash(path))


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _source_file(
    name: str, where: str, match: re.Match[str], stream: IO[bytes], raw: IO[bytes], on_read: Callable[[int], None]
) -> SourceFile:
    content = gzip.GzipFile(fileobj=stream) if name.endswith(".gz") else stream
    return SourceFile(name, where, match, SourceStream(cast("IO[bytes]", content), where, raw, on_read))


def _damage(where: str, raw: IO[bytes], error: Exception) -> DataError:
    return DataError(f"{where}: damaged or cut short at byte {raw.tell()} ({str(error).rstrip('.')})")


def _is_plain(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _archive_kind(path: Path) -> str | None:
    """By the name, as a damaged archive does not tell any more."""
    for ending, kind in ((".tar.gz", "gz"), (".tgz", "gz"), (".tar.xz", "xz"), (".txz", "xz"), (".zip", "zip")):
        if path.name.lower().endswith(ending):
            return kind
    if path.suffix == ".gz" and _holds_tar(path):  # the official lra_release.gz
        return "gz"
    return None


def _holds_tar(path: Path) -> bool:
    try:
        with gzip.open(path) as file:
            return file.read(512)[257:262] == b"ustar"
    except (OSError, EOFError, zlib.error):
        return False


def _tar_members(path: Path, kind: str) -> Iterator[tuple[str, IO[bytes], IO[bytes]]]:
    with path.open("rb") as raw:
        layer = gzip.GzipFile(fileobj=raw) if kind == "gz" else lzma.LZMAFile(raw)  # noqa: SIM115  raw is closed
        try:
            # "r|": from front to back without a step back, which would decompress everything anew.
            with tarfile.open(fileobj=layer, mode="r|") as archive:
                for member in archive:
                    content = archive.extractfile(member) if member.isfile() else None
                    if content is not None:
                        yield member.name.removeprefix("./"), content, raw
            while layer.read(_CHUNK):  # a cut shows only at the end of the compressed stream
                pass
        except (*_DAMAGE, OSError) as error:
            raise _damage(str(path), raw, error) from None


def _zip_members(path: Path) -> Iterator[tuple[str, IO[bytes], IO[bytes]]]:
    with path.open("rb") as raw:
        try:
            with zipfile.ZipFile(raw) as archive:
                for member in archive.infolist():
                    if not member.is_dir():
                        with archive.open(member) as content:
                            yield member.filename, content, raw
        except (*_DAMAGE, NotImplementedError, RuntimeError) as error:
            raise _damage(str(path), raw, error) from None
