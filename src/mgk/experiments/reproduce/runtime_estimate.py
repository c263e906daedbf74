"""How long trials will take on this machine, before they start."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean, median

from mgk._util.progress import duration
from mgk.analysis import cost_model
from mgk.analysis.cost_model import Sizes
from mgk.experiments.reproduce.paper_costs import sizes_of
from mgk.experiments.result_store import ResultStore, TrialResult
from mgk.experiments.trials import Trial
from mgk.training.recipe import Recipe

EARLIER = "from earlier trials of the same kind"
BY_RATE = "from other trials' FLOP rates"
BY_FORMULA = "by the cost model and this machine's FLOP rate"

# Of the FLOPs of a timed layer: examples and length that take a fraction of a second.
_TIMED_PAIRS = 2**20
_LONGEST = 1024


@dataclass(frozen=True)
class Estimate:
    """Of a trial: how long, and how that is known."""

    seconds: float
    how: str


def estimate(trials: Sequence[Trial], results: ResultStore) -> dict[Trial, Estimate]:
    """The time that each trial takes, one at a time.

    Known from trials of the same model and task on such a machine, whatever their seed; else from the FLOPs that the
    cost model counts and the rate that other trials reached, of the task or else of the model, or else a layer of the
    model that is timed now. Inputs are taken at full length and splits as far as their sizes are known, so it is on
    the high side for texts.
    """
    records = _records({trial.preset for trial in trials}, results)
    found = {}
    for trial in trials:
        of_task = [record for record in records if record.trial.task == trial.task]
        of_model = [record for record in records if record.trial.model == trial.model]
        same = [record for record in of_task if record.trial.model == trial.model]
        if same:
            found[trial] = Estimate(fmean(record.seconds / record.jobs for record in same), EARLIER)
        elif others := of_task or of_model:
            rate = median(total_flops(record.recipe) / (record.seconds / record.jobs) for record in others)
            found[trial] = Estimate(total_flops(trial.recipe) / rate, BY_RATE)
        else:
            found[trial] = Estimate(total_flops(trial.recipe) / _rate(trial.recipe), BY_FORMULA)
    return found


def in_words(estimates: Mapping[Trial, Estimate]) -> str:
    """All together, and how that is known."""
    total = sum(item.seconds for item in estimates.values())
    ways = dict.fromkeys(item.how for item in estimates.values())
    return f"about {duration(total)} ({'; '.join(ways)})"


def total_flops(recipe: Recipe) -> float:
    """Of a whole trial: training, looking at the validation split on the way, and the test."""
    training, evaluation = recipe.training, recipe.evaluation
    steps = cost_model.training_flops(replace(_sizes(recipe), batch=training.batch_size)).value * training.max_steps
    one = cost_model.forward_flops(_sizes(recipe)).value
    looks = training.max_steps // (evaluation.every or training.max_steps)
    sizes = {split: _examples(recipe, split) for split in ("validation", "test")}
    return float(steps + one * (looks * sizes[evaluation.split] + (sizes["test"] if evaluation.test else 0)))


def _sizes(recipe: Recipe) -> Sizes:
    """An adaptive softmax meets its first words at every step and the rest at few: only those are taken."""
    sizes = sizes_of(recipe)
    return replace(sizes, cutoffs=(), vocab=sizes.cutoffs[0]) if sizes.cutoffs else sizes


def _examples(recipe: Recipe, split: str) -> int:
    """As far as it is known without the data."""
    limit: int | None = getattr(recipe.data, f"{split}_examples")
    if recipe.data.name.startswith("synthetic-"):
        return min(limit or 64, 64)
    if limit is not None:
        return limit
    made = recipe.data.options.get(split)
    return made if isinstance(made, int) else 2000


def _records(presets: Iterable[str], results: ResultStore) -> list[TrialResult]:
    """What was measured on a machine like this one."""
    found = [record for preset in presets for record in results.records(preset)]
    if not found:
        return []
    from mgk._util.machine import describe

    here = describe()
    kind = (here.processor, here.cores, here.accelerator)
    return [
        item for item in found if tuple(item.machine[name] for name in ("processor", "cores", "accelerator")) == kind
    ]


def _rate(recipe: Recipe) -> float:
    """FLOP/s of a training step of one layer of the recipe's model."""
    length = min(recipe.data.max_length or _LONGEST, _LONGEST)
    batch = min(recipe.training.batch_size, max(1, _TIMED_PAIRS // length**2))
    return _timed_rate(replace(sizes_of(recipe), length=length, batch=batch, layers=1, head="none", max_positions=None))


@lru_cache(maxsize=64)
def _timed_rate(sizes: Sizes) -> float:
    import time

    import torch

    from mgk.nn import MixtureAttention

    attention = MixtureAttention(
        sizes.hidden,
        sizes.heads,
        variant=sizes.attention,
        head_dim=sizes.head_dim,
        num_mixtures=sizes.mixtures,
        e_step="hard" if sizes.e_step == "hard" else "soft",
    )
    up, down = torch.nn.Linear(sizes.hidden, sizes.intermediate), torch.nn.Linear(sizes.intermediate, sizes.hidden)
    x = torch.randn(sizes.batch, sizes.length, sizes.hidden)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        y = x + attention(x, is_causal=sizes.causal)
        (y + down(torch.nn.functional.gelu(up(y)))).square().mean().backward()
        seconds.append(time.perf_counter() - begin)
    return cost_model.training_flops(sizes).value / min(seconds[1:])
