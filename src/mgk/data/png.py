"""Reads and writes PNG images of 8 bits, grey: all that Pathfinder needs, without an imaging library."""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from mgk.data.errors import fail

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEADER = struct.Struct(">IIBBBBB")
_GREY = 0


def read_png(data: bytes, where: str, height: int, width: int) -> NDArray[np.uint8]:
    """The pixels (height, width); any other size or kind of image is refused."""
    if not data.startswith(_SIGNATURE):
        fail(where, "byte 0: this is not a PNG image")
    header, packed, at = b"", b"", len(_SIGNATURE)
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        if zlib.crc32(kind + body) != int.from_bytes(data[at + 8 + size : at + 12 + size], "big"):
            break
        if kind == b"IHDR":
            header = body
        elif kind == b"IDAT":
            packed += body
        elif kind == b"IEND":
            return _pixels(header, packed, where, height, width)
        at += 12 + size
    return fail(where, f"byte {at}: the image is damaged or cut short")


def _pixels(header: bytes, packed: bytes, where: str, height: int, width: int) -> NDArray[np.uint8]:
    if len(header) != _HEADER.size:
        fail(where, "byte 8: the image has no header")
    wide, high, depth, colour, _, _, interlaced = _HEADER.unpack(header)
    if (high, wide) != (height, width):
        fail(where, f"byte 16: an image of {wide} x {high} pixels instead of {width} x {height}")
    if (depth, colour, interlaced) != (8, _GREY, 0):
        fail(where, "byte 24: only grey images of 8 bits, not interlaced, are read")
    try:
        rows = zlib.decompress(packed)
    except zlib.error as error:
        fail(where, f"the pixels are damaged ({error})")
    if len(rows) != height * (width + 1):
        fail(where, f"{len(rows)} bytes of pixels instead of {height * (width + 1)}")
    return _unfiltered(np.frombuffer(rows, np.uint8).reshape(height, width + 1), where)


def _unfiltered(rows: NDArray[np.uint8], where: str) -> NDArray[np.uint8]:
    """Undo the five filters of PNG: none, left, up, their average, Paeth."""
    image = rows[:, 1:].copy()
    above = np.zeros_like(image[0])
    for kind, row in zip(rows[:, 0].tolist(), image, strict=True):
        if kind == 1:
            row[:] = np.cumsum(row, dtype=np.uint8)
        elif kind == 2:
            row += above
        elif kind in (3, 4):
            row[:] = _from_neighbours(row.tolist(), above.tolist(), by_paeth=kind == 4)
        elif kind != 0:
            fail(where, f"unknown filter {kind}")
        above = row
    return image


def _from_neighbours(row: list[int], above: list[int], *, by_paeth: bool) -> list[int]:
    left = corner = 0
    for place, up in enumerate(above):
        guess = _paeth(left, up, corner) if by_paeth else (left + up) // 2
        row[place] = left = (row[place] + guess) & 0xFF
        corner = up
    return row


def _paeth(left: int, up: int, corner: int) -> int:
    estimate = left + up - corner
    distances = abs(estimate - left), abs(estimate - up), abs(estimate - corner)
    return (left, up, corner)[distances.index(min(distances))]


def write_png(image: NDArray[np.uint8]) -> bytes:
    """A grey PNG of the pixels (height, width)."""
    height, width = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image], 1).tobytes()
    header = _HEADER.pack(width, height, 8, _GREY, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
