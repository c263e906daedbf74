"""Checkpoints of a run: ``checkpoints/step-N``, complete or absent, with the SHA-256 of every file in a manifest.

Tensors are stored as safetensors and the rest as JSON: nothing is ever unpickled.
"""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.optim import Optimizer

from mgk._util.files import atomic_folder, file_hash, write_json
from mgk.training.run_dir import CHECKPOINTS

MANIFEST = "manifest.json"
MODEL = "model.safetensors"  # weights and buffers, M-step statistics among them
OPTIMIZER = "optimizer.safetensors"  # the state of each parameter, as NUMBER.NAME
RANKS = "ranks.safetensors"  # random states and what else each rank has of its own
PROGRESS = "progress.json"


def save(
    run: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    ranks: Mapping[str, Tensor],
    progress: Mapping[str, Any],
) -> None:
    """Write a checkpoint, on the first rank; the options of the optimizer are the recipe's and are not saved."""
    states = optimizer.state_dict()["state"].items()
    with atomic_folder(run / CHECKPOINTS / f"step-{step}") as folder:
        save_model(model, str(folder / MODEL))
        save_file({f"{n}.{name}": value for n, state in states for name, value in state.items()}, folder / OPTIMIZER)
        save_file(dict(ranks), folder / RANKS)
        write_json(folder / PROGRESS, progress)
        finalize(folder)


def load(checkpoint: Path, model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Restore the model and the optimizer; the states of the ranks and the progress are returned."""
    load_model(model, checkpoint / MODEL)
    states: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for key, value in load_file(checkpoint / OPTIMIZER).items():
        number, name = key.split(".")
        states[int(number)][name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    return load_file(checkpoint / RANKS), json.loads((checkpoint / PROGRESS).read_bytes())


def finalize(folder: Path) -> None:
    """Write the manifest of a checkpoint's files."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": file_hash(path)}
        for path in sorted(folder.rglob("*"))
    }
    write_json(folder / MANIFEST, {"format": 1, "files": files})


def verify(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in half a sentence; None where it matches its manifest."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_bytes())["files"]
        for name, spec in files.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != spec["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {spec['bytes']}"
            if file_hash(path) != spec["sha256"]:
                return f"the content of {name} has changed"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    return None


def newest_valid(run: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint that matches its manifest, and what is wrong with newer ones."""
    corrupt: dict[Path, str] = {}
    for path in list_checkpoints(run):
        reason = verify(path)
        if reason is None:
            return path, corrupt
        corrupt[path] = reason
    return None, corrupt


def list_checkpoints(run: Path) -> list[Path]:
    """All checkpoints of a run, the newest first, valid or not."""
    found = [path for path in (run / CHECKPOINTS).glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(checkpoint: Path) -> int:
    """N of a folder ``step-N``."""
    return int(checkpoint.name.removeprefix("step-"))


def last_good(run: Path) -> str:
    """Half a sentence on where a run can go on from."""
    found = next(iter(list_checkpoints(run)), None)
    return "there is no checkpoint yet" if found is None else f"the last good checkpoint is {found}"


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint, its manifest first, so that a half-deleted one is not valid."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def keep_newest(run: Path, count: int) -> None:
    """Delete all checkpoints but the newest ones."""
    for path in list_checkpoints(run)[count:]:
        remove(path)
