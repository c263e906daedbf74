"""Text files as running text of bytes; by default Python's library."""

import platform
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mgk.data.errors import UsageError, fail
from mgk.data.preparation import Job
from mgk.data.sources import Source
from mgk.data.text_files import FACTS, checked_percents, cut
from mgk.data.writer import SetWriter

# Zipped and minimal Pythons have few sources.
MIN_LIBRARY_BYTES = 5_000_000
# No tests, which are large and unlike the rest, nor what is not the library's own.
_LIBRARY = r"^(?!(?:.*/)?(?:test|idlelib/|lib2to3/|site-packages/|dist-packages/))(?:.*/)?[^/]+\.py"
_VISIBLE = r"^(?!(?:.*/)?\.)(?:.*/)?[^/]+"
_SPLITS = {"train": "train", "valid": "validation", "validation": "validation", "test": "test"}
_SPLIT_NAME = re.compile(rf"(?:[^/]*[._-])?({'|'.join(_SPLITS)})(?:[._-][^/]*)?")


def default_source() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def prepare(writer: SetWriter, job: Job) -> None:
    """Write the bytes of all files, by name, each in one split.

    Three files with train, valid and test in their names are these splits. Other files
    go into the split that lacks most of its share; few are cut at line ends.
    """
    source = job.source
    is_library = source.path == default_source()
    pattern = _LIBRARY if is_library else _VISIBLE
    percents = checked_percents(job.options)
    sizes = {file.name: sum(map(len, file.chunks())) for file in source.files(pattern)}
    names = sorted(name for name, size in sizes.items() if size)
    if not names:
        fail(str(source.path), "there is no text here")
    total = sum(sizes.values())
    if is_library and total < MIN_LIBRARY_BYTES:
        have = f"{total / 1e6:.1f} MB of sources in {str(source.path)!r}"
        want = f"{MIN_LIBRARY_BYTES / 1e6:.0f} MB are wanted"
        advice = "give a text file or a folder with --source"
        raise UsageError(f"this Python has {have}, and {want}: {advice}")
    corpus = source.path.name.partition(".")[0]
    if is_library:
        corpus = f"standard library of Python {platform.python_version()}"
    writer.facts.update(FACTS, corpus=corpus)
    for split, text in _parts(source, pattern, names, sizes, percents):
        writer.append(split, "tokens", np.frombuffer(text, np.uint8))


def _parts(
    source: Source, pattern: str, names: Sequence[str], sizes: dict[str, int], percents: dict[str, int]
) -> Iterator[tuple[str, bytes]]:
    splits = _named_splits(names) or _shared_splits({name: sizes[name] for name in names}, percents)
    for file in source.files(pattern):
        if not (size := sizes[file.name]):
            continue
        if splits is None:
            yield from cut(file, size, percents)
        else:
            yield from ((splits[file.name], piece) for piece in file.text_pieces())


def _named_splits(names: Sequence[str]) -> dict[str, str] | None:
    """The splits that the files' names say, if there is one file for each."""
    matches = {name: _SPLIT_NAME.fullmatch(name.rpartition("/")[2]) for name in names}
    splits = {name: _SPLITS[match[1]] for name, match in matches.items() if match is not None}
    return splits if len(names) == 3 and len(set(splits.values())) == 3 else None


def _shared_splits(sizes: dict[str, int], percents: dict[str, int]) -> dict[str, str] | None:
    """Each file to the split that lacks most; None if a split gets none."""
    splits, done, total = {}, dict.fromkeys(percents, 0), 0
    for name, size in sizes.items():
        total += size
        split = max(percents, key=lambda split: percents[split] * total - 100 * done[split])
        splits[name] = split
        done[split] += size
    return splits if all(done.values()) else None
