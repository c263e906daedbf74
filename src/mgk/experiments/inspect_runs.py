"""A look into trained models: what they cost, and where their heads look on one example of the test split."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset
from transformers.utils import logging

from mgk._util.machine import describe
from mgk.analysis import cost_model
from mgk.analysis.attention_maps import AttentionMaps, Map, attention_maps
from mgk.analysis.cost_model import Head, Sizes
from mgk.experiments.compare.result import Look
from mgk.training.recipe import read_recipe
from mgk.training.run_dir import MODEL, RECIPE
from mgk.training.tasks import Batch, TaskData, count, lengths, model_class, open_data

_HEADS: dict[str, Head] = {
    "sequence": "classification",
    "image": "classification",
    "pair": "retrieval",
    "language": "language",
}
# Longer maps are averaged down: a page must stay small, and a screen shows no more.
MOST_PIXELS = 160
_LONGEST_TEXT = 400


def look_at_runs(runs: Mapping[str, Path]) -> Look:
    """Look into finished runs of one task; the names are those of the contenders."""
    logging.disable_progress_bar()  # a bar for each file of weights
    data = open_data(read_recipe(next(iter(runs.values())) / RECIPE).data)
    test = data.split("test")
    length, chance = _mean_length(data, test), chance_level(data, test)
    example = test[typical_example(test)]
    maps, flops = {}, {}
    for name, run in runs.items():
        model = model_class(data.task).from_pretrained(run / MODEL)
        length = model.config.num_patches or length
        sizes = Sizes.from_config(model.config, length=length, head=_HEADS[data.task.kind])
        flops[name] = cost_model.forward_flops(sizes)
        (whole,) = attention_maps(model, [example])
        maps[name] = AttentionMaps(averaged(whole.weights), whole.layers, whole.heads)
    machine = describe()
    return Look(flops, length, chance, maps, _text(data, example), _tokens(example), str(machine), machine.date)


def averaged(weights: Map, most: int = MOST_PIXELS) -> Map:
    """Maps (..., L, L) of at most ``most`` rows and columns: the mean over queries, the sum over keys."""
    size = weights.shape[-1]
    if size <= most:
        return weights
    bounds = np.arange(most) * size // most
    widths = np.diff([*bounds, size]).astype(np.float32)
    keys = np.add.reduceat(weights, bounds, axis=-1)
    return np.asarray(np.add.reduceat(keys, bounds, axis=-2) / widths[:, None], np.float32)


def _mean_length(data: TaskData, test: Dataset[Batch]) -> int:
    all_lengths = lengths(test)
    return _tokens(test[0]) if all_lengths is None else round(float(all_lengths.mean()))


def chance_level(data: TaskData, test: Dataset[Batch]) -> float | None:
    """Of always answering the most frequent class of the split; None for running text."""
    if data.is_language:
        return None
    labels = np.array([int(test[place]["labels"]) for place in range(count(test))])
    return float(np.bincount(labels).max() / len(labels))


def typical_example(test: Dataset[Batch]) -> int:
    """The first example whose length is nearest to the mean."""
    all_lengths = lengths(test)
    return 0 if all_lengths is None else int(np.abs(all_lengths - all_lengths.mean()).argmin())


def _tokens(example: Batch) -> int:
    pixels = example.get("pixel_values")
    return len(example["input_ids"]) if pixels is None else pixels.shape[-2] * pixels.shape[-1]


def _text(data: TaskData, example: Batch) -> str:
    tokenizer = data.tokenizer()
    if tokenizer is None:
        return f"an image of {data.manifest.facts['height']} x {data.manifest.facts['width']} pixels"
    text = str(tokenizer.decode(example["input_ids"].tolist()))
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + " …"
