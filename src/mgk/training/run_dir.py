"""The folder of a run: who may write into it, and the recipe in it. Free of torch: usage errors come at once."""

import shutil
from pathlib import Path

from mgk.training.errors import RecipeError
from mgk.training.recipe import Recipe, differences, read_recipe, write_recipe
from mgk.training.run_summary import SUMMARY

RECIPE = "recipe.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
MODEL = "model"
BEST = "best"
TENSORBOARD = "tensorboard"


def check_folder(recipe: Recipe, out: Path, *, resume: bool, overwrite: bool) -> None:
    """Raise when the run may not go into this folder."""
    if resume and overwrite:
        raise RecipeError("a run is resumed or overwritten, not both")
    if out.exists() and not out.is_dir():
        raise RecipeError(f"{out}: this is a file, not the folder of a run")
    if resume:
        if (out / RECIPE).is_file():
            _check_same(recipe, read_recipe(out / RECIPE), out)
        elif _is_used(out):
            raise RecipeError(f"{out}: there is no run to resume here ({RECIPE} is missing)")
    elif _is_used(out) and not overwrite:
        is_done = (out / SUMMARY).is_file()
        hint = "choose another --out, or --overwrite it" if is_done else "go on with --resume, or --overwrite it"
        raise RecipeError(f"{out}: there is {'a finished run' if is_done else 'something'} here already: {hint}")
    elif _is_used(out) and not (out / RECIPE).is_file():
        raise RecipeError(f"{out}: this is not the folder of a run, so it is not overwritten")


def claim_folder(recipe: Recipe, out: Path, *, resume: bool, overwrite: bool) -> None:
    """Check the folder, clear it if it is to be overwritten, and write the recipe into it."""
    check_folder(recipe, out, resume=resume, overwrite=overwrite)
    if overwrite and out.is_dir():
        for entry in sorted(out.iterdir(), key=lambda path: path.name == RECIPE):  # the mark of a run goes last
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    out.mkdir(parents=True, exist_ok=True)
    if not (out / RECIPE).is_file():
        write_recipe(recipe, out / RECIPE)


def _is_used(out: Path) -> bool:
    # A recipe that was being written when the run was killed is no run yet.
    return out.is_dir() and any(not entry.name.startswith(f".{RECIPE}.") for entry in out.iterdir())


def _check_same(recipe: Recipe, started: Recipe, out: Path) -> None:
    for path, (now, then) in differences(recipe, started).items():
        raise RecipeError(
            f"{out}: this run was started with {path} = {then!r}, not {now!r}: resume it without changes, as in"
            f" mgk train --resume --out {out}"
        )
