"""Training steps of the laptop recipes by parts; packed against padded rows."""

import tempfile
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mgk.bench import timing
from mgk.bench.registry import StepsSettings
from mgk.bench.runner import OnStep, Outcome, Row
from mgk.bench.timing import Steps
from mgk.bench.train import Batch, bare_step
from mgk.data.batches import StepBatches
from mgk.data.task_registry import find_task
from mgk.models import MgkConfig
from mgk.training.recipe import Recipe, load_recipe
from mgk.training.tasks import count, lengths, make_model, model_class, num_tokens, open_data

# The vocabulary of a task; the lengths are those of the recipe.
_VOCABULARIES = {"listops": 16, "text": 257, "retrieval": 257, "wikitext-2": 33278}
_ROWS = ("padded", "grouped", "packed")
# Batches that are sorted together: grouped or not, the same examples.
_PACKED_BATCHES = 50
_PASSES = 5  # over them; the median time of each batch counts
# How the names of a profile's events begin; others are the rest.
PARTS = {
    "attention": ("_Mixture", "mgk::"),
    "products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "dropout": ("_Dropout", "aten::bernoulli", "aten::dropout"),
    "normalisation": ("aten::native_layer_norm",),
    "activation": ("aten::gelu",),
    "loss": ("aten::_log_softmax", "aten::nll", "aten::exp_", "aten::scatter"),
    "optimizer": ("Optimizer.", "aten::_fused_adamw"),
}


def run(settings: StepsSettings, on_step: OnStep) -> Outcome:
    """A row per recipe with its parts, then padded, grouped and packed rows."""
    runs = len(_ROWS) * (_PACKED_BATCHES * _PASSES + 1) * settings.packing
    steps = Steps(on_step, len(settings.tasks) + runs)
    rows = []
    for task in settings.tasks:
        rows.append(_parts(task, settings))
        steps()
    if settings.packing:
        rows += _packed_and_padded(settings, steps)
    return Outcome(rows)


def _recipe(task: str, settings: StepsSettings, **changes: Any) -> Recipe:
    heads = {} if task.startswith("wikitext") else {"model.num_attention_heads": settings.heads}
    return load_recipe(task, "laptop", overrides={"model.attention": settings.attention, **heads, **changes})


def random_batch(recipe: Recipe, task: str) -> Batch:
    """A batch of the recipe's sizes, without padding; its tokens are random."""
    size, length = recipe.training.batch_size, recipe.data.max_length or find_task(task).max_length
    ids = torch.randint(1, _VOCABULARIES[task], (size, length))
    kind = find_task(task).kind
    if kind == "language":
        return {"input_ids": ids, "shift_labels": ids.roll(-1, 1)}
    batch = {"labels": torch.randint(find_task(task).num_labels, (size,))}
    for suffix in ("", "_2") if kind == "pair" else ("",):
        batch |= {f"input_ids{suffix}": ids, f"attention_mask{suffix}": torch.ones_like(ids)}
    return batch


def _parts(task: str, settings: StepsSettings) -> Row:
    """The time of a step, and the share of each part by a profile."""
    recipe = _recipe(task, settings)
    values = {"vocab_size": _VOCABULARIES[task], **recipe.model.given()}
    values["max_position_embeddings"] = recipe.data.max_length or find_task(task).max_length
    if find_task(task).kind != "language":
        values["num_labels"] = find_task(task).num_labels
    torch.manual_seed(0)
    batch = random_batch(recipe, task)
    step = bare_step(model_class(find_task(task))(MgkConfig(**values)).train())
    seconds = [_seconds(step, batch) for _ in range(settings.rounds + 1)][1:]
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(settings.rounds):
            step(batch)
    shares = dict.fromkeys((*PARTS, "rest"), 0.0)
    for event in profiled.key_averages():
        parts = (part for part, names in PARTS.items() if event.key.startswith(names))
        shares[next(parts, "rest")] += event.self_cpu_time_total
    total = sum(shares.values())
    sizes = {"batch": recipe.training.batch_size, "length": values["max_position_embeddings"]}
    model = {"attention": values["attention"], "heads": values["num_attention_heads"]}
    shared = {f"{part}_share": share / total for part, share in shares.items()}
    milliseconds = {"milliseconds": median(seconds) * 1e3}
    return {"experiment": "parts", "task": task, "model": model, **sizes, **milliseconds, **shared}


def _seconds(step: Callable[[Batch], float], batch: Batch) -> float:
    start = perf_counter()
    step(batch)
    return perf_counter() - start


def _packed_and_padded(settings: StepsSettings, steps: Steps) -> Iterator[Row]:
    """Tokens per second of rows: padded, grouped by length, and packed."""
    works, tokens, shares = {}, {}, {}
    options = dict(load_recipe("listops", "laptop").data.options or {})
    options |= {"train": 640, "validation": 64, "test": 64}
    with tempfile.TemporaryDirectory() as folder:
        for name in _ROWS:
            changes = {"data.options": options, "data.folder": folder, "data.packing": name == "packed"}
            recipe = _recipe("listops", settings, **changes)
            data = open_data(recipe.data)
            examples = data.split("train")
            by_length = lengths(examples) if name == "grouped" else None
            size = recipe.training.batch_size
            indices = StepBatches(count(examples), size, _PACKED_BATCHES, lengths=by_length)
            batches = [data.collator([examples[i] for i in part]) for part in indices]
            torch.manual_seed(0)
            model = make_model(recipe, data)
            tokens[name] = sum(num_tokens(batch, model.config) for batch in batches)
            shares[name] = tokens[name] / sum(batch["input_ids"].numel() for batch in batches)
            warm_up = batches[-1]
            step, rest = bare_step(model.train()), iter([warm_up, *batches * _PASSES])
            works[name] = lambda step=step, rest=rest: step(next(rest))
    seconds = timing.measure(works, rounds=_PACKED_BATCHES * _PASSES, on_run=steps)
    speeds = {}
    for name, times in seconds.items():
        of_batches = (times[first::_PACKED_BATCHES] for first in range(_PACKED_BATCHES))
        speeds[name] = tokens[name] / sum(map(median, of_batches))
    for name, speed in speeds.items():
        values = {"tokens_per_second": speed, "times_grouped": speed / speeds["grouped"]}
        yield {"experiment": "packing", "task": "listops", "rows": name, "token_share": shares[name], **values}
