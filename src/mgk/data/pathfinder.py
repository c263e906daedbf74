"""Pathfinder-32: 32 x 32 images of dashed paths with two dots; label 1: joined.

Read from Long Range Arena's folder, or drawn after Kim (2020): two long paths that
bend gently and touch nothing, shorter distractors, and two dots at the ends of one
path (label 1) or at one end of each (label 0), equally often. A block depends on
seed and number alone; in units of 1/64 pixel every machine draws the same.
"""

import io
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mgk.data.errors import UsageError, fail
from mgk.data.image import PIXELS
from mgk.data.ordered_pool import in_order
from mgk.data.preparation import Job
from mgk.data.random_bits import Stream, permutation
from mgk.data.sources import Source
from mgk.data.writer import SetWriter

SIDE = 32
IMAGES_PER_BLOCK = 256
SPLITS = ("train", "validation", "test")
# Dashes of the two long paths; the official folder of the same difficulty.
DIFFICULTIES = {
    "easy": (6, "curv_baseline"),
    "intermediate": (9, "curv_contour_length_9"),
    "hard": (14, "curv_contour_length_14"),
}

_Int = NDArray[np.int64]
_Bytes = NDArray[np.uint8]
_Bool = NDArray[np.bool_]
_UNIT = 64
_DASH, _GAP, _SEED_DISTANCE = 2, 1, 7  # in pixels
_TURNS = 64  # directions of the circle
_ANGLES = np.arange(_TURNS) * (2 * np.pi / _TURNS)
_CIRCLE = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], 1)
_COMPASS: _Int = np.rint(_UNIT * _CIRCLE).astype(np.int64)  # (turns, 2)
_BEND = 8  # most directions that a dash turns by: 45 degrees
_PADDING = 2 * _UNIT
# Bends that a dash tries, second paths of a first one, first paths at once.
_BENDS_TRIED, _SECONDS_TRIED, _WALKS_AT_ONCE = 16, 16, 512
_DASHES_OF_DISTRACTORS = 20
_HALF_WIDTH, _DOT_RADIUS = 3 * _UNIT // 8, 3 * _UNIT // 2
_DASH_LEVEL, _DOT_LEVEL = 191, 255
_OVERSAMPLING = 4
_STAMP = 6  # pixels on each side of a drawn dash or dot
_RENDERED = _UNIT // 8  # the step between places where they are drawn
# The grid of occupied cells of half a pixel; its border is always occupied.
_MARGIN = 8
_GRID = 2 * SIDE + 2 * _MARGIN
_CLEARANCE = 4  # cells: two pixels between dashes
_REACH = np.arange(1 - _CLEARANCE, _CLEARANCE)
_NEAR = _REACH[:, None] ** 2 + _REACH**2 < _CLEARANCE**2
_DISC: _Int = (_REACH[:, None] * _GRID + _REACH)[_NEAR]  # around a cell
_INSIDE = slice(_MARGIN + 4, _GRID - _MARGIN - 4)


class Block(NamedTuple):
    """Images (n, 32, 32), labels (n,), long paths (n, 2, dashes, 2 ends, 2)."""

    images: _Bytes
    labels: _Bytes
    paths: NDArray[np.float64]


def prepare(writer: SetWriter, job: Job) -> None:
    """Draw the set, or read the official folder."""
    difficulty = job.options["difficulty"]
    if difficulty not in DIFFICULTIES:
        names = ", ".join(DIFFICULTIES)
        raise UsageError(f"the difficulty must be one of {names}, got {difficulty!r}")
    writer.facts.update(PIXELS, height=SIDE, width=SIDE)
    pieces = _read(job.given, job.options) if job.given else _draw_all(job)
    for split, images, labels in pieces:
        writer.append(split, "tokens", images.reshape(len(images), -1))
        writer.append(split, "labels", labels)


def draw(seed: int, number: int, difficulty: str = "hard") -> Block:
    """Block ``number``: 256 images; those in even places are connected."""
    dashes, _ = DIFFICULTIES[difficulty]
    stream = Stream(seed, number)
    occupied, paths = _long_paths(stream, dashes)
    distractors = _distractors(stream, dashes // 3, occupied)
    labels = 1 - np.arange(IMAGES_PER_BLOCK) % 2
    one = stream.below(2, IMAGES_PER_BLOCK)
    other = np.where(labels == 1, one, 1 - one)
    rows = np.arange(IMAGES_PER_BLOCK)
    dots = np.stack([paths[rows, one, 0, 0], paths[rows, other, -1, 1]], 1)  # (n, 2, 2)
    return Block(_render(paths, distractors, dots), labels.astype(np.uint8), paths / _UNIT)


def _draw_all(job: Job) -> Iterator[tuple[str, _Bytes, _Bytes]]:
    options = job.options
    splits = np.repeat(SPLITS, [options[split] for split in SPLITS])
    done = 0
    work = partial(draw, options["seed"], difficulty=options["difficulty"])
    with closing(in_order(work, job.workers)) as blocks:
        while done < len(splits):
            block = next(blocks)
            here = splits[done : done + IMAGES_PER_BLOCK]
            for split in SPLITS:
                mine = np.flatnonzero(here == split)
                if len(mine):
                    yield split, block.images[mine], block.labels[mine]
            done += len(here)
            job.on_step(done, len(splits))


def _long_paths(stream: Stream, dashes: int) -> tuple[_Bool, _Int]:
    """What two paths occupy (n, cells), and the paths (n, 2, dashes, 2, 2)."""
    occupied, paths, count = [], [], 0
    while count < IMAGES_PER_BLOCK:
        grid = np.repeat(_empty(), _WALKS_AT_ONCE, 0)
        rows, firsts = _walk(stream, dashes, grid, _starts(stream, _WALKS_AT_ONCE))
        grid = np.repeat(grid[rows], _SECONDS_TRIED, 0)
        firsts = np.repeat(firsts, _SECONDS_TRIED, 0)
        starts = firsts[:, 0, 0] + _SEED_DISTANCE * _COMPASS[stream.below(_TURNS, len(firsts))]
        rows, seconds = _walk(stream, dashes, grid, starts)
        # One second path for each first one.
        _, chosen = np.unique(rows // _SECONDS_TRIED, return_index=True)
        occupied.append(grid[rows[chosen]])
        paths.append(np.stack([firsts[rows[chosen]], seconds[chosen]], 1))
        count += len(chosen)
    block = slice(IMAGES_PER_BLOCK)
    return np.concatenate(occupied)[block], np.concatenate(paths)[block]


def _starts(stream: Stream, count: int) -> _Int:
    return stream.below(SIDE * _UNIT - 2 * _PADDING, 2 * count).reshape(-1, 2) + _PADDING


def _distractors(stream: Stream, dashes: int, occupied: _Bool) -> list[tuple[_Int, _Int]]:
    """Short paths of 20 dashes in all: rows with room, and their paths."""
    found = []
    for _ in range(_DASHES_OF_DISTRACTORS // dashes):
        grid = occupied.copy()
        rows, paths = _walk(stream, dashes, grid, _starts(stream, len(grid)))
        occupied[rows] = grid[rows]
        found.append((rows, paths))
    return found


def _walk(stream: Stream, dashes: int, occupied: _Bool, starts: _Int) -> tuple[_Int, _Int]:
    """Paths from all starts (n, 2) that keep clear of others and of themselves.

    The rows (m,) that did not get stuck, and their paths (m, dashes, 2 ends, 2).
    ``occupied`` (n, cells) gets these paths; its other rows are undefined.
    """
    rows, at = np.arange(len(starts)), starts
    turn = stream.below(_TURNS, len(starts))
    path = np.zeros((len(starts), dashes, 2, 2), np.int64)
    before: _Int | None = None  # cells of the last dash, near the new one
    for number in range(dashes):
        bends = stream.below(2 * _BEND + 1, len(rows) * _BENDS_TRIED) - _BEND
        turns = (turn[:, None] + bends.reshape(-1, _BENDS_TRIED)) % _TURNS
        begins = at[:, None] + (_GAP if number else 0) * _COMPASS[turns]
        ends = begins + _DASH * _COMPASS[turns]  # (m, tries, 2)
        cells = _cell(np.stack([begins, (begins + ends) // 2, ends], 2))  # (m, tries, 3)
        is_free: _Bool = np.logical_not(np.any(occupied[rows[:, None, None], cells], axis=-1))
        goes_on = np.flatnonzero(is_free.any(1))
        choice = is_free[goes_on].argmax(1)
        rows, path = rows[goes_on], path[goes_on]
        turn, at = turns[goes_on, choice], ends[goes_on, choice]
        path[:, number, 0], path[:, number, 1] = begins[goes_on, choice], at
        if before is not None:
            _occupy(occupied, rows, before[goes_on])
        before = cells[goes_on, choice]
    assert before is not None
    _occupy(occupied, rows, before)
    return rows, path


def _cell(points: _Int) -> _Int:
    """The cells of points (..., 2); those far outside fall into the border."""
    cells = np.clip(2 * points // _UNIT + _MARGIN, 0, _GRID - 1)
    return cells[..., 0] * _GRID + cells[..., 1]


def _occupy(occupied: _Bool, rows: _Int, cells: _Int) -> None:
    """Mark what is too near to the cells (m, 3) of a dash as occupied."""
    occupied[rows[:, None, None], cells[:, :, None] + _DISC] = True


@cache
def _empty() -> _Bool:
    grid = np.ones((_GRID, _GRID), np.bool_)
    grid[_INSIDE, _INSIDE] = False
    return grid.reshape(1, -1)


def _render(paths: _Int, distractors: list[tuple[_Int, _Int]], dots: _Int) -> _Bytes:
    """The images; the brighter of two things in one pixel stays."""
    places, border = np.arange(len(paths)), _STAMP
    side = SIDE + 2 * border
    canvas = np.zeros((len(paths), side, side), np.uint8)
    for rows, lines in ((places, paths), *distractors):
        _stamp(canvas, np.repeat(rows, lines[0].size // 4), lines.reshape(-1, 2, 2), _dash_stamps())
    _stamp(canvas, np.repeat(places, 2), np.repeat(dots.reshape(-1, 1, 2), 2, 1), _dot_stamps())
    return canvas[:, border:-border, border:-border]


def _stamp(canvas: _Bytes, rows: _Int, segments: _Int, stamps: _Bytes) -> None:
    """Draw every segment (m, 2 ends, 2) onto the canvas of its row."""
    middle = segments.sum(1) // 2
    corner = middle // _UNIT - _STAMP // 2 + _STAMP
    rest = middle % _UNIT // _RENDERED
    ink = stamps[_direction(segments[:, 1] - segments[:, 0]) % len(stamps), rest[:, 0], rest[:, 1]]
    reach = np.arange(_STAMP)
    y = corner[:, 0, None, None] + reach[:, None]
    x = corner[:, 1, None, None] + reach
    np.maximum.at(canvas, (rows[:, None, None], y, x), ink)


def _direction(steps: _Int) -> _Int:
    """The place on the compass of every dash; 0 for a dot."""
    return (steps[:, None] == _DASH * _COMPASS).all(-1).argmax(1)


@cache
def _dash_stamps() -> _Bytes:
    return _stamps(_DASH * _COMPASS, _HALF_WIDTH, _DASH_LEVEL)


@cache
def _dot_stamps() -> _Bytes:
    return _stamps(np.zeros((1, 2), np.int64), _DOT_RADIUS, _DOT_LEVEL)


def _stamps(steps: _Int, radius: int, level: int) -> _Bytes:
    """What each step (k, 2) colours, by its place in a pixel: (k, 8, 8, 6, 6)."""
    spacing = _UNIT // _OVERSAMPLING
    samples = np.arange(_STAMP * _OVERSAMPLING) * spacing
    samples += spacing // 2 - _STAMP // 2 * _UNIT
    places = np.arange(0, _UNIT, _RENDERED) + _RENDERED // 2
    shape = (len(steps), len(places), len(places), len(samples), len(samples))
    along = [steps[:, axis, None, None, None, None] for axis in (0, 1)]
    starts = [-(step // 2) for step in along]
    # The offset of each sample from the segment's start.
    y = samples[:, None] - places[:, None, None, None] - starts[0]
    x = samples - places[:, None, None] - starts[1]
    offset = [np.broadcast_to(y, shape), np.broadcast_to(x, shape)]
    length = np.maximum(along[0] ** 2 + along[1] ** 2, 1)
    # The nearest point of the segment, in 1/64 of its length.
    product = offset[0] * along[0] + offset[1] * along[1]
    place = np.clip(product * _UNIT // length, 0, _UNIT)
    distance = sum((offset[axis] * _UNIT - along[axis] * place) ** 2 for axis in (0, 1))
    inside = distance <= (radius * _UNIT) ** 2
    parts = (*shape[:3], _STAMP, _OVERSAMPLING, _STAMP, _OVERSAMPLING)
    return (inside.reshape(parts).sum((4, 6)) * level // _OVERSAMPLING**2).astype(np.uint8)


def _read(source: Source, options: Mapping[str, Any]) -> Iterator[tuple[str, _Bytes, _Bytes]]:
    """The official folder; metadata/*.npy: folder, file, number, label."""
    _, folder = DIFFICULTIES[options["difficulty"]]
    labels: dict[str, int] = {}
    images: dict[str, _Bytes] = {}
    is_empty: set[str] = set()
    # Not from pathfinder64/, which has the same names.
    content = r"(?:metadata/\d+\.npy|(imgs/\d+/\w+\.png))"
    for file in source.files(rf"(?:pathfinder32/|^){folder}/{content}"):
        if file.match[1] is None:
            labels.update(_metadata(file.content(), file.where))
        elif data := file.content():
            images[file.match[1]] = read_png(data, file.where)
        else:
            is_empty.add(file.match[1])  # LRA leaves it out too
    if not labels:
        fail(str(source.path), f"no {folder}/metadata/*.npy found")
    names = sorted(labels.keys() - is_empty, key=_numbers)
    for name in names:
        if name not in images:
            fail(str(source.path), f"{folder}/{name} is in the metadata but not found")
    tenth = len(names) // 10
    if not tenth:
        fail(str(source.path), f"{len(names)} images are too few for three splits")
    parts = np.split(permutation(len(names), options["seed"]), [-2 * tenth, -tenth])
    for split, places in zip(SPLITS, parts, strict=True):
        chosen = [names[place] for place in np.sort(places)]
        yield (
            split,
            np.stack([images[name] for name in chosen]),
            np.array([labels[name] for name in chosen], np.uint8),
        )


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", name)]


def _metadata(data: bytes, where: str) -> dict[str, int]:
    labels = {}
    for number, line in enumerate(data.splitlines(), 1):
        columns = line.split()
        place = f"{where}, line {number}"
        if len(columns) < 4:
            fail(place, f"{len(columns)} columns instead of at least 4")
        folder, file, _, label = columns[:4]
        if label not in (b"0", b"1"):
            fail(place, f"the label must be 0 or 1, got {label[:20]!r}")
        labels[f"{folder.decode('latin-1')}/{file.decode('latin-1')}"] = int(label)
    return labels


def read_png(data: bytes, where: str) -> _Bytes:
    """The pixels (32, 32) of a grey PNG; no other image is decoded."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise UsageError("reading PNG images needs Pillow: pip install 'mgk[data]'") from None
    try:
        Image.open(io.BytesIO(data), formats=["PNG"]).verify()  # the checksums
        image = Image.open(io.BytesIO(data), formats=["PNG"])
        pixels = np.array(image) if ((image.size, image.mode) == ((SIDE, SIDE), "L")) else None
    except Exception:  # Pillow has no common class
        fail(where, "this is not a PNG image, or it is corrupt or truncated")
    if pixels is None:
        kind = f"{image.width} x {image.height} pixels of mode {image.mode}"
        fail(where, f"an image of {kind} instead of {SIDE} x {SIDE} of mode L (grey)")
    return pixels
