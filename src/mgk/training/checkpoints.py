"""Checkpoints of a run, ``checkpoints/step-N``, with a manifest each.

A checkpoint holds all that the rest of the run depends on, the metrics and the best
weights so far included, as safetensors and JSON: nothing is ever unpickled.
"""

import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.optim import Optimizer

from mgk._util import files
from mgk._util.errors import first_line
from mgk.training.errors import TrainingError
from mgk.training.run_dir import BEST, CHECKPOINTS, ENVIRONMENT, METRICS

MANIFEST = "manifest.json"
MODEL = "model.safetensors"  # weights and buffers, M-step statistics among them
OPTIMIZER = "optimizer.safetensors"  # by NUMBER.NAME
RANKS = "ranks.safetensors"  # random states and losses
TIMINGS = "timings.safetensors"  # of every step
PROGRESS = "progress.json"
FORMAT = 2
_UNFIT = (SafetensorError, OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


def save(
    run: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    ranks: Mapping[str, Tensor],
    timings: Tensor,
    progress: Mapping[str, Any],
) -> None:
    """Write a checkpoint, on the first rank."""
    states = optimizer.state_dict()["state"].items()
    with files.atomic_folder(run / CHECKPOINTS / f"step-{step}") as folder:
        save_model(model, str(folder / MODEL))
        save_file(
            {f"{n}.{name}": value for n, state in states for name, value in state.items()}, folder / OPTIMIZER
        )
        save_file(dict(ranks), folder / RANKS)
        save_file({"timings": timings}, folder / TIMINGS)
        files.write_json(folder / PROGRESS, progress)
        for name in (METRICS, ENVIRONMENT):
            shutil.copyfile(run / name, folder / name)
        if (run / BEST).is_dir():
            shutil.copytree(run / BEST, folder / BEST)
        finalize(folder)


def load(
    checkpoint: Path, model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], Tensor, dict[str, Any]]:
    """Restore model and optimizer; the ranks' states, timings, progress."""
    load_model(model, checkpoint / MODEL)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for key, value in load_file(checkpoint / OPTIMIZER).items():
        number, _, name = key.partition(".")
        if value.dim() and value.shape != parameters[int(number)].shape:
            shape = tuple(value.shape)
            raise ValueError(f"{OPTIMIZER}: {key} has the shape {shape}, not that of its parameter")
        states[int(number)][name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    progress = files.read_json(checkpoint / PROGRESS)
    return load_file(checkpoint / RANKS), load_file(checkpoint / TIMINGS)["timings"], progress


@contextmanager
def restoring(checkpoint: Path) -> Iterator[None]:
    """``TrainingError`` for a checkpoint that does not fit the run."""
    try:
        yield
    except _UNFIT as error:
        advice = "delete it to go on from the one before"
        reason = f"this is not a checkpoint of this run ({first_line(error)})"
        raise TrainingError(f"{checkpoint}: {reason}: {advice}") from error


def restore_files(run: Path, checkpoint: Path | None) -> None:
    """Give the run the checkpoint's metrics and best weights."""
    (run / METRICS).unlink(missing_ok=True)
    shutil.rmtree(run / BEST, ignore_errors=True)
    if checkpoint is not None:
        shutil.copyfile(checkpoint / METRICS, run / METRICS)
        if (checkpoint / BEST).is_dir():
            shutil.copytree(checkpoint / BEST, run / BEST)


def finalize(folder: Path) -> None:
    """Write the hashed manifest of a folder's files."""
    files.write_hashed(folder / MANIFEST, {"format": FORMAT}, filter(Path.is_file, folder.rglob("*")))


def verify(folder: Path) -> str | None:
    """What is wrong with a folder; None where it matches its manifest."""
    try:
        if (found := files.read_verified(folder / MANIFEST).get("format")) != FORMAT:
            return f"{MANIFEST} is of format {found}, not {FORMAT}"
        for name, wrong in files.wrong_files(folder, files.verified_specs(folder / MANIFEST)):
            return f"{name} {wrong}"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


def newest_valid(run: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest valid checkpoint, and what is wrong with newer ones."""
    corrupt: dict[Path, str] = {}
    for path in list_checkpoints(run):
        reason = verify(path)
        if reason is None:
            return path, corrupt
        corrupt[path] = reason
    return None, corrupt


def list_checkpoints(run: Path) -> list[Path]:
    """All checkpoints of a run, the newest first, valid or not."""
    found = (run / CHECKPOINTS).glob("step-*")
    valid = (path for path in found if re.fullmatch(r"step-\d+", path.name))
    return sorted(valid, key=step_of, reverse=True)


def newest(run: Path) -> Path | None:
    """The newest checkpoint, valid or not."""
    return next(iter(list_checkpoints(run)), None)


def step_of(checkpoint: Path) -> int:
    """N of a folder ``step-N``."""
    return int(checkpoint.name.removeprefix("step-"))


def last_good(run: Path) -> str:
    """The last checkpoint, in the words of an error message."""
    found = newest(run)
    return "there is no checkpoint yet" if found is None else f"the last good checkpoint is {found}"


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, its manifest first: half of one is not valid."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def keep_newest(run: Path, count: int) -> None:
    """Delete all checkpoints but the newest ones."""
    for path in list_checkpoints(run)[count:]:
        remove(path)
