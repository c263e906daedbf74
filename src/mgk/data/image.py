"""Images as sequences of pixels: CIFAR-10 in its binary and Python layouts, MNIST and Fashion-MNIST as IDX files.

``tokens`` holds the grey pixels row by row, ``colour`` the CIFAR-10 images (32, 32, 3) for patches. The last training
images, in the order of the files, are the validation split: a tenth, as in Long Range Arena.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.data.cifar_pickle import read_batch
from mgk.data.errors import UsageError, fail
from mgk.data.job import Job
from mgk.data.sources import Source, SourceFile
from mgk.data.writer import SetWriter

# A pixel is its own token; images have one length, so nothing pads.
PIXELS: dict[str, Any] = {"unit": "pixel", "vocab_size": 256, "pad_id": None, "shift": 0}

_Bytes = NDArray[np.uint8]
_RECORD = 1 + 3072
_IMAGES_AT_ONCE = 1024
_CIFAR_FILE = r"(data_batch_[1-5]|test_batch)(\.bin)?"
_IDX_FILE = r"(train|t10k)-(images|labels)[-.]idx[13]-ubyte"
_CIFAR_FILES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
_IDX_IMAGES, _IDX_LABELS = 0x803, 0x801


def prepare(writer: SetWriter, job: Job) -> None:
    """Read CIFAR-10 or IDX files, whichever the source holds."""
    batches = _read(job.source)
    if not batches:
        fail(str(job.source.path), "neither batches of CIFAR-10 nor IDX files of MNIST found")
    parts = list(_split(batches, job.options["validation"]))
    side = parts[0][1].shape[1]
    if side * side != job.task.max_length:
        fail(str(job.source.path), f"images of {side} x {side} pixels, which are not those of {job.task.name}")
    writer.facts.update(PIXELS, height=side, width=side)
    for split, images, labels in parts:
        writer.append(split, "labels", labels)
        for start in range(0, len(images), _IMAGES_AT_ONCE):
            piece = images[start : start + _IMAGES_AT_ONCE]
            if piece.ndim == 4:
                writer.append(split, "colour", piece)
            pixels = grey(piece) if piece.ndim == 4 else piece
            writer.append(split, "tokens", pixels.reshape(len(piece), -1))


def grey(images: _Bytes) -> _Bytes:
    """(..., 3) -> (...): 0.2989 R + 0.5870 G + 0.1140 B, rounded as ``tf.image.rgb_to_grayscale`` does it.

    That is floor(255.5 g) for g in [0, 1]; in whole numbers, so that every machine agrees.
    """
    weighted = images.astype(np.int64) @ np.array([2989, 5870, 1140])
    return (weighted * 511 // 5_100_000).astype(np.uint8)


def _split(batches: dict[str, tuple[_Bytes, _Bytes]], validation: int) -> Iterator[tuple[str, _Bytes, _Bytes]]:
    test = [name for name in batches if name.startswith("test")]
    train = [name for name in batches if name not in test]
    images, labels = (np.concatenate([batches[name][place] for name in train]) for place in (0, 1))
    if validation >= len(images):
        raise UsageError(f"cannot hold out {validation} of {len(images)} training images")
    border = len(images) - validation
    yield "train", images[:border], labels[:border]
    if validation:
        yield "validation", images[border:], labels[border:]
    for name in test:
        yield "test", *batches[name]


def _read(source: Source) -> dict[str, tuple[_Bytes, _Bytes]]:
    """The parts of the set, in one pass over the source: the last of them is the test part."""
    cifar: dict[str, tuple[_Bytes, _Bytes]] = {}
    idx: dict[tuple[str, str], _Bytes] = {}
    for file in source.files(_CIFAR_FILE + "|" + _IDX_FILE):
        name, binary, split, kind = file.match.groups()
        if name in cifar or (split, kind) in idx:
            fail(file.where, "a second file for the same part; give the folder of one of them as the source")
        if name is None:
            idx[split, kind] = _idx_array(file)
        else:
            pixels, labels = (_binary_batch if binary else _python_batch)(file.stream.read(), file.where)
            cifar[name] = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels
    return {**_whole_cifar(source, cifar), **_whole_idx(source, idx)}


def _whole_cifar(source: Source, found: dict[str, tuple[_Bytes, _Bytes]]) -> dict[str, tuple[_Bytes, _Bytes]]:
    missing = [name for name in _CIFAR_FILES if name not in found]
    if found and missing:
        fail(str(source.path), f"{', '.join(missing)} not found")
    return {name: found[name] for name in _CIFAR_FILES if name in found}


def _binary_batch(data: bytes, where: str) -> tuple[_Bytes, _Bytes]:
    if not data or len(data) % _RECORD:
        whole = len(data) - len(data) % _RECORD
        fail(where, f"the image at byte {whole} is not of 32 x 32 x 3 pixels: {len(data) - whole} of {_RECORD} bytes")
    records = np.frombuffer(data, np.uint8).reshape(-1, _RECORD)
    _check_labels(records[:, 0], where, 0, _RECORD)
    return records[:, 1:], records[:, 0]


def _python_batch(data: bytes, where: str) -> tuple[_Bytes, _Bytes]:
    pixels, labels = read_batch(data, where)
    return pixels, np.array(labels, np.uint8)


def _whole_idx(source: Source, arrays: dict[tuple[str, str], _Bytes]) -> dict[str, tuple[_Bytes, _Bytes]]:
    if not arrays:
        return {}
    for part in (("train", "images"), ("train", "labels"), ("t10k", "images"), ("t10k", "labels")):
        if part not in arrays:
            fail(str(source.path), f"{part[0]}-{part[1]}-idx{3 if part[1] == 'images' else 1}-ubyte not found")
    for split in ("train", "t10k"):
        images, labels = len(arrays[split, "images"]), len(arrays[split, "labels"])
        if images != labels:
            fail(str(source.path), f"{images} images but {labels} labels in the files {split}-*")
    return {
        name: (arrays[split, "images"], arrays[split, "labels"])
        for name, split in (("train", "train"), ("test", "t10k"))
    }


def _idx_array(file: SourceFile) -> _Bytes:
    """Big-endian numbers: a magic one, the sizes; then the bytes."""
    data, where = file.stream.read(), file.where
    magic, dimensions = (_IDX_IMAGES, 3) if file.match[4] == "images" else (_IDX_LABELS, 1)
    start = 4 + 4 * dimensions
    header = np.frombuffer(data[:start], ">u4").tolist() if len(data) >= start else [0]
    if header[0] != magic:
        fail(where, f"byte 0: this is not an IDX file of {file.match[4]}")
    shape = header[1:]
    if dimensions == 3 and shape[1:] != [28, 28]:
        fail(where, f"byte 8: images of {shape[1]} x {shape[2]} pixels instead of 28 x 28")
    wanted = start + int(np.prod(shape))
    if len(data) != wanted:
        fail(where, f"{len(data)} bytes instead of the {wanted} that its header announces")
    array = np.frombuffer(data, np.uint8, offset=start).reshape(shape)
    if dimensions == 1:
        _check_labels(array, where, start, 1)
    return array


def _check_labels(labels: _Bytes, where: str, start: int, stride: int) -> None:
    wrong = np.flatnonzero(labels > 9)
    if len(wrong):
        fail(where, f"byte {start + wrong[0] * stride}: the label must be from 0 to 9, got {labels[wrong[0]]}")
