import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from official_layouts import pack, png, write_pathfinder

from mgk.data import DataError, UsageError, load, prepare
from mgk.data.pathfinder import (
    _COMPASS,
    _DASH,
    DIFFICULTIES,
    IMAGES_PER_BLOCK,
    SIDE,
    _dash_stamps,
    _direction,
    _dot_stamps,
    draw,
    read_png,
)

# Of the first block of seed 0: what any machine must draw.
GOLDEN = "cf981cb34faf9fab054f6e65cd7c6a8f3a9b211bee686d48cbae66707840ccf0"
FEW = {"train": 270, "validation": 10, "test": 10, "difficulty": "easy"}


def test_the_same_on_every_machine() -> None:
    block = draw(0, 0)
    assert hashlib.sha256(block.images.tobytes() + block.labels.tobytes()).hexdigest() == GOLDEN


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
@pytest.mark.parametrize("seed", [3, 2**40])
def test_images_are_what_the_description_says(difficulty: str, seed: int) -> None:
    block = draw(seed, 1, difficulty)
    count = IMAGES_PER_BLOCK
    assert block.images.shape == (count, SIDE, SIDE)
    assert block.labels.tolist() == [1, 0] * (count // 2)
    assert block.paths.shape == (count, 2, DIFFICULTIES[difficulty][0], 2, 2)

    starts, ends = block.paths[..., 0, :], block.paths[..., 1, :]
    steps = ends - starts
    lengths = np.linalg.norm(steps, axis=-1)
    assert np.abs(lengths - 2).max() < 0.05
    assert np.abs(np.linalg.norm(starts[..., 1:, :] - ends[..., :-1, :], axis=-1) - 1).max() < 0.05
    cosines = (steps[..., 1:, :] * steps[..., :-1, :]).sum(-1) / lengths[..., 1:] / lengths[..., :-1]
    assert cosines.min() > np.cos(np.pi / 4) - 0.03
    assert block.paths.min() >= 1
    assert block.paths.max() <= SIDE - 1
    assert (np.abs(np.linalg.norm(starts[:, 0, 0] - starts[:, 1, 0], axis=-1) - 7) < 0.2).all()

    first, second = (block.paths[:, path].reshape(count, -1, 2) for path in (0, 1))
    assert np.linalg.norm(first[:, :, None] - second[:, None], axis=-1).min() >= 1.5
    own = np.linalg.norm(block.paths[:, :, :, 1][:, :, :, None] - block.paths[:, :, :, 1][:, :, None], axis=-1)
    apart = np.abs(np.subtract.outer(*[np.arange(steps.shape[2])] * 2)) > 1
    assert own[:, :, apart].min() >= 1.5  # a path keeps clear of itself

    tips = np.stack([starts[:, :, 0], ends[:, :, -1]], 2)  # (image, path, end, 2)
    for image, label, ends_of in zip(block.images, block.labels, tips, strict=True):
        bright = np.argwhere(image == 255) + 0.5
        chosen = (np.linalg.norm(bright - ends_of[:, :, None], axis=-1).min(2) < 1).sum(1).tolist()
        assert (2 in chosen) if label else (0 not in chosen)


def test_every_direction_has_its_own_stamp() -> None:
    assert _direction(_DASH * _COMPASS).tolist() == list(range(len(_COMPASS)))
    stamps = np.unique(_dash_stamps().reshape(len(_COMPASS), -1), axis=0)
    assert len(stamps) == len(_COMPASS) // 2  # there and back look the same


def test_what_a_dash_and_a_dot_colour() -> None:
    """A dash of 2 x 0.75 pixels of the published contrast, with round ends, and a dot of radius 1.5."""
    dashes, dots = _dash_stamps().astype(float), _dot_stamps().astype(float)
    assert dashes.max() <= 0.75 * 255
    assert np.allclose(dashes.sum((-2, -1)) / 191, 2 * 0.75 + np.pi * 0.375**2, rtol=0.15)
    assert np.allclose(dots.sum((-2, -1)) / 255, np.pi * 1.5**2, rtol=0.05)
    assert dots.max() == 255


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_paths_are_drawn_where_they_are(difficulty: str) -> None:
    """By distances: what lies on a dash is bright; what is away from all paths is a dot's, a distractor's or dark."""
    block = draw(5, 0, difficulty)
    centres = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij"), -1).reshape(-1, 1, 2) + 0.5
    away = 0
    for image, paths in zip(block.images[:20], block.paths[:20], strict=True):
        starts, ends = paths.reshape(-1, 2, 2)[:, 0], paths.reshape(-1, 2, 2)[:, 1]
        along = ((centres - starts) * (ends - starts)).sum(-1) / ((ends - starts) ** 2).sum(-1)
        nearest = starts + np.clip(along, 0, 1)[..., None] * (ends - starts)
        distance = np.linalg.norm(centres - nearest, axis=-1).min(1).reshape(SIDE, SIDE)
        assert image[distance < 0.2].min() > 60
        away += int((image[distance > 1.3] > 0).sum())
    assert away < 20 * (
        20 * 9 + 2 * 14
    )  # 20 dashes of distractors and 2 dots an image, with the pixels each colours


def test_more_seeds_and_blocks_give_other_images() -> None:
    images = [draw(seed, number, "easy").images.tobytes() for seed in (0, 1) for number in (0, 1)]
    assert len(set(images)) == 4


def test_generated_set_is_balanced_and_the_same_for_any_workers(tmp_path: Path) -> None:
    one = prepare("pathfinder", out=tmp_path / "one", options=FEW)
    two = prepare("pathfinder", out=tmp_path / "two", options=FEW, workers=2)
    assert one.manifest.files == two.manifest.files
    for split, count in (("train", 270), ("validation", 10), ("test", 10)):
        data = load("pathfinder", split, folder=tmp_path / "one")
        assert len(data) == count
        assert sum(int(data[i]["labels"]) for i in range(count)) == count // 2
        assert data[0]["input_ids"].shape == (1024,)
    with pytest.raises(
        UsageError, match="the difficulty must be one of easy, intermediate, hard, got 'harder'"
    ):
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
            image(png(np.zeros((31, 32), np.uint8))),
            "sample_2.png: an image of 32 x 31 pixels of mode L instead of 32 x 32 of mode L (grey)",
        ),
        (
            image(png(np.zeros((32, 32, 3), np.uint8))),
            "sample_2.png: an image of 32 x 32 pixels of mode RGB instead of",
        ),
        (
            image(png(np.zeros((32, 32), np.uint8))[:50]),
            "sample_2.png: this is not a PNG image, or it is corrupt or truncated",
        ),
        (image(b"GIF89a"), "sample_2.png: this is not a PNG image"),
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
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def test_all_filters_of_png() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32), np.uint8)
    assert read_png(filtered_png(pixels), "image").tolist() == pixels.tolist()
    assert read_png(png(pixels), "image").tolist() == pixels.tolist()


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 700), value=st.integers(0, 255), cut=st.booleans())
def test_any_corruption_of_a_png_is_refused_or_harmless(position: int, value: int, cut: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32), np.uint8)
    data = bytearray(filtered_png(pixels))
    data[position] = value
    try:
        read = read_png(bytes(data[:position] if cut else data), "image")
    except DataError:
        return
    assert read.tolist() == pixels.tolist()


def test_a_png_that_announces_a_huge_image_is_refused_before_it_is_decoded() -> None:
    header = b"IHDR" + struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 0, 0, 0, 0)
    body = b"IDAT" + zlib.compress(bytes(10**7))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in (header, body, b"IEND")
    )
    with pytest.raises(DataError, match="image: "):
        read_png(data, "image")
