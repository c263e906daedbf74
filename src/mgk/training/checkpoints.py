"""Checkpoints that are whole or not there: ``checkpoints/step-N``, sealed by a manifest of every file's SHA-256.

A checkpoint is written under ``checkpoints/.writing`` and renamed when its manifest is in it, so a name ``step-N`` is
only ever seen whole. What happens to it later, on the disk, its manifest finds out.
"""

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from mgk.data.sources import file_hash

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
WRITING = ".writing"

_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Choice:
    """The checkpoint to go on from, if there is one, and what is wrong with newer ones."""

    path: Path | None
    damaged: dict[Path, str]

    @property
    def step(self) -> int:
        """The step to go on from; 0 is the beginning."""
        return 0 if self.path is None else step_of(self.path)


def step_of(checkpoint: Path) -> int:
    """N of a folder ``step-N``."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def list_checkpoints(run: Path) -> list[Path]:
    """All checkpoints of a run, the newest first, whether whole or damaged."""
    folder = run / CHECKPOINTS
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of, reverse=True)


def seal(written: Path, target: Path) -> None:
    """Give a checkpoint its manifest and its name."""
    files = sorted(path for path in written.rglob("*") if path.is_file())
    manifest = {
        str(path.relative_to(written)): {"bytes": path.stat().st_size, "sha256": file_hash(path)} for path in files
    }
    with (written / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"format": 1, "files": manifest}, file, indent=2)
    for path in [*files, written / MANIFEST, written]:  # on the disk before the name promises it
        _sync(path)
    if target.exists():
        shutil.rmtree(target)
    os.rename(written, target)
    _sync(target.parent)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in half a sentence; None for a whole one."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_bytes())["files"]
        for name, spec in files.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != spec["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {spec['bytes']}"
            if file_hash(path) != spec["sha256"]:
                return f"the content of {name} has changed"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


def choose(run: Path) -> Choice:
    """The newest whole checkpoint."""
    damaged: dict[Path, str] = {}
    for path in list_checkpoints(run):
        reason = damage(path)
        if reason is None:
            return Choice(path, damaged)
        damaged[path] = reason
    return Choice(None, damaged)


def last_good(run: Path) -> str:
    """Half a sentence on where a run can go on from."""
    found = next(iter(list_checkpoints(run)), None)
    return "there is no checkpoint yet" if found is None else f"the last good checkpoint is {found}"


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, its manifest first, so that what is left of it after an interruption is not trusted."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def keep_newest(run: Path, count: int) -> None:
    """Delete all checkpoints but the newest ones."""
    for path in list_checkpoints(run)[count:]:
        remove(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
