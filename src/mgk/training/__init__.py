"""Training by recipes: reproducible runs that can be resumed and compared.

Names load on first use: the command line checks recipes without torch.
"""

from typing import TYPE_CHECKING

from mgk._util.lazy import lazy_exports

if TYPE_CHECKING:
    from mgk._util.errors import Interrupted as Interrupted
    from mgk.training.errors import RecipeError as RecipeError
    from mgk.training.errors import TrainingError as TrainingError
    from mgk.training.evaluation import Evaluation as Evaluation
    from mgk.training.evaluation import evaluate as evaluate
    from mgk.training.recipe import Recipe as Recipe
    from mgk.training.recipe import load_recipe as load_recipe
    from mgk.training.recipe import read_recipe as read_recipe
    from mgk.training.recipe import write_recipe as write_recipe
    from mgk.training.run import train as train
    from mgk.training.run_dir import RunSummary as RunSummary
    from mgk.training.run_dir import read_correct as read_correct
    from mgk.training.run_dir import read_metrics as read_metrics
    from mgk.training.run_dir import read_summary as read_summary

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
