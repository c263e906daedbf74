"""Small recipes and what is compared between runs of them."""

from pathlib import Path
from typing import Any

from mgk.training import read_metrics
from mgk.training.recipe import Recipe, load_recipe

TINY = {
    "model.num_hidden_layers": 1,
    "model.num_attention_heads": 2,
    "model.head_dim": 4,
    "model.hidden_size": 8,
    "model.intermediate_size": 8,
    "training.batch_size": 4,
    "training.max_steps": 6,
    "training.warmup_steps": 1,
    "training.log_every": 1,
    "training.save_every": 2,
    "evaluation.every": 3,
    "data.max_length": 32,
    "data.validation_examples": 8,
    "data.test_examples": 9,
}
# Clocks differ from run to run; all the rest is the same to the last digit.
_CLOCKS = ("tokens_per_second", "seconds")


def tiny(task: str = "listops", **overrides: Any) -> Recipe:
    """A smoke recipe that takes a moment; sections and fields are joined by two underscores."""
    changes = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_recipe(task, "smoke", overrides={**TINY, **changes})


def trajectory(run: Path) -> list[dict[str, float]]:
    """The metrics of a run without the clocks."""
    return [{name: value for name, value in line.items() if name not in _CLOCKS} for line in read_metrics(run)]


def weights(run: Path) -> bytes:
    """The weights that a run has kept."""
    return (run / "model" / "model.safetensors").read_bytes()
