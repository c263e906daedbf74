"""Fetches a data set from the Hugging Face hub and lays it out as its official files, which are prepared then."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from mgk.data.errors import DataError, UsageError
from mgk.data.job import OnStep
from mgk.data.preparation import Prepared, prepare, present, set_folder
from mgk.data.task_registry import Task, find_task
from mgk.data.writer import named_errors


def prepare_from_hub(
    name: str,
    *,
    out: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    on_step: OnStep = lambda done, total: None,
) -> Prepared:
    """Fetch, lay out and prepare a task; nothing is fetched when it is there already."""
    task = find_task(name)
    if task.hub is None:
        raise UsageError(f"{name} is not at the hub: {task.how_to_get()}")
    ready = present(name, out=out, options=options)
    if ready is not None:
        return ready
    if task.hub_files:
        return prepare(name, _fetch_files(task), out=out, options=options, on_step=on_step)
    splits = _fetch(task)
    parent = set_folder(name, out).parent
    with named_errors(parent):
        parent.mkdir(parents=True, exist_ok=True)
        layout = Path(tempfile.mkdtemp(prefix=".from-hub-", dir=parent))
    try:
        with named_errors(layout):
            _LAYOUTS[task.module if task.module != "image" else name](splits, layout)
        return prepare(name, layout, out=out, options=options, on_step=on_step)
    except KeyError as error:
        raise DataError(f"{task.hub[0]}: the hub's data set has no {error}") from None
    finally:
        shutil.rmtree(layout, ignore_errors=True)


def _fetch(task: Task) -> Any:
    """All splits of a data set."""
    assert task.hub is not None
    with _named_failures(task):
        return import_module("datasets").load_dataset(*task.hub)


def _fetch_files(task: Task) -> Path:
    """The folder in the hub's cache that holds the official files."""
    assert task.hub is not None
    with _named_failures(task):
        hub = import_module("huggingface_hub")
        return Path(hub.snapshot_download(task.hub[0], repo_type="dataset", allow_patterns=list(task.hub_files)))


@contextmanager
def _named_failures(task: Task) -> Iterator[None]:
    assert task.hub is not None
    try:
        yield
    except ModuleNotFoundError:
        raise UsageError("--from-hub needs datasets and pillow: pip install 'mgk[hub]'") from None
    except Exception as error:  # of a network there are many kinds, none of them documented
        first_line = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise DataError(f"cannot fetch {task.hub[0]} ({first_line}); {task.how_to_get()}") from None


def _imdb(splits: Any, folder: Path) -> None:
    for split in ("train", "test"):
        for sign in ("pos", "neg"):
            (folder / split / sign).mkdir(parents=True)
        for number, row in enumerate(splits[split]):
            name = f"pos/{number}_10.txt" if row["label"] == 1 else f"neg/{number}_1.txt"
            (folder / split / name).write_text(row["text"], encoding="utf-8", newline="")


def _wikitext(splits: Any, folder: Path) -> None:
    for split, name in (("train", "train"), ("validation", "valid"), ("test", "test")):
        with (folder / f"wiki.{name}.tokens").open("w", encoding="utf-8", newline="") as file:
            for row in splits[split]:
                file.write(row["text"].rstrip("\n") + "\n")


def _cifar(splits: Any, folder: Path) -> None:
    records = [bytes([row["label"]]) + _pixels(row["img"]).transpose(2, 0, 1).tobytes() for row in splits["train"]]
    part = -(-len(records) // 5)
    for number in range(5):
        (folder / f"data_batch_{number + 1}.bin").write_bytes(b"".join(records[number * part : (number + 1) * part]))
    test = (bytes([row["label"]]) + _pixels(row["img"]).transpose(2, 0, 1).tobytes() for row in splits["test"])
    (folder / "test_batch.bin").write_bytes(b"".join(test))


def _mnist(splits: Any, folder: Path) -> None:
    for split, name in (("train", "train"), ("test", "t10k")):
        rows = list(splits[split])
        header = np.array([0x803, len(rows), 28, 28], ">u4").tobytes()
        (folder / f"{name}-images-idx3-ubyte").write_bytes(
            header + b"".join(_pixels(r["image"]).tobytes() for r in rows)
        )
        header = np.array([0x801, len(rows)], ">u4").tobytes()
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(header + bytes(row["label"] for row in rows))


def _pixels(image: Any) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.asarray(image, np.uint8)


_LAYOUTS: dict[str, Callable[[Any, Path], None]] = {
    "text": _imdb,
    "wikitext": _wikitext,
    "image": _cifar,
    "mnist": _mnist,
    "fashion-mnist": _mnist,
}
