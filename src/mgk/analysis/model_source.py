"""The source of a model: a run, or a folder. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path

from mgk._util.errors import UsageError
from mgk.training.run_dir import MODEL, RECIPE, check_files, finished_recipe


@dataclass(frozen=True)
class ModelSource:
    """A saved model."""

    path: Path  # as the user gave it
    folder: Path
    run: Path | None  # None for a saved model alone

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.resolve().name


def find_model(path: Path) -> ModelSource:
    """A finished run, or a folder that ``save_pretrained`` wrote."""
    if (path / RECIPE).is_file():
        finished_recipe(path)
        check_files(path, f"{MODEL}/")
        return ModelSource(path, path / MODEL, path)
    if (path / "config.json").is_file():
        return ModelSource(path, path, None)
    kinds = f"neither a run ({RECIPE}) nor a saved model (config.json)"
    advice = f"a model of the hub is fetched by hf download NAME --local-dir {path}"
    raise UsageError(f"{path}: there is {kinds}; {advice}")
