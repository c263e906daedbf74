"""The time of a training step and of a generated token."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from mgk._util.machine import cpu_threads, describe
from mgk.experiments.trials import Trial
from mgk.training.recipe import Recipe
from mgk.training.tasks import make_model, open_data

Work = Callable[[], object]
# Of ``mgk.bench.timing``: seconds by name and round.
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


def _context(recipe: Recipe) -> int:
    assert recipe.data.max_length is not None
    return recipe.data.max_length


def _generated(recipe: Recipe) -> int:
    """Tokens that are generated: the second half of the context."""
    return _context(recipe) // 2


def _works(recipe: Recipe) -> tuple[Work, Work]:
    """An optimizer step of random tokens, and the second half of a text."""
    torch.manual_seed(0)
    model = make_model(recipe, open_data(recipe.data))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    length, count = _context(recipe), _generated(recipe)
    ids = torch.randint(model.config.vocab_size, (recipe.training.batch_size, length))
    prompt = ids[:1, : length - count]

    def step() -> None:
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def write() -> None:
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, **options)

    return step, write
