import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from official_layouts import pack, write_pathfinder

from mgk.data import DataError, UsageError, load, prepare
from mgk.data.pathfinder import DIFFICULTIES, SIDE, draw
from mgk.data.png import read_png, write_png

# Of the first pictures of seed 0: what any machine must draw.
GOLDEN = "5eb7a2eef789cffd0280a1fddee2cd555143cd35b235ea7cbd2787035a0b96aa"
FEW = {"train": 70, "validation": 10, "test": 10, "difficulty": "easy"}


def test_the_same_on_every_machine() -> None:
    assert hashlib.sha256(b"".join(draw(0, i).image.tobytes() for i in range(8))).hexdigest() == GOLDEN


def gaps(path: np.ndarray) -> np.ndarray:
    return np.linalg.norm(path[1:, 0] - path[:-1, 1], axis=1)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_pictures_are_what_the_description_says(difficulty: str) -> None:
    for number in range(12):
        picture = draw(3, number, difficulty)
        assert picture.label == 1 - number % 2
        assert picture.image.shape == (SIDE, SIDE)
        assert picture.paths.shape == (2, DIFFICULTIES[difficulty][0], 2, 2)
        for path in picture.paths:
            lengths = np.linalg.norm(path[:, 1] - path[:, 0], axis=1)
            assert np.abs(lengths - 2).max() < 0.05
            assert np.abs(gaps(path) - 1).max() < 0.05
            steps = path[:, 1] - path[:, 0]
            cosines = (steps[1:] * steps[:-1]).sum(1) / lengths[1:] / lengths[:-1]
            assert cosines.min() > np.cos(np.pi / 4) - 0.03
        first, second = (path.reshape(-1, 2) for path in picture.paths)
        assert np.linalg.norm(first[:, None] - second, axis=-1).min() >= 1.5
        bright = np.argwhere(picture.image == 255) + 0.5
        ends = np.stack([picture.paths[:, 0, 0], picture.paths[:, -1, 1]], 1)  # (path, end, 2)
        has_dot = np.linalg.norm(bright - ends[:, :, None], axis=-1).min(2) < 1  # (path, end)
        chosen = has_dot.sum(1).tolist()
        assert (2 in chosen) if picture.label else (chosen.count(0) == 0), number


def test_generated_set_is_balanced_and_the_same_for_any_workers(tmp_path: Path) -> None:
    one = prepare("pathfinder", out=tmp_path / "one", options=FEW)
    two = prepare("pathfinder", out=tmp_path / "two", options=FEW, workers=2)
    assert one.manifest.files == two.manifest.files
    for split, count in (("train", 70), ("validation", 10), ("test", 10)):
        data = load("pathfinder", split, folder=tmp_path / "one")
        assert len(data) == count
        assert sum(int(data[i]["labels"]) for i in range(count)) == count // 2
        assert data[0]["input_ids"].shape == (1024,)
    with pytest.raises(UsageError, match="the difficulty must be one of easy, intermediate, hard, got 'harder'"):
        prepare("pathfinder", out=tmp_path / "three", options={"difficulty": "harder"})


@pytest.mark.parametrize("archive", [None, "pathfinder32.tar.gz"])
def test_official_folder(tmp_path: Path, archive: str | None) -> None:
    source = write_pathfinder(tmp_path)
    (source / "curv_contour_length_14/imgs/1/sample_3.png").write_bytes(b"")  # as in the release
    if archive is not None:
        source = pack(source, tmp_path / archive)
    ready = prepare("pathfinder", source, out=tmp_path / "out")
    assert [ready.manifest.examples(split) for split in ("train", "validation", "test")] == [17, 1, 1]
    seen = []
    for split in ("train", "validation", "test"):
        data = load("pathfinder", split, folder=tmp_path / "out")
        for place in range(len(data)):
            value = int(data[place]["input_ids"][0])
            assert int(data[place]["labels"]) == value % 2
            seen.append(value)
    assert sorted(seen) == [value for value in range(20) if value != 13]


def line(text: str):
    return lambda folder: (folder / "metadata/1.npy").write_text(f"imgs/1 sample_0.png 0 1 1.0\n{text}\n")


def image(content: bytes):
    return lambda folder: (folder / "imgs/1/sample_2.png").write_bytes(content)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (
            image(write_png(np.zeros((31, 32), np.uint8))),
            "sample_2.png: byte 16: an image of 32 x 31 pixels instead of",
        ),
        (
            image(write_png(np.zeros((32, 32), np.uint8))[:50]),
            "sample_2.png: byte 33: the image is damaged or cut short",
        ),
        (image(b"GIF89a"), "sample_2.png: byte 0: this is not a PNG image"),
        (line("imgs/1 sample_1.png"), "metadata/1.npy, line 2: 2 columns instead of at least 4"),
        (line("imgs/1 sample_1.png 1 2"), "metadata/1.npy, line 2: the label must be 0 or 1, got b'2'"),
        (line("imgs/1 sample_99.png 1 1"), "imgs/1/sample_99.png is in the metadata but not found"),
        (lambda folder: [path.unlink() for path in (folder / "metadata").iterdir()], "metadata/*.npy found"),
    ],
)
def test_bad_folders(tmp_path: Path, act, reason: str) -> None:
    source = write_pathfinder(tmp_path)
    act(source / "curv_contour_length_14")
    with pytest.raises(DataError) as error:
        prepare("pathfinder", source, out=tmp_path / "out")
    assert reason in str(error.value)
    assert list((tmp_path / "out" / "pathfinder").iterdir()) == []


def filtered_png(pixels: np.ndarray) -> bytes:
    """A PNG that uses all five filters, written after the standard's formulas."""
    rows = b""
    values = np.pad(pixels.astype(int), ((1, 0), (1, 0)))
    for y in range(1, values.shape[0]):
        kind = y % 5
        row = []
        for x in range(1, values.shape[1]):
            a, b, c = values[y, x - 1], values[y - 1, x], values[y - 1, x - 1]
            p = a + b - c
            nearest = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
            row.append((values[y, x] - [0, a, b, (a + b) // 2, nearest][kind]) % 256)
        rows += bytes([kind, *row])
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 0, 0, 0, 0)),
        (b"tEXt", b"Comment\0x"),
        (b"IDAT", zlib.compress(rows)[:20]),
        (b"IDAT", zlib.compress(rows)[20:]),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


def test_all_filters_of_png() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32), np.uint8)
    assert read_png(filtered_png(pixels), "image", 32, 32).tolist() == pixels.tolist()
    assert read_png(write_png(pixels), "image", 32, 32).tolist() == pixels.tolist()
