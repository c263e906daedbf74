"""Atomic writes, checksums, locks of folders, and the commit of a file.

A *hashed* JSON file holds the SHA-256 of its own content under ``sha256``, and the
:class:`FileSpec` of other files that belong to it under ``files``.
"""

import errno
import hashlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mgk._util.errors import UserError

SHA256 = "sha256"
LOCK = ".lock"
_BYTE = 1 << 30  # beyond the content: Windows locks it for reading too
_held: set[int] = set()
# Two writes within the resolution of time stamps share one.
_SETTLED_NS = 2_000_000_000
DIRTY = "-dirty"  # of a commit with changes


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path that becomes ``path``, synced, unless the block raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~umask())  # mkstemp: the owner alone
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty folder that becomes ``path``, synced, unless the block raises."""
    temporary = path.with_name(f".{path.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for written in [*temporary.rglob("*"), temporary]:
            sync(written)
        if path.exists():
            shutil.rmtree(path)
        os.rename(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync(path.parent)


def write_file(path: Path, content: str | bytes) -> None:
    """Write text (UTF-8) or bytes atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` as indented JSON."""
    write_file(path, json.dumps(data, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """The JSON data of a file; ``ValueError`` where it holds something else."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class FileSpec:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


FileSpecs = dict[str, FileSpec]  # by name, from a folder on


def file_specs(folder: Path, paths: Iterable[Path]) -> FileSpecs:
    """The specs of files below a folder, by name."""
    return {
        path.relative_to(folder).as_posix(): FileSpec(path.stat().st_size, file_hash(path))
        for path in sorted(paths)
    }


def wrong_files(folder: Path, specs: Mapping[str, FileSpec]) -> Iterator[tuple[str, str]]:
    """The name of every file that does not match its spec, and why.

    A file is hashed once per process, and again when its size or its time differs.
    """
    for name, spec in specs.items():
        try:
            status = (folder / name).stat()
        except (OSError, ValueError):
            yield name, "is missing"
            continue
        if status.st_size != spec.bytes:
            yield name, f"has {status.st_size} bytes instead of {spec.bytes}"
            continue
        is_settled = time.time_ns() - status.st_ctime_ns > _SETTLED_NS
        hashed = _hash_of_version if is_settled else _hash_of_version.__wrapped__
        if hashed(folder / name, status.st_ino, status.st_size, status.st_ctime_ns) != spec.sha256:
            yield name, "has changed: its SHA-256 differs"


@lru_cache(maxsize=4096)
def _hash_of_version(path: Path, *version: int) -> str:
    return file_hash(path)


def with_hash(data: Mapping[str, Any]) -> dict[str, Any]:
    """JSON data with the SHA-256 of their content."""
    return {**data, SHA256: _content_hash(data)}


def write_hashed(path: Path, data: Mapping[str, Any], files: Iterable[Path] = ()) -> None:
    """Write ``data`` with its hash and the specs of files below the same folder."""
    if specs := file_specs(path.parent, files):
        data = {**data, "files": {name: asdict(spec) for name, spec in specs.items()}}
    write_json(path, with_hash(data))


def read_verified(path: Path) -> dict[str, Any]:
    """What :func:`with_hash` was given; ``ValueError`` for a wrong checksum."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise ValueError("it is not a JSON object")
    if SHA256 not in data:
        raise ValueError("it has no checksum")
    if data.pop(SHA256) != _content_hash(data):
        raise ValueError("its content has changed: its SHA-256 differs")
    return data


def verified_specs(path: Path) -> FileSpecs:
    """The ``files`` of a hashed file; ``ValueError`` for a wrong one."""
    try:
        return {name: FileSpec(**spec) for name, spec in read_verified(path)["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it does not list its files: {error}") from None


def _content_hash(data: Mapping[str, Any]) -> str:
    """The SHA-256 of the values, whatever white space and order of keys."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sync(path: Path) -> None:
    """Make a file or a folder durable."""
    if path.is_dir() and os.name != "posix":  # elsewhere a folder cannot be opened
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() or os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def commit_of(file: Path) -> str | None:
    """The commit of the repository that tracks the file; None where none does.

    "-dirty" is added if tracked files other than results were changed.
    """
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(file.parent, "rev-parse", "HEAD")
    changed = _git(file.parent, "status", "--porcelain", "-uno", "--", ":/", ":(exclude,top)results")
    return None if commit is None else commit + (DIRTY if changed else "")


def is_committed(file: Path) -> bool:
    """Whether the file is in the last commit as it is here."""
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return False
    return _git(file.parent, "status", "--porcelain", "--", file.name) == ""


def _git(directory: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(directory), *arguments]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; ``UserError`` names the process that has it.

    File systems without locks are not locked.
    """
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(handle)
    try:
        if not _try_lock(handle):
            advice = "wait until it ends, or stop it"
            raise UserError(f"{folder}: {_holder(handle)} is at work in this folder: {advice}")
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, f"{os.getpid()} {socket.gethostname()}\n".encode())
        yield
    finally:
        _held.discard(handle)
        os.close(handle)


def _holder(handle: int) -> str:
    words = os.read(handle, 300).decode(errors="replace").split()
    return f"process {words[0]} on {words[1]}" if len(words) == 2 else "another process"


def _try_lock(handle: int) -> bool:
    """Whether this process has the lock now."""
    try:
        if os.name == "nt":
            import msvcrt

            os.lseek(handle, _BYTE, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            os.lseek(handle, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK):
            return False
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


def _close_in_child() -> None:
    """A forked process would hold the lock beyond the life of its parent."""
    for handle in _held:
        os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
