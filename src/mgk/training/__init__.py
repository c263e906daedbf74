"""Training by recipes: runs that can be repeated, resumed and compared.

Names load on first use, so that the command line can check a recipe without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mgk.training.errors import Interrupted as Interrupted
    from mgk.training.errors import RecipeError as RecipeError
    from mgk.training.errors import TrainingError as TrainingError
    from mgk.training.evaluation import Evaluation as Evaluation
    from mgk.training.evaluation import evaluate as evaluate
    from mgk.training.metrics import read_metrics as read_metrics
    from mgk.training.recipe import Recipe as Recipe
    from mgk.training.recipe import load_recipe as load_recipe
    from mgk.training.recipe import read_recipe as read_recipe
    from mgk.training.recipe import write_recipe as write_recipe
    from mgk.training.run import train as train
    from mgk.training.summary import RunSummary as RunSummary
    from mgk.training.summary import read_correct as read_correct
    from mgk.training.summary import read_summary as read_summary

_MODULES = {
    "Evaluation": "evaluation",
    "Interrupted": "errors",
    "Recipe": "recipe",
    "RecipeError": "errors",
    "RunSummary": "summary",
    "TrainingError": "errors",
    "evaluate": "evaluation",
    "load_recipe": "recipe",
    "read_correct": "summary",
    "read_metrics": "metrics",
    "read_recipe": "recipe",
    "read_summary": "summary",
    "train": "run",
    "write_recipe": "recipe",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mgk.training' has no attribute {name!r}")
    return getattr(import_module(f"mgk.training.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
