"""Analysis of trained models in small arrays: maps, ranks, head similarity, components.

Made right after a trial that a figure needs, so that figures can be drawn without the
run. Does not import torch until a model is analyzed.
"""

import base64
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import PlainSerializer, PlainValidator

from mgk.analysis.attention_maps import AttentionMaps, Map
from mgk.analysis.formula import Quantity
from mgk.experiments.model_spec import HEAD_OF_KIND
from mgk.experiments.trials import Trial

if TYPE_CHECKING:
    from torch.utils.data import ConcatDataset, Dataset
    from transformers import PreTrainedModel

    from mgk.training.tasks import Batch, TaskData

# Pixels of a map's side: enough to see its pattern. Where a model has many
# maps, a page shows them small.
_SIDE, _SMALL_SIDE, _MANY_MAPS = 96, 48, 24
# Pixels of a map's side on the page of a comparison, which has few maps.
COMPARISON_SIDE = 160
# Examples over which head similarity and the use of components are averaged.
_EXAMPLES = 32
_MAX_TEXT = 400
# Tokens of the prompt that language models continue, and repetitions.
_PROMPT_TOKENS, _WRITING_ROUNDS = 16, 3

OnStep = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class LayerRanks:
    """Ranks, effective ranks and lengths N of sampled attention matrices."""

    ranks: tuple[int, ...]
    effective: tuple[float, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LayerUsage:
    """:class:`mgk.analysis.mixture_usage.MixtureUsage` as lists."""

    prior: list[list[float]]
    share: list[list[float]]
    certainty: list[float]
    distance: list[list[list[float]]]


def _pack_map(weights: Map) -> dict[str, Any]:
    largest = float(weights.max()) or 1.0
    levels = np.rint(weights / largest * 255).astype(np.uint8)
    return {
        "max": float(f"{largest:.5g}"),
        "levels": base64.b64encode(zlib.compress(levels.tobytes(), 9)).decode(),
    }


def _unpack_map(data: Mapping[str, Any], side: int) -> Map:
    levels = np.frombuffer(zlib.decompress(base64.b64decode(data["levels"])), np.uint8).reshape(side, side)
    return (levels * np.float32(data["max"] / 255)).astype(np.float32)


def _pack(maps: AttentionMaps) -> dict[str, Any]:
    weights = [[_pack_map(weights) for weights in layer] for layer in maps.weights]
    return {"layers": maps.layers, "heads": maps.heads, "side": maps.weights.shape[-1], "weights": weights}


def _unpack(data: Any) -> AttentionMaps:
    weights = [[_unpack_map(item, data["side"]) for item in layer] for layer in data["weights"]]
    return AttentionMaps(np.array(weights), tuple(data["layers"]), tuple(data["heads"]))


@dataclass(frozen=True, kw_only=True)
class ModelAnalysis:
    """The analysis of one model.

    Attributes:
        tokens: of the example that the maps are of.
        maps: averaged down; stored in steps of 1/255 of the largest weight.
        head_similarity: mean over pairs of heads of a layer, by example; empty
            for one head.
        usage: of the components of a mixture, a layer each.
    """

    format: Literal[1, 2] = 2
    trial: Trial
    tokens: int
    maps: Annotated[AttentionMaps, PlainValidator(_unpack), PlainSerializer(_pack)]
    ranks: tuple[LayerRanks, ...]
    head_similarity: tuple[float, ...]
    usage: tuple[LayerUsage, ...]


@dataclass(frozen=True, kw_only=True)
class Writing:
    """What a language model writes.

    Attributes:
        text: a prompt from the test split and its continuation, sampled.
        tokens_per_second: the best of some interleaved runs.
        cache_bytes: of keys and values, or of a state, of an example.
    """

    text: str
    tokens_per_second: float
    cache_bytes: int


@dataclass(frozen=True)
class Inspection:
    """The models of a comparison on one example of the test split.

    Attributes:
        flops: of the forward pass of one example of mean length, by the name of
            the model.
        example: its text, truncated; of images a description.
        writings: of language models, by name.
        step_seconds: of a training step of language models, by name, timed in turns.
    """

    flops: dict[str, Quantity]
    length: int
    maps: dict[str, AttentionMaps]
    example: str
    tokens: int
    writings: dict[str, Writing] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)


def analyze_model(
    trial: Trial, run: Path, *, rank_samples: int, on_step: OnStep = lambda done, total: None
) -> ModelAnalysis:
    """The analysis of the model of a finished run.

    Args:
        rank_samples: attention matrices of each layer whose ranks are taken.
    """
    from mgk.analysis.attention_maps import attention_maps
    from mgk.analysis.attention_rank import rank_distributions
    from mgk.analysis.mixture_usage import mixture_usage
    from mgk.analysis.redundancy import redundancy
    from mgk.training.tasks import count, load_model, open_data, quiet

    with quiet():
        data = open_data(trial.recipe.data)
        model = load_model(run, data.task)
        test = data.split("test")
        # the first segment of running text begins it: its maps are not typical
        number = min(1, count(test) - 1) if data.is_language else _typical_example(test)
        (whole,) = attention_maps(model, [test[number]])
        side = _SIDE if whole.weights.shape[0] * whole.weights.shape[1] <= _MANY_MAPS else _SMALL_SIDE
        sampled = rank_examples(data, trial.recipe.evaluation.split)
        ranks = rank_distributions(model, sampled, count=rank_samples, on_step=on_step)
        places = np.linspace(0, count(test) - 1, min(_EXAMPLES, count(test))).astype(int)
        examples = [test[int(place)] for place in places]
        similarity = [redundancy(model, [example]).within_layers for example in examples]
        usage = mixture_usage(model, examples) if trial.model.is_mixture else []
    return ModelAnalysis(
        trial=trial,
        tokens=whole.weights.shape[-1],
        maps=AttentionMaps(averaged(whole.weights, side), whole.layers, whole.heads),
        ranks=tuple(
            LayerRanks(
                ranks=tuple(layer.ranks.tolist()),
                effective=tuple(layer.effective.round(2).tolist()),
                lengths=tuple(layer.lengths.tolist()),
            )
            for layer in ranks
        ),
        head_similarity=tuple(round(value, 5) for value in similarity if value is not None),
        usage=tuple(
            LayerUsage(
                **{
                    name: getattr(layer, name).double().round(decimals=4).tolist()
                    for name in ("prior", "share", "certainty", "distance")
                }
            )
            for layer in usage
        ),
    )


def inspect_models(runs: Mapping[str, Path], send: Callable[[Any], None] = lambda message: None) -> Inspection:
    """FLOPs, attention maps and speed of the models of finished runs, by model."""
    from mgk.analysis.attention_maps import attention_maps
    from mgk.analysis.cost_model import Sizes, forward_flops
    from mgk.experiments.step_times import step_seconds
    from mgk.training.run_dir import read_run_recipe
    from mgk.training.tasks import lengths, load_model, open_data, quiet

    with quiet():
        recipe = read_run_recipe(next(iter(runs.values())))
        data = open_data(recipe.data)
        test = data.split("test")
        all_lengths = lengths(test)
        example = test[_typical_example(test)]
        pixels = example.get("pixel_values")
        tokens = len(example["input_ids"]) if pixels is None else pixels.shape[-2] * pixels.shape[-1]
        length = tokens if all_lengths is None else round(float(all_lengths.mean()))
        maps, flops, models = {}, {}, {}
        for name, run in runs.items():
            models[name] = model = load_model(run, data.task)
            length = model.config.num_patches or length
            sizes = Sizes.from_config(model.config, length=length, head=HEAD_OF_KIND[data.task.kind])
            flops[name] = forward_flops(sizes)
            (whole,) = attention_maps(model, [example])
            maps[name] = AttentionMaps(averaged(whole.weights, COMPARISON_SIDE), whole.layers, whole.heads)
        writings = _writings(models, data, example) if data.is_language else {}
        seconds = step_seconds(models, recipe) if data.is_language else {}
    return Inspection(flops, length, maps, _text(data, example), tokens, writings, seconds)


def _writings(
    models: "Mapping[str, PreTrainedModel]", data: "TaskData", example: "Batch"
) -> dict[str, Writing]:
    """The models continue the beginning of an example, in turns."""
    import torch

    from mgk.analysis.cost_model import Sizes, cache_bytes

    tokenizer = data.tokenizer()
    assert tokenizer is not None
    prompt = example["input_ids"][None, :_PROMPT_TOKENS]
    length = int(example["input_ids"].shape[-1])
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.8}
    options |= {"eos_token_id": None, "pad_token_id": 0}
    texts: dict[str, str] = {}
    rates = dict.fromkeys(models, 0.0)
    for number in range(_WRITING_ROUNDS):
        for name, model in models.items():
            torch.manual_seed(number)
            begin = time.perf_counter()
            ids = model.eval().generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=length - _PROMPT_TOKENS,
                **options,
            )
            rates[name] = max(rates[name], (length - _PROMPT_TOKENS) / (time.perf_counter() - begin))
            texts.setdefault(name, str(tokenizer.decode(ids[0])))
    sizes = {
        name: Sizes.from_config(model.config, length=length, head="language") for name, model in models.items()
    }
    return {
        name: Writing(
            text=texts[name], tokens_per_second=rates[name], cache_bytes=cache_bytes(sizes[name]).value
        )
        for name in models
    }


def averaged(weights: Map, side: int) -> Map:
    """Maps (..., L, L) of at most ``side`` rows: mean queries, summed keys."""
    size = weights.shape[-1]
    if size <= side:
        return weights
    bounds = np.arange(side) * size // side
    widths = np.diff([*bounds, size]).astype(np.float32)
    keys = np.add.reduceat(weights, bounds, axis=-1)
    return np.asarray(np.add.reduceat(keys, bounds, axis=-2) / widths[:, None], np.float32)


def rank_examples(data: "TaskData", split: str) -> "ConcatDataset[Batch]":
    """The examples whose ranks are taken, more than the test split.

    A shorter last segment of running text is left out: its rank is lower for
    any model.
    """
    from torch.utils.data import ConcatDataset, Subset

    from mgk.training.tasks import count

    parts = [data.split(name) for name in dict.fromkeys(("test", split))]
    if data.is_language:
        parts = [
            Subset(part, range(count(part) - 1))
            if part[count(part) - 1]["input_ids"].shape[-1] < part[0]["input_ids"].shape[-1]
            else part
            for part in parts
        ]
    return ConcatDataset(parts)


def _typical_example(test: "Dataset[Batch]") -> int:
    """The first example whose length is nearest to the mean."""
    from mgk.training.tasks import lengths

    all_lengths = lengths(test)
    return 0 if all_lengths is None else int(np.abs(all_lengths - all_lengths.mean()).argmin())


def _text(data: "TaskData", example: "Batch") -> str:
    tokenizer = data.tokenizer()
    if tokenizer is None:
        return f"an image of {data.manifest.facts['height']} x {data.manifest.facts['width']} pixels"
    text = str(tokenizer.decode(example["input_ids"].tolist()))
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + " …"
