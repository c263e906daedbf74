"""Files that are written whole or not at all."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its name, synced to disk, when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~umask())  # mkstemp makes files that only their owner reads
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """An empty folder beside ``path`` that replaces it, synced to disk, when the block ends without an error."""
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
    """Write text (UTF-8) or bytes; whatever stops it on the way leaves an older file as it was."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` as indented JSON."""
    write_file(path, json.dumps(data, indent=2) + "\n")


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    """The process's umask, which the operating system only tells by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
