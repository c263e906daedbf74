"""Reads the files of a folder or an archive (.tar.gz, .tar.xz, .zip) in turn.

Archives are never unpacked: no member can be written anywhere.
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
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, NoReturn

from mgk._util.files import file_hash
from mgk.data.errors import DataError, UsageError, check_text, fail

_CHUNK = 1 << 22
# No data set has longer lines, larger members or a better compression.
_MAX_LINE = 1 << 24
_MAX_FILE = 1 << 28
_MAX_EXPANSION = 200
_SMALL = 1 << 26
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ARCHIVES = {".tar.gz": "gz", ".tgz": "gz", ".tar.xz": "xz", ".txz": "xz", ".zip": "zip"}
_CORRUPT_ARCHIVE = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile)
_CORRUPTION = (EOFError, zlib.error, lzma.LZMAError, *_CORRUPT_ARCHIVE)


@dataclass(frozen=True)
class Fingerprint:
    """What a source file was when it was read."""

    path: str
    bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class Record:
    """What a set was made from; the patterns are those of its files."""

    root: str = ""
    patterns: tuple[str, ...] = ()
    files: tuple[Fingerprint, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Record":
        """Read JSON data; ``KeyError`` or ``TypeError`` for other data."""
        files = tuple(Fingerprint(**file) for file in data["files"])
        return cls(data["root"], tuple(data["patterns"]), files)

    def changes(self, root: Path) -> Iterator[str]:
        """A sentence per changed file, by size and time, then by hash."""
        if str(root) != self.root:
            yield f"{root}: the set was made from {self.root or 'no source'}"
            return
        present = {str(path): path.stat() for path in source_files(root, self.patterns)}
        for file in self.files:
            status = present.pop(file.path, None)
            if status is None:
                yield f"{file.path}: this source file is gone"
            elif (status.st_size, status.st_mtime_ns) == (file.bytes, file.mtime_ns):
                continue
            elif file_hash(Path(file.path)) != file.sha256:
                yield f"{file.path}: this source file has changed"
        yield from (f"{path}: this source file is new" for path in present)


class _Expanded:
    """A decompressed stream; a ``DataError`` when it expands too much."""

    def __init__(self, stream: Any, where: str, compressed: Callable[[], int]) -> None:
        self._stream, self._where, self._compressed, self._size = stream, where, compressed, 0

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._stream.read(size)
        self._size += len(data)
        if self._size > max(_SMALL, _MAX_EXPANSION * self._compressed()):
            times = f"more than {_MAX_EXPANSION} times"
            fail(self._where, f"it expands {times}: this is not the archive of a data set")
        return data


class SourceFile:
    """One file; reading raises a ``DataError`` with the place ``where``."""

    def __init__(
        self,
        where: str,
        match: re.Match[str],
        stream: Any,
        raw: IO[bytes],
        on_read: Callable[[int], None],
    ) -> None:
        self.name, self.where, self.match = match.string, where, match
        self._stream = stream
        if self.name.endswith(".gz"):
            self._stream = _Expanded(gzip.GzipFile(fileobj=stream), where, raw.tell)
        self._raw, self._on_read, self._hash = raw, on_read, hashlib.sha256()

    @property
    def sha256(self) -> str:
        """The SHA-256 of what was read so far."""
        return self._hash.hexdigest()

    def read(self, size: int) -> bytes:
        """The next ``size`` bytes, fewer at the end."""
        try:
            data: bytes = self._stream.read(size)
        except _CORRUPTION as error:
            raise _corrupt(self.where, self._raw, error) from None
        except OSError as error:
            reason = error.strerror or error
            fail(self.where, f"cannot be read at byte {self._raw.tell()} ({reason})")
        self._hash.update(data)
        self._on_read(self._raw.tell())
        return data

    def chunks(self) -> Iterator[bytes]:
        """All that is left, in pieces of some megabytes."""
        while chunk := self.read(_CHUNK):
            yield chunk

    def content(self) -> bytes:
        """All of a file of some megabytes at most."""
        data = b"".join(islice(self.chunks(), _MAX_FILE // _CHUNK))
        if self.read(1):
            fail(self.where, f"the file is larger than {_MAX_FILE >> 20} MiB")
        return data

    def text_chunks(self) -> Iterator[bytes]:
        """As :meth:`chunks`, without a byte-order mark."""
        for number, chunk in enumerate(self.chunks()):
            yield chunk if number else chunk.removeprefix(BYTE_ORDER_MARK)

    def lines(self) -> Iterator[tuple[bytes, str]]:
        """Each line without its end, and its place; an empty file is an error."""
        number = 0
        for piece in line_pieces(self.text_chunks(), self.where):
            for line in piece.split(b"\n")[:-1]:
                number += 1
                yield line.rstrip(b"\r"), f"{self.where}, line {number}"
        if number == 0:
            fail(self.where, "the file is empty")

    def text_pieces(self) -> Iterator[bytes]:
        """UTF-8 in pieces of whole lines; an empty file is an error."""
        offset = 0
        for piece in line_pieces(self.text_chunks(), self.where):
            check_text(piece, self.where, offset)
            offset += len(piece)
            yield piece
        if offset == 0:
            fail(self.where, "the file is empty")


class Source:
    """A folder, archive or file with a data set in its official layout."""

    def __init__(self, path: Path, on_step: Callable[[int, int], None] = lambda done, total: None) -> None:
        if not path.exists():
            raise UsageError(f"the source {str(path)!r} does not exist")
        self.path = path.absolute()
        self._patterns: list[str] = []
        self._opened: dict[Path, os.stat_result] = {}
        self._on_step, self._shown = on_step, 0

    def files(self, pattern: str) -> Iterator[SourceFile]:
        """Files whose path matches from any folder on, one after the other."""
        if pattern not in self._patterns:
            self._patterns.append(pattern)
        self._shown = 0
        wanted = _wanted([pattern])
        is_folder = self.path.is_dir()
        kind = None if is_folder else _archive_kind(self.path)
        if kind is not None:
            yield from self._from_archive(kind, wanted)
        elif is_folder or wanted.fullmatch(self.path.name):
            yield from self._from_folder(pattern, wanted)
        else:
            kinds = "a folder, nor an archive (.tar.gz, .tar.xz, .zip), nor a file of the task"
            raise UsageError(f"the source {str(self.path)!r} is neither {kinds}")

    def parts(self, pattern: str, names: Collection[str]) -> Iterator[tuple[str, SourceFile]]:
        """A file for each of ``names``, the pattern's first group."""
        found: dict[str, SourceFile] = {}
        for file in self.files(pattern):
            first = found.setdefault(file.match[1], file)
            if first is file:
                yield file.match[1], file
                continue
            for _ in file.chunks():
                pass
            if file.sha256 != first.sha256:
                advice = "give the folder of one of them as the source"
                fail(file.where, f"this is not the same as {first.name}: {advice}")
        missing = [name for name in names if name not in found]
        if missing:
            fail(str(self.path), f"{', '.join(missing)} not found")

    def record(self) -> Record:
        """What was read: the files, or the archive that held them."""
        prints = []
        for path, status in self._opened.items():
            size, time = status.st_size, status.st_mtime_ns
            prints.append(Fingerprint(str(path), size, time, file_hash(path)))
            now = path.stat()
            if (now.st_size, now.st_mtime_ns) != (size, time):
                what = "this source file was changed while it was read"
                fail(str(path), f"{what}; run the command again")
        return Record(str(self.path), tuple(self._patterns), tuple(prints))

    def _from_folder(self, pattern: str, wanted: re.Pattern[str]) -> Iterator[SourceFile]:
        paths = sorted(source_files(self.path, [pattern]))
        total, done = sum(path.stat().st_size for path in paths), 0
        for path in paths:
            name = path.name if path == self.path else path.relative_to(self.path).as_posix()
            match = wanted.fullmatch(name)
            assert match is not None
            status = self._opened.setdefault(path, path.stat())
            if not stat.S_ISREG(status.st_mode):
                fail(str(path), "this is not a regular file")
            with path.open("rb") as raw:
                yield SourceFile(str(path), match, raw, raw, partial(self._count, done, total))
            done += status.st_size

    def _from_archive(self, kind: str, wanted: re.Pattern[str]) -> Iterator[SourceFile]:
        status = self._opened.setdefault(self.path, self.path.stat())
        count = partial(self._count, 0, status.st_size)
        with self.path.open("rb") as raw:
            try:
                members = (_zip_members if kind == "zip" else _tar_members)(raw, kind, str(self.path))
                for name, stream in members:
                    match = wanted.fullmatch(name)
                    is_inside = not name.startswith("/") and ".." not in name.split("/")
                    if match is not None and is_inside:
                        yield SourceFile(f"{self.path}, member {name}", match, stream, raw, count)
            except (*_CORRUPTION, OSError, NotImplementedError, RuntimeError) as error:
                raise _corrupt(str(self.path), raw, error) from None

    def _count(self, before: int, total: int, position: int) -> None:
        if before + position > self._shown:  # small members are read ahead
            self._shown = before + position
            self._on_step(self._shown, total)


def line_pieces(chunks: Iterable[bytes], where: str) -> Iterator[bytes]:
    """The same text cut after line ends; a last line without an end gets one."""
    rest: list[bytes] = []  # of a line whose end is to come
    for chunk in chunks:
        head, end, tail = chunk.rpartition(b"\n")
        if end:
            yield b"".join([*rest, head, end])
            rest = []
        rest.append(tail)
        if sum(map(len, rest)) > _MAX_LINE:
            fail(where, f"a line is longer than {_MAX_LINE >> 20} MiB")
    if any(rest):
        yield b"".join([*rest, b"\n"])


def source_files(root: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """The files of a folder that match a pattern, or the file itself."""
    if not root.is_dir():
        yield from [root] if root.exists() else []
        return
    wanted = _wanted(patterns)
    for inner, _, names in os.walk(root, onerror=_raise):
        before = "" if inner == str(root) else f"{Path(inner).relative_to(root).as_posix()}/"
        yield from (Path(inner, name) for name in names if wanted.fullmatch(before + name))


def _raise(error: OSError) -> NoReturn:
    raise error  # of a folder that cannot be read, which os.walk would skip


def _wanted(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"(?:.*/)?(?:{'|'.join(patterns)})(?:\.gz)?")


def _corrupt(where: str, raw: IO[bytes], error: Exception) -> DataError:
    reason = str(error).rstrip(".")
    return DataError(f"{where}: corrupt or truncated at byte {raw.tell()} ({reason})")


def _archive_kind(path: Path) -> str | None:
    """The kind by the name, as a corrupt file lacks its signature; of "x.gz" by content."""
    for ending, kind in _ARCHIVES.items():
        if path.name.lower().endswith(ending):
            return kind
    try:
        with gzip.open(path) as file:
            is_tar = file.read(512)[257:262] == b"ustar"
            return "gz" if path.suffix == ".gz" and is_tar else None
    except (OSError, EOFError, zlib.error):
        return None


def _tar_members(raw: IO[bytes], kind: str, where: str) -> Iterator[tuple[str, Any]]:
    stream: Any = gzip.GzipFile(fileobj=raw) if kind == "gz" else lzma.LZMAFile(raw)  # noqa: SIM115
    layer: Any = _Expanded(stream, where, raw.tell)
    # "r|": a step back would decompress everything anew.
    with tarfile.open(fileobj=layer, mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                yield member.name.removeprefix("./"), content
    while layer.read(_CHUNK):  # truncation shows only at the end
        pass


def _zip_members(raw: IO[bytes], kind: str, where: str) -> Iterator[tuple[str, Any]]:
    with zipfile.ZipFile(raw) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                size, place = member.compress_size, f"{where}, member {member.filename}"
                with archive.open(member) as content:
                    yield member.filename, _Expanded(content, place, partial(int, size))
