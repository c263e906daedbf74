"""What a run was made with and of: machine, versions, data, command."""

import json
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mgk._util.files import write_json
from mgk._util.machine import describe
from mgk.training import distributed
from mgk.training.errors import TrainingError
from mgk.training.recipe import Recipe
from mgk.training.run_dir import ENVIRONMENT
from mgk.training.tasks import TaskData

PACKAGES = ("mgk", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "numpy", "pydantic")


def versions() -> dict[str, str | None]:
    """The installed versions of what a run depends on."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def record(run: Path, recipe: Recipe, data: TaskData, device: torch.device, step: int) -> None:
    """Write or complete ``environment.json``: one entry for each time that the run was started or resumed.

    The data must be what the run began with: other data under the same name would make a result of nothing.
    """
    path = run / ENVIRONMENT
    sessions: list[Any] = []
    if path.is_file():
        before = json.loads(path.read_bytes())
        sessions = before["sessions"]
        if before["data"]["files"] != data.manifest.to_json()["files"]:
            raise TrainingError(f"{data.folder / data.task.name}: the data have changed since {run} began with them")
    machine = describe(device)
    sessions.append(
        {
            "from_step": step,
            "command": sys.argv,
            "processes": distributed.world_size(),
            "machine": asdict(machine),
            "versions": versions(),
            "git": machine.commit,
        }
    )
    write_json(path, {"seed": recipe.seed, "data": data.manifest.to_json(), "sessions": sessions})
