"""Pathfinder-32: 32 x 32 pictures of dashed paths with two dots; label 1: one path joins them.

Read from the official folder of Long Range Arena, or drawn after the published description (Kim 2020) with LRA's
settings: two paths of equal length that bend gently and touch nothing, shorter distractors, and two dots at the ends of
one path (label 1) or at one end of each (label 0). Both labels are equally frequent.

Pictures are drawn in blocks, all paths of a block at once; a block depends on the seed and its number alone.
Coordinates are whole numbers of 1/64 pixel, so that every machine draws the same.
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
from mgk.data.preparation import Job, OnStep
from mgk.data.random_bits import Stream, permutation
from mgk.data.sources import Source
from mgk.data.writer import SetWriter

SIDE = 32
PICTURES_PER_BLOCK = 256
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
_COMPASS: _Int = np.rint(_UNIT * np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], 1)).astype(np.int64)  # (turns, 2)
_BEND = 8  # a dash turns by at most this many directions: 45 degrees
_PADDING = 2 * _UNIT
# Bends that a dash tries, second paths that a first one tries, and first paths that are walked at once.
_BENDS_TRIED, _SECONDS_TRIED, _WALKS_AT_ONCE = 16, 16, 512
_DASHES_OF_DISTRACTORS = 20
_HALF_WIDTH, _DOT_RADIUS = 3 * _UNIT // 8, 3 * _UNIT // 2
_DASH_LEVEL, _DOT_LEVEL = 191, 255
_OVERSAMPLING = 4
_STAMP = 6  # pixels on each side of what one dash or dot colours
_RENDERED = _UNIT // 8  # the step, in units, of the places where dashes and dots are drawn
# What is taken is kept in cells of half a pixel; the border around the image is taken from the start.
_MARGIN = 8
_GRID = 2 * SIDE + 2 * _MARGIN
_CLEARANCE = 4  # cells: two pixels between the dashes of different paths, and of one path that comes back
_REACH = np.arange(1 - _CLEARANCE, _CLEARANCE)
_NEAR = _REACH[:, None] ** 2 + _REACH**2 < _CLEARANCE**2
_DISC: _Int = (_REACH[:, None] * _GRID + _REACH)[_NEAR]  # from a cell to those within the clearance
_INSIDE = slice(_MARGIN + 4, _GRID - _MARGIN - 4)


class Block(NamedTuple):
    """Images (n, 32, 32), labels (n,), and the dashes of the two long paths in pixels (n, 2, dashes, 2 ends, 2)."""

    images: _Bytes
    labels: _Bytes
    paths: NDArray[np.float64]


def prepare(writer: SetWriter, job: Job) -> None:
    """Draw the set, or read the official folder."""
    options = job.options
    if options["difficulty"] not in DIFFICULTIES:
        raise UsageError(f"the difficulty must be one of {', '.join(DIFFICULTIES)}, got {options['difficulty']!r}")
    writer.facts.update(PIXELS, height=SIDE, width=SIDE)
    pieces = _read(job.given, options) if job.given else _draw_all(options, job.workers, job.on_step)
    for split, images, labels in pieces:
        writer.append(split, "tokens", images.reshape(len(images), -1))
        writer.append(split, "labels", labels)


def draw(seed: int, number: int, difficulty: str = "hard") -> Block:
    """Block ``number`` of a seed: 256 pictures, of which those in even places are connected."""
    dashes, _ = DIFFICULTIES[difficulty]
    stream = Stream(seed, number)
    occupied, paths = _long_paths(stream, dashes)
    distractors = _distractors(stream, dashes // 3, occupied)
    labels = 1 - np.arange(PICTURES_PER_BLOCK) % 2
    one = stream.below(2, PICTURES_PER_BLOCK)
    other = np.where(labels == 1, one, 1 - one)
    rows = np.arange(PICTURES_PER_BLOCK)
    dots = np.stack([paths[rows, one, 0, 0], paths[rows, other, -1, 1]], 1)  # (n, 2, 2)
    return Block(_render(paths, distractors, dots), labels.astype(np.uint8), paths / _UNIT)


def _draw_all(options: Mapping[str, Any], workers: int, on_step: OnStep) -> Iterator[tuple[str, _Bytes, _Bytes]]:
    splits = np.repeat(SPLITS, [options[split] for split in SPLITS])
    done = 0
    with closing(in_order(partial(draw, options["seed"], difficulty=options["difficulty"]), workers)) as blocks:
        while done < len(splits):
            block = next(blocks)
            here = splits[done : done + PICTURES_PER_BLOCK]
            for split in SPLITS:
                mine = np.flatnonzero(here == split)
                if len(mine):
                    yield split, block.images[mine], block.labels[mine]
            done += len(here)
            on_step(done, len(splits))


def _long_paths(stream: Stream, dashes: int) -> tuple[_Bool, _Int]:
    """Two paths for every picture, whose first ends are the published seed distance apart.

    Returns:
        What they occupy (n, cells) and the paths (n, 2, dashes, 2, 2). Most walks get stuck; those that do not fill the
        block in their order.
    """
    occupied, paths, count = [], [], 0
    while count < PICTURES_PER_BLOCK:
        grid = np.repeat(_empty(), _WALKS_AT_ONCE, 0)
        starts = stream.below(SIDE * _UNIT - 2 * _PADDING, 2 * _WALKS_AT_ONCE).reshape(-1, 2) + _PADDING
        rows, firsts = _walk(stream, dashes, grid, starts)
        grid, firsts = np.repeat(grid[rows], _SECONDS_TRIED, 0), np.repeat(firsts, _SECONDS_TRIED, 0)
        turns = stream.below(_TURNS, len(firsts))
        rows, seconds = _walk(stream, dashes, grid, firsts[:, 0, 0] + _SEED_DISTANCE * _COMPASS[turns])
        _, chosen = np.unique(rows // _SECONDS_TRIED, return_index=True)  # one second path for each first one
        occupied.append(grid[rows[chosen]])
        paths.append(np.stack([firsts[rows[chosen]], seconds[chosen]], 1))
        count += len(chosen)
    return np.concatenate(occupied)[:PICTURES_PER_BLOCK], np.concatenate(paths)[:PICTURES_PER_BLOCK]


def _distractors(stream: Stream, dashes: int, occupied: _Bool) -> list[tuple[_Int, _Int]]:
    """Short paths, as many as make 20 dashes: the pictures that found room for one, and the paths there."""
    found = []
    for _ in range(_DASHES_OF_DISTRACTORS // dashes):
        grid = occupied.copy()
        starts = stream.below(SIDE * _UNIT - 2 * _PADDING, 2 * len(grid)).reshape(-1, 2) + _PADDING
        rows, paths = _walk(stream, dashes, grid, starts)
        occupied[rows] = grid[rows]
        found.append((rows, paths))
    return found


def _walk(stream: Stream, dashes: int, occupied: _Bool, starts: _Int) -> tuple[_Int, _Int]:
    """Paths from all starts at once, each of which keeps clear of what its row has occupied, and of itself.

    Args:
        stream: of the random numbers.
        dashes: of a path.
        occupied: (n, cells); gets the paths that did not get stuck. Other rows are undefined afterwards.
        starts: (n, 2).

    Returns:
        The rows (m,) of those that did not get stuck, and their paths (m, dashes, 2 ends, 2).
    """
    rows, at, turn = np.arange(len(starts)), starts, stream.below(_TURNS, len(starts))
    path = np.zeros((len(starts), dashes, 2, 2), np.int64)
    before: _Int | None = None  # the cells of the dash before; next to the new one, so not occupied yet
    for number in range(dashes):
        bends = stream.below(2 * _BEND + 1, len(rows) * _BENDS_TRIED).reshape(-1, _BENDS_TRIED) - _BEND
        turns = (turn[:, None] + bends) % _TURNS
        begins = at[:, None] + (_GAP if number else 0) * _COMPASS[turns]  # (m, tries, 2)
        ends = begins + _DASH * _COMPASS[turns]
        cells = np.stack([_cell(begins), _cell((begins + ends) // 2), _cell(ends)], -1)  # (m, tries, 3)
        is_free: _Bool = np.logical_not(np.any(occupied[rows[:, None, None], cells], axis=-1))
        goes_on = np.flatnonzero(is_free.any(1))
        choice = is_free[goes_on].argmax(1)
        rows, path, turn, at = rows[goes_on], path[goes_on], turns[goes_on, choice], ends[goes_on, choice]
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
    """Take what is too near to the cells (m, 3) of a dash; only cells that were free have come here."""
    occupied[rows[:, None, None], cells[:, :, None] + _DISC] = True


@cache
def _empty() -> _Bool:
    grid = np.ones((_GRID, _GRID), np.bool_)
    grid[_INSIDE, _INSIDE] = False
    return grid.reshape(1, -1)


def _render(paths: _Int, distractors: list[tuple[_Int, _Int]], dots: _Int) -> _Bytes:
    """The images; the brighter of two things in one pixel stays."""
    places, border = np.arange(len(paths)), _STAMP
    canvas = np.zeros((len(paths), SIDE + 2 * border, SIDE + 2 * border), np.uint8)
    for rows, lines in ((places, paths), *distractors):
        _stamp(canvas, np.repeat(rows, lines[0].size // 4), lines.reshape(-1, 2, 2), _dash_stamps())
    _stamp(canvas, np.repeat(places, 2), np.repeat(dots.reshape(-1, 1, 2), 2, 1), _dot_stamps())
    return canvas[:, border:-border, border:-border]


def _stamp(canvas: _Bytes, rows: _Int, segments: _Int, stamps: _Bytes) -> None:
    """Draw the stamp of every segment (m, 2 ends, 2) onto the canvas of its row, around its middle."""
    middle = segments.sum(1) // 2
    corner, rest = middle // _UNIT - _STAMP // 2 + _STAMP, middle % _UNIT // _RENDERED
    ink = stamps[_direction(segments[:, 1] - segments[:, 0]) % len(stamps), rest[:, 0], rest[:, 1]]
    reach = np.arange(_STAMP)
    y, x = corner[:, 0, None, None] + reach[:, None], corner[:, 1, None, None] + reach
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
    """What each step (k, 2) colours, by the place of its middle within a pixel: (k, 8, 8, 6, 6).

    The points within ``radius`` of the segment, smoothed by counting samples within each pixel.
    """
    spacing = _UNIT // _OVERSAMPLING
    samples = np.arange(_STAMP * _OVERSAMPLING) * spacing + spacing // 2 - _STAMP // 2 * _UNIT
    places = np.arange(0, _UNIT, _RENDERED) + _RENDERED // 2
    shape = (len(steps), len(places), len(places), len(samples), len(samples))
    starts = -(steps // 2)
    offset = [  # of each sample from the segment's start, along both axes
        np.broadcast_to(samples[:, None] - places[:, None, None, None] - starts[:, 0, None, None, None, None], shape),
        np.broadcast_to(samples - places[:, None, None] - starts[:, 1, None, None, None, None], shape),
    ]
    along = [steps[:, axis, None, None, None, None] for axis in (0, 1)]
    length = np.maximum(along[0] ** 2 + along[1] ** 2, 1)
    # The nearest point of the segment, at a whole number of 1/64 of its length.
    place = np.clip((offset[0] * along[0] + offset[1] * along[1]) * _UNIT // length, 0, _UNIT)
    distance = sum((offset[axis] * _UNIT - along[axis] * place) ** 2 for axis in (0, 1))
    inside = distance <= (radius * _UNIT) ** 2
    parts = (*shape[:3], _STAMP, _OVERSAMPLING, _STAMP, _OVERSAMPLING)
    return (inside.reshape(parts).sum((4, 6)) * level // _OVERSAMPLING**2).astype(np.uint8)


def _read(source: Source, options: Mapping[str, Any]) -> Iterator[tuple[str, _Bytes, _Bytes]]:
    """The official folder: lines "folder file number label ..." in metadata/*.npy, which are text; 80/10/10."""
    _, folder = DIFFICULTIES[options["difficulty"]]
    labels: dict[str, int] = {}
    images: dict[str, _Bytes] = {}
    is_empty: set[str] = set()
    # Not from pathfinder64/ and the like, which the release holds under the same names.
    for file in source.files(rf"(?:pathfinder32/|^){folder}/(?:metadata/\d+\.npy|(imgs/\d+/\w+\.png))"):
        if file.match[1] is None:
            labels.update(_metadata(file.read(), file.where))
        elif data := file.read():
            images[file.match[1]] = read_png(data, file.where)
        else:
            is_empty.add(file.match[1])  # the release has an empty image, which LRA leaves out too
    if not labels:
        fail(str(source.path), f"no {folder}/metadata/*.npy found")
    names = sorted(labels.keys() - is_empty, key=lambda name: [*map(int, re.findall(r"\d+", name))])
    for name in names:
        if name not in images:
            fail(str(source.path), f"{folder}/{name} is in the metadata but not found")
    tenth = len(names) // 10
    if not tenth:
        fail(str(source.path), f"{len(names)} images are too few for three splits")
    parts = np.split(permutation(len(names), options["seed"]), [-2 * tenth, -tenth])
    for split, places in zip(SPLITS, parts, strict=True):
        chosen = [names[place] for place in np.sort(places)]
        yield split, np.stack([images[name] for name in chosen]), np.array([labels[n] for n in chosen], np.uint8)


def _metadata(data: bytes, where: str) -> dict[str, int]:
    labels = {}
    for number, line in enumerate(data.splitlines(), 1):
        columns = line.split()
        if len(columns) < 4:
            fail(f"{where}, line {number}", f"{len(columns)} columns instead of at least 4")
        if columns[3] not in (b"0", b"1"):
            fail(f"{where}, line {number}", f"the label must be 0 or 1, got {columns[3][:20]!r}")
        labels[f"{columns[0].decode('latin-1')}/{columns[1].decode('latin-1')}"] = int(columns[3])
    return labels


def read_png(data: bytes, where: str) -> _Bytes:
    """The pixels (32, 32) of a grey PNG; any other image is refused before it is decoded."""
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise UsageError("reading PNG images needs Pillow: pip install 'mgk[data]'") from None
    try:
        Image.open(io.BytesIO(data), formats=["PNG"]).verify()  # the checksums, which decoding leaves out
        image = Image.open(io.BytesIO(data), formats=["PNG"])
        pixels = np.array(image) if (image.size, image.mode) == ((SIDE, SIDE), "L") else None
    except Exception:  # Pillow has no common class for what a corrupt file raises
        fail(where, "this is not a PNG image, or it is corrupt or truncated")
    if pixels is None:
        kind = f"{image.width} x {image.height} pixels of mode {image.mode}"
        fail(where, f"an image of {kind} instead of {SIDE} x {SIDE} of mode L (grey)")
    return pixels
