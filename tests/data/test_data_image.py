import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from official_layouts import (
    cifar_images,
    cifar_pickle,
    idx,
    pack,
    write_cifar_binary,
    write_cifar_python,
    write_mnist,
)

from mgk.data import DataError, UsageError, load, prepare
from mgk.data.cifar_pickle import read_batch
from mgk.data.image import grey

FIVE = {"validation": 5}


def test_both_layouts_of_cifar_give_the_same_set(tmp_path: Path) -> None:
    binary = prepare("image", write_cifar_binary(tmp_path), out=tmp_path / "a", options=FIVE)
    python = prepare("image", write_cifar_python(tmp_path), out=tmp_path / "b", options=FIVE)
    archive = pack(tmp_path / "cifar-10-batches-py", tmp_path / "cifar.tar.gz")
    packed = prepare("image", archive, out=tmp_path / "c", options=FIVE)
    names = [name for name in binary.manifest.files if name != "sources.json"]
    assert len(names) == 9
    for name in names:
        assert binary.manifest.files[name] == python.manifest.files[name] == packed.manifest.files[name]
    assert [binary.manifest.examples(split) for split in ("train", "validation", "test")] == [15, 5, 4]
    pixels, labels = cifar_images(4, 5)
    data = load("image", "test", folder=tmp_path / "a")
    colour = load("image", "test", folder=tmp_path / "a", colour=True)
    for place in range(4):
        planes = pixels[place].reshape(3, 32, 32)
        assert int(data[place]["labels"]) == labels[place]
        assert data[place]["input_ids"].shape == (1024,)
        expected = grey(planes.transpose(1, 2, 0)).reshape(-1)
        assert data[place]["input_ids"].tolist() == expected.tolist()
        assert (colour[place]["pixel_values"].numpy() * 255).round().astype(int).tolist() == planes.tolist()


def test_lists_of_more_than_a_thousand_come_in_pieces() -> None:
    images, labels = cifar_images(2500)
    pixels, read = read_batch(cifar_pickle(images, labels), "batch")
    assert read.tolist() == labels.tolist()
    assert (pixels == images).all()


def test_grey_is_the_published_formula() -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (1000, 3), np.uint8)
    weighted = images.astype(np.float64) / 255 @ np.array([0.2989, 0.5870, 0.1140])
    assert grey(images).tolist() == np.floor(weighted * 255.5).astype(int).tolist()
    assert grey(np.array([[255, 255, 255], [0, 0, 0]], np.uint8)).tolist() == [255, 0]


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    source = write_cifar_python(tmp_path)
    (source / "data_batch_2").write_bytes(pickle.dumps({"data": Malicious(tmp_path / "harm")}, protocol))
    with pytest.raises(DataError, match=r"data_batch_2: .*(has no place in|is not) a batch of CIFAR-10"):
        prepare("image", source, out=tmp_path / "out")
    assert not (tmp_path / "harm").exists()


def test_names_that_are_allowed_call_nothing_either(tmp_path: Path) -> None:
    """dtype and ndarray only ever stand for themselves: hostile arguments of theirs are not acted on."""
    good = cifar_pickle(*cifar_images(2))
    for old, new in ((b"cnumpy\ndtype\n", b"cposix\nsystem\n"), (b"cnumpy\nndarray\n", b"cbuiltins\neval\n")):
        with pytest.raises(DataError, match=r"byte \d+: the instruction 'GLOBAL"):
            read_batch(good.replace(old, new), "batch")
    with pytest.raises(DataError, match="'data' is not of bytes"):
        read_batch(cifar_pickle(*cifar_images(2), dtype=b"O8"), "batch")


def test_a_pickle_cannot_exhaust_memory_or_stack() -> None:
    images, labels = cifar_images(2)
    good = cifar_pickle(images, labels)
    content = b"T" + len(images.tobytes()).to_bytes(4, "little") + images.tobytes()
    with pytest.raises(DataError, match="'data' has no content"):
        read_batch(good.replace(content, b"J\xff\xff\xff\x7f"), "batch")
    assert b"}q\x01(" in good
    with pytest.raises(DataError, match="the instruction 'LONG_BINPUT 2147483647' has no place in"):
        read_batch(good.replace(b"}q\x01(", b"}r\xff\xff\xff\x7f("), "batch")  # a memo of that length
    nest = b"]q\x05(" + b")" + 100_000 * b"\x85" + b"K\x01e"
    start = good.index(b"]q\x05(")
    end = start + 4 + 2 * len(labels)
    with pytest.raises(DataError, match="the label of image 0 must be from 0 to 9, got tuple"):
        read_batch(good[:start] + nest + good[end + 1 :], "batch")


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # of an opcode that is refused once it is parsed
@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 400), value=st.integers(0, 255), cut=st.booleans())
def test_any_corruption_of_a_pickle_is_refused_or_read(position: int, value: int, cut: bool) -> None:
    data = bytearray(cifar_pickle(*cifar_images(2)))
    data[position] = value
    try:
        pixels, labels = read_batch(bytes(data[:position] if cut else data), "batch")
    except DataError:
        return
    assert pixels.shape == (len(labels), 3072)
    assert set(labels.tolist()) <= set(range(10))


def edit(name: str, change):
    def act(folder: Path) -> None:
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return act


def change_byte(position: int, value: int):
    return lambda data: data[:position] + bytes([value]) + data[position + 1 :]


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (
            edit("test_batch.bin", lambda data: data[:-1]),
            "test_batch.bin: the image at byte 9219 is not of 32 x 32 x 3",
        ),
        (edit("test_batch.bin", lambda data: b""), "test_batch.bin: the image at byte 0 is not of 32 x 32 x 3"),
        (
            edit("data_batch_3.bin", change_byte(2 * 3073, 10)),
            "data_batch_3.bin: byte 6146: the label must be from 0 to 9",
        ),
        (lambda folder: (folder / "data_batch_4.bin").unlink(), "data_batch_4 not found"),
    ],
)
def test_bad_binary_batches(tmp_path: Path, act, reason: str) -> None:
    source = write_cifar_binary(tmp_path)
    act(source)
    check(tmp_path, "image", source, reason)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (
            cifar_pickle(cifar_images(2)[0], np.array([3, 11], np.uint8)),
            "the label of image 1 must be from 0 to 9, got 11",
        ),
        (
            cifar_pickle(cifar_images(2)[0][:, :3000], np.array([3, 1])),
            "images of shape (3000,) instead of (3072,)",
        ),
        (cifar_pickle(cifar_images(2)[0], np.array([3])), "2 images, but not as many labels"),
        (cifar_pickle(*cifar_images(2))[:500], "not a batch of CIFAR-10 in the Python layout"),
        (b"", "not a batch of CIFAR-10 in the Python layout"),
    ],
)
def test_bad_python_batches(tmp_path: Path, batch: bytes, reason: str) -> None:
    source = write_cifar_python(tmp_path)
    (source / "data_batch_2").write_bytes(batch)
    check(tmp_path, "image", source, reason)


@pytest.mark.parametrize("packed", [False, True])
def test_idx_files(tmp_path: Path, packed: bool) -> None:
    import gzip

    source = write_mnist(tmp_path)
    if packed:
        for path in list(source.iterdir()):
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    ready = prepare("mnist", source, out=tmp_path / "out", options={"validation": 2})
    assert [ready.manifest.examples(split) for split in ("train", "validation", "test")] == [8, 2, 4]
    data = load("mnist", "validation", folder=tmp_path / "out")
    assert int(data[1]["labels"]) == 9
    assert data[0]["input_ids"].tolist() == [(8 * 784 + pixel) % 256 for pixel in range(784)]
    with pytest.raises(UsageError, match="mnist has no colour"):
        load("mnist", "train", folder=tmp_path / "out", colour=True)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "train-images-idx3-ubyte",
            idx(np.zeros((10, 27, 28))),
            "byte 8: images of 27 x 28 pixels instead of 28 x 28",
        ),
        ("train-images-idx3-ubyte", idx(np.zeros((10, 28, 28)))[:-5], "7851 bytes instead of the 7856"),
        (
            "t10k-labels-idx1-ubyte",
            idx(np.array([1, 2, 77, 1])),
            "t10k-labels-idx1-ubyte: byte 10: the label must be",
        ),
        ("t10k-labels-idx1-ubyte", idx(np.zeros(3)), "4 images but 3 labels in the files t10k-*"),
        ("t10k-images-idx3-ubyte", b"GIF89a" * 9, "byte 0: this is not an IDX file of images"),
        ("t10k-images-idx3-ubyte", b"", "byte 0: this is not an IDX file of images"),
    ],
)
def test_bad_idx_files(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    source = write_mnist(tmp_path)
    (source / name).write_bytes(content)
    check(tmp_path, "fashion-mnist", source, reason)


def test_missing_files(tmp_path: Path) -> None:
    source = write_mnist(tmp_path)
    (source / "t10k-labels-idx1-ubyte").unlink()
    check(tmp_path, "mnist", source, "t10k-labels not found")
    empty = tmp_path / "empty"
    empty.mkdir()
    check(tmp_path, "mnist", empty, "train-images, train-labels, t10k-images, t10k-labels not found")


def test_images_of_another_set(tmp_path: Path) -> None:
    check(tmp_path, "image", write_mnist(tmp_path), "data_batch_1, data_batch_2, data_batch_3, data_batch_4")


def check(tmp_path: Path, task: str, source: Path, reason: str) -> None:
    with pytest.raises(DataError) as error:
        prepare(task, source, out=tmp_path / "out", options={"validation": 1})
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert list((tmp_path / "out" / task).iterdir()) == []
