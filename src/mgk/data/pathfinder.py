"""Pathfinder-32: 32 x 32 pictures of dashed paths with two dots; label 1: one path joins them.

Read from the official folder of Long Range Arena, or drawn here after the published description (Kim 2020, and the
settings that LRA used): two paths of equal length that bend gently and touch nothing, shorter paths that distract, and
two dots at the ends of one path (label 1) or at one end of each (label 0). Both labels are equally frequent.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mgk.data.errors import UsageError, fail
from mgk.data.image import PIXELS
from mgk.data.job import Job, OnStep
from mgk.data.parallel import in_order
from mgk.data.png import read_png
from mgk.data.random_bits import Stream, permutation
from mgk.data.sources import Source
from mgk.data.writer import SetWriter

SIDE = 32
# Dashes of the two long paths; the official folder of the same difficulty.
DIFFICULTIES = {
    "easy": (6, "curv_baseline"),
    "intermediate": (9, "curv_contour_length_9"),
    "hard": (14, "curv_contour_length_14"),
}

_Int = NDArray[np.int64]
_IMAGES_PER_BLOCK = 64
# All coordinates are whole numbers of 1/64 pixel: no rounding of floating point can make two machines differ.
_UNIT = 64
_DASH, _GAP, _SEED_DISTANCE = 2, 1, 7  # in pixels
_TURNS = 64  # directions of the circle
_ANGLES = np.arange(_TURNS) * (2 * np.pi / _TURNS)
_COMPASS = [(round(_UNIT * y), round(_UNIT * x)) for y, x in zip(np.cos(_ANGLES), np.sin(_ANGLES), strict=True)]
_BEND = 8  # a dash turns by at most this many directions: 45 degrees
_TRIES = 24
_PADDING = 2 * _UNIT
_DISTRACTOR, _DISTRACTORS = 4, 5
_HALF_WIDTH, _DOT_RADIUS = 3 * _UNIT // 8, 3 * _UNIT // 2
_DASH_LEVEL, _DOT_LEVEL = 191, 255
_OVERSAMPLING = 4
# What is taken is kept in cells of half a pixel, with a margin that a dash outside of the image still falls into.
_MARGIN = 24
_GRID = 2 * SIDE + 2 * _MARGIN
_CLEARANCE = 4  # cells: two pixels between the dashes of different paths, and of one path that comes back
# The rows of a disc of that radius: where each starts, from the middle, and its cells.
_DISC = [
    (y * _GRID - half, bytes([1]) * (2 * half + 1))
    for y in range(-_CLEARANCE + 1, _CLEARANCE)
    for half in [isqrt(_CLEARANCE**2 - 1 - y * y)]
]
_INSIDE = range(_MARGIN + 4, _GRID - _MARGIN - 4)
_EMPTY = bytes(int(y not in _INSIDE or x not in _INSIDE) for y in range(_GRID) for x in range(_GRID))

_Point = tuple[int, int]
_Dash = tuple[_Point, _Point]
_Path = list[_Dash]


class Picture(NamedTuple):
    """An image (32, 32), its label and the dashes of its two long paths, in pixels: (2, dashes, 2 ends, 2)."""

    image: NDArray[np.uint8]
    label: int
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


def draw(seed: int, number: int, difficulty: str = "hard") -> Picture:
    """Picture ``number`` of a seed; even numbers are connected."""
    label = 1 - number % 2
    dashes, _ = DIFFICULTIES[difficulty]
    stream = Stream(seed, number)
    found = None
    while found is None:
        found = _long_paths(stream, dashes)
    paths, occupied = found
    others = [_walk(stream, _DISTRACTOR, occupied, None) for _ in range(_DISTRACTORS)]
    one = int(stream.below(2, 1)[0])
    other = one if label else 1 - one
    dots = np.array([paths[one][0][0], paths[other][-1][1]])
    drawn = np.array([dash for path in (*paths, *others) if path is not None for dash in path])
    return Picture(_render(drawn, dots), label, np.array(paths) / _UNIT)


def _draw_all(
    options: Mapping[str, Any], workers: int, on_step: OnStep
) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.uint8]]]:
    sizes = [(split, options[split]) for split in ("train", "validation", "test")]
    total, done = sum(size for _, size in sizes), 0
    splits = np.repeat([split for split, _ in sizes], [size for _, size in sizes])
    with closing(in_order(partial(_draw_block, options["seed"], options["difficulty"]), workers)) as blocks:
        while done < total:
            images, labels = next(blocks)
            here = splits[done : done + len(images)]
            for split, _ in sizes:
                mine = np.flatnonzero(here == split)
                if len(mine):
                    yield split, images[mine], labels[mine]
            done += len(here)
            on_step(done, total)


def _draw_block(seed: int, difficulty: str, number: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    first = number * _IMAGES_PER_BLOCK
    pictures = [draw(seed, first + place, difficulty) for place in range(_IMAGES_PER_BLOCK)]
    return np.stack([picture.image for picture in pictures]), np.array([p.label for p in pictures], np.uint8)


def _long_paths(stream: Stream, dashes: int) -> tuple[list[_Path], bytearray] | None:
    """Two paths whose first ends are near each other, as the published seed distance has them; what they occupy."""
    occupied = bytearray(_EMPTY)
    first = _walk(stream, dashes, occupied, None)
    if first is None:
        return None
    for _ in range(_TRIES):  # most second paths get stuck, and a first one is dear
        second = _walk(stream, dashes, occupied, first[0][0])
        if second is not None:
            return [first, second], occupied
    return None


def _walk(stream: Stream, dashes: int, occupied: bytearray, near: _Point | None) -> _Path | None:
    """A path that keeps clear of what is occupied and of itself, and occupies it then; None where it gets stuck."""
    own = bytearray(occupied)
    path: _Path = []
    bends = stream.below(2 * _BEND + 1, dashes * _TRIES).tolist()
    turn = int(stream.below(_TURNS, 1)[0])
    at = _start(stream, near)
    for number in range(dashes):
        for bend in bends[number * _TRIES : (number + 1) * _TRIES]:
            new_turn = (turn + bend - _BEND) % _TURNS
            down, right = _COMPASS[new_turn]
            start = (at[0] + _GAP * down, at[1] + _GAP * right) if path else at
            dash = (start, (start[0] + _DASH * down, start[1] + _DASH * right))
            if not any(own[cell] for cell in _cells(dash)):
                break
        else:
            return None
        if path:  # the dash before is next to the new one by design; all older ones are obstacles
            _occupy(own, path[-1])
        path.append(dash)
        turn, at = new_turn, dash[1]
    for dash in path:
        _occupy(occupied, dash)
    return path


def _start(stream: Stream, near: _Point | None) -> _Point:
    if near is None:
        down, right = (stream.below(SIDE * _UNIT - 2 * _PADDING, 2) + _PADDING).tolist()
        return down, right
    down, right = _COMPASS[int(stream.below(_TURNS, 1)[0])]
    return near[0] + _SEED_DISTANCE * down, near[1] + _SEED_DISTANCE * right


def _cells(dash: _Dash) -> tuple[int, int, int]:
    """The cells of both ends and of the middle."""
    (y0, x0), (y1, x1) = dash
    return _cell(y0, x0), _cell((y0 + y1) // 2, (x0 + x1) // 2), _cell(y1, x1)


def _cell(y: int, x: int) -> int:
    return (2 * y // _UNIT + _MARGIN) * _GRID + 2 * x // _UNIT + _MARGIN


def _occupy(occupied: bytearray, dash: _Dash) -> None:
    for cell in _cells(dash):
        for offset, row in _DISC:
            occupied[cell + offset : cell + offset + len(row)] = row


def _render(dashes: _Int, dots: _Int) -> NDArray[np.uint8]:
    """Every dash as a line of some width, every dot as a disc, smoothed by counting samples within each pixel."""
    image = np.zeros((SIDE, SIDE), np.int64)
    _stamp(image, dashes[:, 0], dashes[:, 1], _HALF_WIDTH, _DASH_LEVEL)
    _stamp(image, dots, dots, _DOT_RADIUS, _DOT_LEVEL)
    return image.astype(np.uint8)


def _stamp(image: _Int, starts: _Int, ends: _Int, radius: int, level: int) -> None:
    """Draw the points within ``radius`` of each segment; the brighter of two things in one pixel stays."""
    window = 6
    corners = (starts + ends) // 2 // _UNIT - window // 2  # (n, 2), in pixels
    step = _UNIT // _OVERSAMPLING
    samples = np.arange(window * _OVERSAMPLING) * step + step // 2
    grid = np.stack(np.meshgrid(samples, samples, indexing="ij"), -1)  # (s, s, 2)
    offset = grid + corners[:, None, None] * _UNIT - starts[:, None, None]  # (n, s, s, 2)
    along = (ends - starts)[:, None, None]
    length = np.maximum((along**2).sum(-1), 1)
    # The nearest point of the segment, at a whole number of 1/64 of its length.
    place = np.clip((offset * along).sum(-1) * _UNIT // length, 0, _UNIT)
    inside = ((offset * _UNIT - along * place[..., None]) ** 2).sum(-1) <= (radius * _UNIT) ** 2
    cells = inside.reshape(len(starts), window, _OVERSAMPLING, window, _OVERSAMPLING).sum((2, 4))
    rows, columns = (corners[:, axis, None] + np.arange(window) for axis in (0, 1))
    values = cells * level // _OVERSAMPLING**2
    n, y, x = np.nonzero(values)
    rows, columns = rows[n, y], columns[n, x]
    seen = (rows >= 0) & (rows < SIDE) & (columns >= 0) & (columns < SIDE)
    np.maximum.at(image, (rows[seen], columns[seen]), values[n, y, x][seen])


def _read(source: Source, options: Mapping[str, Any]) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.uint8]]]:
    """The official folder: lines "folder file number label ..." in metadata/*.npy, which are text; 80/10/10."""
    _, folder = DIFFICULTIES[options["difficulty"]]
    labels: dict[str, int] = {}
    images: dict[str, NDArray[np.uint8]] = {}
    is_empty: set[str] = set()
    for file in source.files(rf"(?:pathfinder32/)?{folder}/(?:metadata/\d+\.npy|(imgs/\d+/\w+\.png))"):
        if file.match[1] is None:
            labels.update(_metadata(file.stream.read(), file.where))
        elif data := file.stream.read():
            images[file.match[1]] = read_png(data, file.where, SIDE, SIDE)
        else:
            is_empty.add(file.match[1])  # the release has an empty image, which LRA leaves out too
    if not labels:
        fail(str(source.path), f"no {folder}/metadata/*.npy found")
    names = sorted(labels.keys() - is_empty, key=_by_number)
    for name in names:
        if name not in images:
            fail(str(source.path), f"{folder}/{name} is in the metadata but not found")
    order = permutation(len(names), options["seed"])
    tenth = len(names) // 10
    parts = {"train": order[: len(names) - 2 * tenth], "validation": order[-2 * tenth : -tenth], "test": order[-tenth:]}
    if not tenth:
        fail(str(source.path), f"{len(names)} images are too few for three splits")
    for split, places in parts.items():
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


def _by_number(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in "".join(c if c.isdigit() else " " for c in name).split())
