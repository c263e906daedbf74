"""Writes small data sets in their official layouts."""

import io
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

WIKI = {
    "train": b" \n = Title = \n \n the cat <unk> sat on the mat . \n the dog sat . \n",
    "valid": b" \n = Other = \n the bird sat . \n",
    "test": b" \n the cat sat \n",
}


def write_imdb(folder: Path, per_label: int = 3) -> Path:
    for split in ("train", "test"):
        for sign, rating in (("pos", 9), ("neg", 2)):
            place = folder / "aclImdb" / split / sign
            place.mkdir(parents=True)
            for number in range(per_label):
                (place / f"{number}_{rating}.txt").write_text(
                    f"{split} {sign} review {number} é", encoding="utf-8"
                )
        (folder / "aclImdb" / split / "urls_pos.txt").write_text("http://example.org\n")
    (folder / "aclImdb" / "train" / "unsup").mkdir()
    (folder / "aclImdb" / "train" / "unsup" / "0_0.txt").write_text("no label")
    return folder / "aclImdb"


def write_pairs(folder: Path, rows: int = 4) -> Path:
    place = folder / "tsv_data"
    place.mkdir(parents=True)
    for split in ("train", "eval", "test"):
        lines = [f'{i % 2}.0\tA{i}\tB{i}\tfirst "{split}" text {i}\tsecond text, {i}' for i in range(rows)]
        (place / f"new_aan_pairs.{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return place


def write_wikitext(folder: Path, texts: dict[str, bytes] = WIKI) -> Path:
    place = folder / "wikitext"
    place.mkdir(parents=True)
    for split, text in texts.items():
        (place / f"wiki.{split}.tokens").write_bytes(text)
    return place


def cifar_images(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (count, 3072), np.uint8), generator.integers(0, 10, count, np.uint8)


CIFAR_NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def write_cifar_binary(folder: Path, per_batch: int = 4) -> Path:
    place = folder / "cifar-10-batches-bin"
    place.mkdir(parents=True)
    for number, name in enumerate(CIFAR_NAMES):
        images, labels = cifar_images(per_batch, number)
        (place / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], images], 1).tobytes())
    return place


def cifar_pickle(images: np.ndarray, labels: np.ndarray, dtype: bytes = b"u1") -> bytes:
    """The instructions of the official files, which Python 2 wrote with protocol 2: lists in pieces of 1,000."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def items(values: list[bytes]) -> bytes:
        pieces = [values[start : start + 1000] for start in range(0, len(values), 1000)]
        return b"".join(b"(" + b"".join(piece) + b"e" for piece in pieces)

    content = images.tobytes()
    shape = b"M" + struct.pack("<H", len(images)) + b"M" + struct.pack("<H", images.shape[1])
    return b"".join(
        [
            b"\x80\x02}q\x01(" + text(b"batch_label") + b"q\x02" + text(b"training batch 1 of 5") + b"q\x03",
            text(b"labels") + b"q\x04]q\x05" + items([b"K" + bytes([label]) for label in labels]),
            text(b"data") + b"q\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85",
            text(b"b")
            + b"\x87Rq\x09(K\x01"
            + shape
            + b"\x86cnumpy\ndtype\nq\x0a"
            + text(dtype)
            + b"K\x00K\x01\x87Rq\x0b",
            b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T",
            struct.pack("<i", len(content)) + content + b"tb",
            text(b"filenames") + b"q\x0c]q\x0d" + items([text(b"a.png") + b"q\x0e"] * len(images)) + b"u.",
        ]
    )


def write_cifar_python(folder: Path, per_batch: int = 4) -> Path:
    place = folder / "cifar-10-batches-py"
    place.mkdir(parents=True)
    for number, name in enumerate(CIFAR_NAMES):
        (place / name).write_bytes(cifar_pickle(*cifar_images(per_batch, number)))
    return place


def idx(array: np.ndarray) -> bytes:
    magic = 0x800 + array.ndim
    return np.array([magic, *array.shape], ">u4").tobytes() + array.astype(np.uint8).tobytes()


def write_mnist(folder: Path, train: int = 10, test: int = 4, side: int = 28) -> Path:
    place = folder / "mnist"
    place.mkdir(parents=True)
    for name, count in (("train", train), ("t10k", test)):
        (place / f"{name}-images-idx3-ubyte").write_bytes(
            idx(np.arange(count * side * side).reshape(count, side, side))
        )
        (place / f"{name}-labels-idx1-ubyte").write_bytes(idx(np.arange(count) % 10))
    return place


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_pathfinder(folder: Path, per_file: int = 10, side: int = 32) -> Path:
    place = folder / f"pathfinder{side}" / "curv_contour_length_14"
    (place / "metadata").mkdir(parents=True)
    for number in range(2):
        (place / "imgs" / str(number)).mkdir(parents=True)
        lines = []
        for sample in range(per_file):
            image = np.full((side, side), 10 * number + sample, np.uint8)
            (place / "imgs" / str(number) / f"sample_{sample}.png").write_bytes(png(image))
            lines.append(f"imgs/{number} sample_{sample}.png {sample} {sample % 2} 1.0 14 4 2 0.5 1 1\n")
        (place / "metadata" / f"{number}.npy").write_text("".join(lines))
    return folder / f"pathfinder{side}"


def write_listops(folder: Path, rows: int = 3) -> Path:
    folder.mkdir(parents=True)
    for split in ("train", "val", "test"):
        lines = [f"( ( ( [MAX {i} ) 2 ) ] )\t{max(i, 2)}\r\n" for i in range(rows)]
        (folder / f"basic_{split}.tsv").write_bytes(("Source\tTarget\r\n" + "".join(lines)).encode())
    return folder


def write_lra_release(folder: Path) -> Path:
    """The release of all tasks: ListOps lies in it twice, and every resolution of Pathfinder under the same names."""
    inner = folder / "lra_release" / "lra_release"
    write_listops(folder / "lra_release" / "listops-1000")
    write_listops(inner / "listops-1000")
    write_pairs(inner)
    for side in (32, 64):
        write_pathfinder(inner, side=side)
    return folder / "lra_release"


def pack(folder: Path, archive: Path) -> Path:
    """The folder as an archive, by the archive's name."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for path in sorted(folder.rglob("*")):
                file.write(path, path.relative_to(folder.parent))
    else:
        with tarfile.open(archive, f"w:{archive.suffix[1:]}") as file:
            file.add(folder, folder.name)
    return archive
