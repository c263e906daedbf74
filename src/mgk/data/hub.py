"""Fetches a data set from the Hugging Face hub and prepares it."""

import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk._util.errors import first_line
from mgk.data.errors import DataError, UsageError
from mgk.data.preparation import OnStep, Prepared, prepare, present, set_folder
from mgk.data.task_registry import Task, find_task
from mgk.data.writer import named_errors


def prepare_from_hub(
    name: str,
    *,
    out: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    on_step: OnStep = lambda done, total: None,
) -> Prepared:
    """Fetch and prepare a task, unless it is there already."""
    task = find_task(name)
    if not task.hub:
        raise UsageError(f"{name} is not at the hub: {task.how_to_get()}")
    ready = present(name, out=out, options=options)
    if ready is not None:
        return ready
    fetched = _fetch(task)
    if task.hub_files:
        return prepare(name, fetched, out=out, options=options, on_step=on_step)
    parent = set_folder(name, out).parent
    with named_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        layout = tempfile.TemporaryDirectory(prefix=".from-hub-", dir=parent, ignore_cleanup_errors=True)
    with layout as folder:
        try:
            with named_errors(Path(folder)):
                _LAYOUTS[name](fetched, Path(folder))
        except KeyError as error:
            raise DataError(f"{task.hub[0]}: the hub's data set has no {error}") from None
        return prepare(name, folder, out=out, options=options, on_step=on_step)


def _fetch(task: Task) -> Any:
    """The splits, or the folder of the official files."""
    try:
        if task.hub_files:
            download = import_module("huggingface_hub").snapshot_download
            return download(task.hub[0], repo_type="dataset", allow_patterns=list(task.hub_files))
        return import_module("datasets").load_dataset(*task.hub)
    except ModuleNotFoundError:
        raise UsageError("--from-hub needs datasets: pip install 'mgk[hub]'") from None
    except Exception as error:  # a network has many kinds, undocumented
        reason = f"cannot fetch {task.hub[0]} ({first_line(error)})"
        raise DataError(f"{reason}; {task.how_to_get()}") from None


def _write_imdb(splits: Any, folder: Path) -> None:
    for split in ("train", "test"):
        for sign in ("pos", "neg"):
            (folder / split / sign).mkdir(parents=True)
        for number, row in enumerate(splits[split]):
            name = f"pos/{number}_10.txt" if row["label"] == 1 else f"neg/{number}_1.txt"
            (folder / split / name).write_text(row["text"], encoding="utf-8", newline="")


def _write_wikitext(splits: Any, folder: Path) -> None:
    for split, name in (("train", "train"), ("validation", "valid"), ("test", "test")):
        with (folder / f"wiki.{name}.tokens").open("w", encoding="utf-8", newline="") as file:
            for row in splits[split]:
                file.write(row["text"].rstrip("\n") + "\n")


def _write_cifar(splits: Any, folder: Path) -> None:
    records = {split: [_record(row) for row in splits[split]] for split in ("train", "test")}
    train = records["train"]
    part = -(-len(train) // 5)
    for number in range(5):
        batch = train[number * part : (number + 1) * part]
        (folder / f"data_batch_{number + 1}.bin").write_bytes(b"".join(batch))
    (folder / "test_batch.bin").write_bytes(b"".join(records["test"]))


def _record(row: Any) -> bytes:
    return bytes([row["label"]]) + _pixels(row["img"]).transpose(2, 0, 1).tobytes()


def _write_mnist(splits: Any, folder: Path) -> None:
    for split, name in (("train", "train"), ("test", "t10k")):
        rows = list(splits[split])
        header = np.array([0x803, len(rows), 28, 28], ">u4").tobytes()
        images = header + b"".join(_pixels(row["image"]).tobytes() for row in rows)
        header = np.array([0x801, len(rows)], ">u4").tobytes()
        labels = header + bytes(row["label"] for row in rows)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)


def _pixels(image: Any) -> NDArray[np.uint8]:
    return np.asarray(image, np.uint8)


_LAYOUTS: dict[str, Callable[[Any, Path], None]] = {
    "text": _write_imdb,
    "image": _write_cifar,
    "mnist": _write_mnist,
    "fashion-mnist": _write_mnist,
    "wikitext-2": _write_wikitext,
    "wikitext-103": _write_wikitext,
}
