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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn, cast

from mgk.data.errors import DataError, UsageError, fail

_CHUNK = 1 << 22
_ARCHIVES = {".tar.gz": "gz", ".tgz": "gz", ".tar.xz": "xz", ".txz": "xz", ".zip": "zip"}
_DAMAGE = (EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile)


@dataclass(frozen=True)
class Fingerprint:
    """What a source file was when it was read."""

    path: str
    bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """What a set was made from: the source, the patterns it was searched for, and the files that were found."""

    root: str = ""
    patterns: tuple[str, ...] = ()
    files: tuple[Fingerprint, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Record":
        """From JSON data; ``KeyError`` or ``TypeError`` when it is something else."""
        return cls(data["root"], tuple(data["patterns"]), tuple(Fingerprint(**file) for file in data["files"]))

    def changes(self, root: Path) -> Iterator[str]:
        """One sentence for every file that is not as it was; one with the old size and time is not read."""
        if str(root) != self.root:
            yield f"{root}: the set was made from {self.root or 'no source'}"
            return
        present = {str(path): path.stat() for path in source_files(root, self.patterns)}
        for file in self.files:
            status = present.pop(file.path, None)
            if status is None:
                yield f"{file.path}: this source file is gone"
            elif (status.st_size, status.st_mtime_ns) != (file.bytes, file.mtime_ns) and (
                file_hash(Path(file.path)) != file.sha256
            ):
                yield f"{file.path}: this source file has changed"
        yield from (f"{path}: this source file is new" for path in present)


class SourceStream:
    """The bytes of one file; what breaks on the way comes out as a ``DataError`` with the place."""

    def __init__(self, stream: IO[bytes], where: str, raw: IO[bytes], on_read: Callable[[int], None]) -> None:
        self._stream, self._where, self._raw, self._on_read = stream, where, raw, on_read
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of what has been read so far."""
        return self._hash.hexdigest()

    def read(self, size: int = -1) -> bytes:
        """The next ``size`` bytes, fewer at the end, or all that are left."""
        try:
            data = self._stream.read(size)
        except _DAMAGE as error:
            raise _damage(self._where, self._raw, error) from None
        except OSError as error:
            fail(self._where, f"cannot be read at byte {self._raw.tell()} ({error.strerror or error})")
        self._hash.update(data)
        self._on_read(self._raw.tell())
        return data

    def chunks(self) -> Iterator[bytes]:
        """All that is left, in pieces of some megabytes."""
        while chunk := self.read(_CHUNK):
            yield chunk

    def lines(self) -> Iterator[bytes]:
        """Lines without their ends, split at line feeds only."""
        rest = b""
        for chunk in self.chunks():
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
        self._patterns: list[str] = []
        self._opened: dict[Path, os.stat_result] = {}
        self._on_step, self._shown = on_step, 0

    def files(self, pattern: str) -> Iterator[SourceFile]:
        """The files whose path, from any folder on, fully matches the pattern; ".gz" files are unpacked on the way.

        A folder's files come in the order of their names, an archive's as they lie in it. Each is to be read before
        the next one is asked for.
        """
        self._patterns = [*self._patterns, *{pattern}.difference(self._patterns)]
        self._shown = 0
        wanted = _wanted([pattern])
        kind = None if self.path.is_dir() else _archive_kind(self.path)
        if kind is not None:
            members = _zip_members(self.path) if kind == "zip" else _tar_members(self.path, kind)
            yield from self._from_archive(members, wanted)
        elif self.path.is_dir() or wanted.fullmatch(self.path.name):
            yield from self._from_files(sorted(source_files(self.path, [pattern])), wanted)
        else:
            raise UsageError(
                f"the source {str(self.path)!r} is neither a folder, nor an archive (.tar.gz, .tar.xz, .zip), "
                "nor a file that the task has"
            )

    def parts(self, pattern: str, names: Mapping[str, str]) -> Iterator[tuple[str, SourceFile]]:
        """One file for each of ``names``, which the pattern's first group gives, with what the name stands for.

        The same file in a second place is passed over; another one of that name, or none, is an error.
        """
        found: dict[str, SourceFile] = {}
        for file in self.files(pattern):
            first = found.setdefault(file.match[1], file)
            if first is file:
                yield names[file.match[1]], file
                continue
            for _ in file.stream.chunks():
                pass
            if file.stream.sha256 != first.stream.sha256:
                fail(file.where, f"this is not the same as {first.name}: give the folder of one of them as the source")
        missing = [name for name in names if name not in found]
        if missing:
            fail(str(self.path), f"{', '.join(missing)} not found")

    def record(self) -> Record:
        """What ``files`` has given: size, time and hash of every file, or of the archive that held them."""
        prints = []
        for path, status in self._opened.items():
            prints.append(Fingerprint(str(path), status.st_size, status.st_mtime_ns, file_hash(path)))
            now = path.stat()
            if (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
                fail(str(path), "this source file was changed while it was read; run the command again")
        return Record(str(self.path), tuple(self._patterns), tuple(prints))

    def _from_files(self, paths: list[Path], wanted: re.Pattern[str]) -> Iterator[SourceFile]:
        total, done = sum(path.stat().st_size for path in paths), 0
        for path in paths:
            name = path.name if path == self.path else path.relative_to(self.path).as_posix()
            match = wanted.fullmatch(name)
            assert match is not None
            status = self._opened.setdefault(path, path.stat())
            if not stat.S_ISREG(status.st_mode):
                fail(str(path), "this is not a regular file")
            with path.open("rb") as raw:
                yield _source_file(name, str(path), match, raw, raw, partial(self._count, done, total))
            done += status.st_size

    def _from_archive(
        self, members: Iterator[tuple[str, IO[bytes], IO[bytes]]], wanted: re.Pattern[str]
    ) -> Iterator[SourceFile]:
        status = self._opened.setdefault(self.path, self.path.stat())
        count = partial(self._count, 0, status.st_size)
        for name, stream, raw in members:
            match = wanted.fullmatch(name)
            if match is not None and _is_plain(name):
                yield _source_file(name, f"{self.path}, member {name}", match, stream, raw, count)

    def _count(self, before: int, total: int, position: int) -> None:
        if before + position > self._shown:  # small members lie in one piece that was read ahead
            self._shown = before + position
            self._on_step(self._shown, total)


def source_files(root: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """The files of a folder that match one of the patterns, in no order; a file or archive is its own only one."""
    if not root.is_dir():
        yield from [root] if root.exists() else []
        return
    wanted = _wanted(patterns)
    for inner, _, names in os.walk(root, onerror=_refuse):
        before = Path(inner).relative_to(root).as_posix() + "/"
        before = before if before != "./" else ""
        yield from (Path(inner, name) for name in names if wanted.fullmatch(before + name))


def _refuse(error: OSError) -> NoReturn:
    raise error  # of a folder that cannot be read, which os.walk would pass over


def _wanted(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"(?:.*/)?(?:{'|'.join(patterns)})(?:\.gz)?")


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
    for ending, kind in _ARCHIVES.items():
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
