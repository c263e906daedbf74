"""Which Python files of mgk a call runs through: ``python tests/architecture/walks.py`` lists them.

A file counts when one of its functions is called. Modules are imported beforehand, so that what runs at import does not
count; what ``mgk reproduce`` does in processes of its own is done in this one, so that it does count.
"""

import contextlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch

import mgk
from mgk import mixture_attention

PACKAGE = Path(mgk.__file__).parent
# At most so many files, and below which folder they are counted.
LIMITS = {"attention": (7, ""), "train": (40, ""), "reproduce": (12, "experiments/")}


def import_everything() -> None:
    """Import every module of the package."""
    for module in pkgutil.walk_packages(mgk.__path__, "mgk."):
        if module.name.endswith(("__main__", "_kernels")):  # the kernels are no Python module
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name != "triton":  # which need not be installed
                raise


def files_of(call: Callable[[], object]) -> list[str]:
    """The files of mgk, relative to the package, whose functions ``call`` calls."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        # class bodies and modules have no namespace of locals of their own
        if event == "call" and frame.f_code.co_flags & inspect.CO_NEWLOCALS:
            found.add(frame.f_code.co_filename)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return sorted(str(path.relative_to(PACKAGE)) for path in map(Path, found) if path.is_relative_to(PACKAGE))


def attention() -> list[str]:
    """``mgk.mixture_attention``, forward and backward, by the fused kernels where they are built."""
    query = torch.randn(1, 2, 256, 16, requires_grad=True)
    keys, value = torch.randn(1, 2, 2, 256, 16), torch.randn(1, 2, 256, 16)
    return files_of(lambda: mixture_attention(query, keys, value).sum().backward())


def command(*arguments: str) -> None:
    """``mgk ARGUMENTS``, with its output thrown away."""
    from mgk.cli.app import app

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        app(list(arguments), standalone_mode=False)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for data and runs."""
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.dict(os.environ, {"MGK_DATA": f"{name}/data", "MGK_RUNS": f"{name}/runs"}),
    ):
        yield Path(name)


def train() -> list[str]:
    """``mgk train listops --preset smoke``, the data prepared."""
    from mgk.training.recipe import load_recipe
    from mgk.training.tasks import open_data

    with temporary_folder() as folder:
        open_data(load_recipe("listops", "smoke").data)
        return files_of(lambda: command("train", "listops", "--preset", "smoke", "--out", str(folder / "run")))


def reproduce() -> list[str]:
    """``mgk reproduce table1 --preset smoke --tasks listops --seeds 1``."""
    from mgk.experiments import runner

    def in_this_process(
        function: Callable[..., Any],
        calls: dict[Any, tuple[Any, ...]],
        *,
        on_message: Callable[[Any, Any], None],
        on_result: Callable[[Any, Any], None],
        **_: Any,
    ) -> None:
        for key, arguments in calls.items():
            on_result(key, function(*arguments, partial(on_message, key)))

    with temporary_folder() as folder, mock.patch.object(runner, "run_isolated", in_this_process):
        options = (
            "--preset",
            "smoke",
            "--tasks",
            "listops",
            "--seeds",
            "1",
            "--results",
            str(folder / "results"),
        )
        return files_of(lambda: command("reproduce", "table1", *options))


WALKS: dict[str, Callable[[], list[str]]] = {"attention": attention, "train": train, "reproduce": reproduce}


def count(name: str) -> list[str]:
    """The files of a walk, below the folder in which they are counted."""
    return [file for file in WALKS[name]() if file.startswith(LIMITS[name][1])]


if __name__ == "__main__":
    import_everything()
    names = [name for name in sys.argv[1:] if name != "--json"] or list(WALKS)
    found = {name: {"limit": LIMITS[name][0], "files": count(name)} for name in names}
    if "--json" in sys.argv:
        print(json.dumps(found))
    else:
        for name, walk in found.items():
            print(f"{name}: {len(walk['files'])} files, at most {walk['limit']}", *walk["files"], sep="\n  ")
