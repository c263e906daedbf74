"""The time of a training step and of a generated token."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from mgk._util.machine import cpu_threads, describe
from mgk.experiments.trials import Trial
from mgk.training.recipe import Recipe
from mgk.training.tasks import make_model, open_data

Work = Callable[[], object]
# ``mgk.bench.timing.measure``: seconds by name and round.
Measure = Callable[..., dict[str, list[float]]]


def measure_times(
    trials: Sequence[Trial], measure: Measure, *, rounds: int, on_run: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Milliseconds by model: medians over interleaved rounds, one thread.

    Args:
        trials: of language models, one of each.
        measure: that times them.
    """
    with cpu_threads(1):
        works = {trial.model.name: _works(trial.recipe) for trial in trials}
        steps, tokens = (
            measure({name: pair[place] for name, pair in works.items()}, rounds=rounds, on_run=on_run)
            for place in (0, 1)
        )
    models = {
        trial.model.name: {
            "step": 1e3 * median(steps[trial.model.name]),
            "token": 1e3 * median(tokens[trial.model.name]) / _generated(trial.recipe),
        }
        for trial in trials
    }
    return {"format": 1, "machine": str(describe()), "rounds": rounds, "models": models}


def step_seconds(
    models: Mapping[str, PreTrainedModel], recipe: Recipe, *, rounds: int = 15
) -> dict[str, float]:
    """Seconds of an optimizer step by model: medians over interleaved rounds.

    The models are language models, and are changed.
    """
    steps = {name: _step(model, recipe) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    with cpu_threads(recipe.training.threads):
        for number in range(rounds + 1):
            for name, step in steps.items():
                begin = time.perf_counter()
                step()
                if number > 0:  # round 0 warms up
                    seconds[name].append(time.perf_counter() - begin)
    return {name: median(times) for name, times in seconds.items()}


def _context(recipe: Recipe) -> int:
    assert recipe.data.max_length is not None
    return recipe.data.max_length


def _generated(recipe: Recipe) -> int:
    """Tokens that are generated: the second half of the context."""
    return _context(recipe) // 2


def _step(model: PreTrainedModel, recipe: Recipe) -> Work:
    """An optimizer step of random tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(model.config.vocab_size, (recipe.training.batch_size, _context(recipe)))

    def step() -> None:
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _works(recipe: Recipe) -> tuple[Work, Work]:
    """An optimizer step, and the second half of a text."""
    torch.manual_seed(0)
    model = make_model(recipe, open_data(recipe.data))
    step, count = _step(model, recipe), _generated(recipe)
    prompt = torch.randint(model.config.vocab_size, (1, _context(recipe) - count))

    def write() -> None:
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, **options)

    return step, write
