"""Images as sequences of grey pixels: CIFAR-10, MNIST and Fashion-MNIST.

As in Long Range Arena, the last training images are the validation split.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.data.cifar_pickle import read_batch
from mgk.data.errors import UsageError, fail
from mgk.data.preparation import Job
from mgk.data.sources import Source, SourceFile
from mgk.data.writer import SetWriter

# A pixel is its own token; images have one length, so nothing pads.
PIXELS: dict[str, Any] = {"unit": "pixel", "vocab_size": 256, "pad_id": None, "shift": 0}

_Bytes = NDArray[np.uint8]
_Batch = tuple[_Bytes, _Bytes]  # images and labels
_RECORD = 1 + 3072
_IMAGES_AT_ONCE = 1024
_TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_IDX = [f"{split}-{kind}" for split in ("train", "t10k") for kind in ("images", "labels")]


def prepare(writer: SetWriter, job: Job) -> None:
    """Read the batches of CIFAR-10, or IDX files."""
    read = _read_cifar if job.task.name == "image" else _read_idx
    (images, labels), test = read(job.source)
    validation: int = job.options["validation"]
    border = len(images) - validation
    if border <= 0:
        raise UsageError(f"cannot hold out {validation} of {len(images)} training images")
    writer.facts.update(PIXELS, height=images.shape[1], width=images.shape[2])
    _write(writer, "train", images[:border], labels[:border])
    if validation:
        _write(writer, "validation", images[border:], labels[border:])
    _write(writer, "test", *test)


def _write(writer: SetWriter, split: str, images: _Bytes, labels: _Bytes) -> None:
    writer.append(split, "labels", labels)
    for start in range(0, len(images), _IMAGES_AT_ONCE):
        piece = images[start : start + _IMAGES_AT_ONCE]
        if piece.ndim == 4:
            writer.append(split, "colour", piece)
            piece = grey(piece)
        writer.append(split, "tokens", piece.reshape(len(piece), -1))


def grey(images: _Bytes) -> _Bytes:
    """(..., 3) -> (...): 0.2989 R + 0.5870 G + 0.1140 B.

    Rounded as ``tf.image.rgb_to_grayscale``: floor(255.5 g) for g in [0, 1].
    """
    # Whole numbers, so that every machine agrees.
    weighted = images.astype(np.int64) @ np.array([2989, 5870, 1140])
    return (weighted * 511 // 5_100_000).astype(np.uint8)


def _read_cifar(source: Source) -> tuple[_Batch, _Batch]:
    """The training and the test images (n, 32, 32, 3)."""
    batches: dict[str, _Batch] = {}
    pattern = r"(data_batch_[1-5]|test_batch)(\.bin)?"
    for name, file in source.parts(pattern, (*_TRAIN_BATCHES, "test_batch")):
        read = _binary_batch if file.match[2] else read_batch
        pixels, labels = read(file.content(), file.where)
        images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        batches[name] = images, labels
    train = [batches[name] for name in _TRAIN_BATCHES]
    images, labels = map(np.concatenate, zip(*train, strict=True))
    return (images, labels), batches["test_batch"]


def _binary_batch(data: bytes, where: str) -> _Batch:
    if not data or len(data) % _RECORD:
        whole = len(data) - len(data) % _RECORD
        size = f"{len(data) - whole} of {_RECORD} bytes"
        fail(where, f"the image at byte {whole} is not of 32 x 32 x 3 pixels: {size}")
    records = np.frombuffer(data, np.uint8).reshape(-1, _RECORD)
    _check_labels(records[:, 0], where, 0, _RECORD)
    return records[:, 1:], records[:, 0]


def _read_idx(source: Source) -> tuple[_Batch, _Batch]:
    pattern = r"((?:train|t10k)-(images|labels))[-.]idx[13]-ubyte"
    arrays = {name: _idx_array(file) for name, file in source.parts(pattern, _IDX)}
    batches = []
    for split in ("train", "t10k"):
        images, labels = arrays[f"{split}-images"], arrays[f"{split}-labels"]
        if len(images) != len(labels):
            found = f"{len(images)} images but {len(labels)} labels"
            fail(str(source.path), f"{found} in the files {split}-*")
        batches.append((images, labels))
    return batches[0], batches[1]


def _idx_array(file: SourceFile) -> _Bytes:
    """Big-endian numbers: a magic one and the sizes; then the bytes."""
    data, where, kind = file.content(), file.where, file.match[2]
    magic, dimensions = (0x803, 3) if kind == "images" else (0x801, 1)
    start = 4 + 4 * dimensions
    header = np.frombuffer(data[:start], ">u4").tolist() if len(data) >= start else [0]
    if header[0] != magic:
        fail(where, f"byte 0: this is not an IDX file of {kind}")
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
        place, label = start + wrong[0] * stride, labels[wrong[0]]
        fail(where, f"byte {place}: the label must be from 0 to 9, got {label}")
