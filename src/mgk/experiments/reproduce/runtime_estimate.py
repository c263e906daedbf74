"""How long trials will take on this machine, before they start."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean, median

from mgk._util.progress import duration
from mgk.analysis import cost_model
from mgk.analysis.cost_model import Sizes
from mgk.data.task_registry import SYNTHETIC
from mgk.experiments.model_spec import sizes_of
from mgk.experiments.result_store import ResultStore, TrialResult
from mgk.experiments.trials import Trial
from mgk.training.recipe import Recipe

EARLIER = "from earlier trials of the same kind"
BY_RATE = "from other trials' FLOP rates"
BY_FORMULA = "by the cost model and this machine's FLOP rate"

# Query-key pairs and length of the timed layer: a fraction of a second.
_TIMED_PAIRS = 2**20
_MAX_LENGTH = 1024


@dataclass(frozen=True)
class Estimate:
    """The time of a trial, and what the estimate is based on."""

    seconds: float
    basis: str


def estimate(trials: Sequence[Trial], store: ResultStore) -> dict[Trial, Estimate]:
    """The time that each trial takes, one at a time.

    From trials of the same model and task on such a machine; else from the FLOP
    rate of other trials of the task or the model; else from one layer that is
    timed now. Inputs count at full length, so the estimate is high for texts.
    """
    results = _on_this_machine(
        result for preset in {t.preset for t in trials} for result in store.results(preset)
    )
    found = {}
    for trial in trials:
        of_task = [result for result in results if result.trial.task == trial.task]
        of_model = [result for result in results if result.trial.model == trial.model]
        if same := [result for result in of_task if result.trial.model == trial.model]:
            found[trial] = Estimate(fmean(result.seconds / result.jobs for result in same), EARLIER)
        elif others := of_task or of_model:
            rate = median(total_flops(result.recipe) / (result.seconds / result.jobs) for result in others)
            found[trial] = Estimate(total_flops(trial.recipe) / rate, BY_RATE)
        else:
            found[trial] = Estimate(total_flops(trial.recipe) / _rate(trial.recipe), BY_FORMULA)
    return found


def in_words(estimates: Mapping[Trial, Estimate]) -> str:
    """The sum, and what it is based on."""
    total = sum(item.seconds for item in estimates.values())
    bases = dict.fromkeys(item.basis for item in estimates.values())
    return f"about {duration(total)} ({'; '.join(bases)})"


def total_flops(recipe: Recipe) -> float:
    """The FLOPs of a whole trial: training, its evaluations, and the test."""
    training, evaluation = recipe.training, recipe.evaluation
    sizes = sizes_of(recipe)
    if sizes.cutoffs:  # other words are rarely computed
        sizes = replace(sizes, cutoffs=(), vocab=sizes.cutoffs[0])
    steps = cost_model.training_flops(replace(sizes, batch=training.batch_size)).value * training.max_steps
    evaluated = (
        training.max_steps // (evaluation.every or training.max_steps) * _examples(recipe, evaluation.split)
    )
    tested = _examples(recipe, "test") if evaluation.test else 0
    return float(steps + cost_model.forward_flops(sizes).value * (evaluated + tested))


def _examples(recipe: Recipe, split: str) -> int:
    """The number of examples of a split, as far as the recipe says it."""
    limit: int | None = getattr(recipe.data, f"{split}_examples")
    if recipe.data.name.startswith(SYNTHETIC):
        return min(limit or 64, 64)
    generated = recipe.data.options.get(split)
    return limit or (generated if isinstance(generated, int) else 2000)


def _on_this_machine(results: Iterable[TrialResult]) -> list[TrialResult]:
    """The results that were measured on such a machine."""
    found = list(results)
    if not found:
        return []
    from mgk._util.machine import describe

    here = describe()
    kind = {"processor": here.processor, "cores": here.cores, "accelerator": here.accelerator}
    return [result for result in found if kind.items() <= result.machine.items()]


def _rate(recipe: Recipe) -> float:
    """FLOP/s of a training step of one layer of the recipe's model."""
    length = min(recipe.data.max_length or _MAX_LENGTH, _MAX_LENGTH)
    batch = min(recipe.training.batch_size, max(1, _TIMED_PAIRS // length**2))
    layer = replace(sizes_of(recipe), layers=1, head="none", max_positions=None)
    return _timed_rate(replace(layer, length=length, batch=batch))


@lru_cache(maxsize=64)
def _timed_rate(sizes: Sizes) -> float:
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
    up = torch.nn.Linear(sizes.hidden, sizes.intermediate)
    down = torch.nn.Linear(sizes.intermediate, sizes.hidden)
    x = torch.randn(sizes.batch, sizes.length, sizes.hidden)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        y = x + attention(x, is_causal=sizes.causal)
        (y + down(torch.nn.functional.gelu(up(y)))).square().mean().backward()
        seconds.append(time.perf_counter() - begin)
    return cost_model.training_flops(sizes).value / min(seconds[1:])
