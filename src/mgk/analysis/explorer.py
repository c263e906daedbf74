"""What a model does with one text: attention, components, prediction.

For :mod:`mgk.models` and Hugging Face models that return attentions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mgk._util.errors import UsageError, first_line
from mgk.analysis.attention_calls import AttentionCall, recorded_calls
from mgk.analysis.attention_maps import inference

Array = NDArray[np.float32]
Candidates = tuple[tuple[str, float], ...]

# Tokens or labels that a prediction lists.
_MOST_CANDIDATES = 6


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer.

    Attributes:
        weights: A_ij (H, L, L).
        responsibilities: gamma_ijr (H, M, L, L); None for one component.
        prior: pi_r (H, M), the mean over positions; None likewise.
    """

    weights: Array
    responsibilities: Array | None = None
    prior: Array | None = None

    @property
    def num_components(self) -> int:
        """M."""
        return 1 if self.responsibilities is None else self.responsibilities.shape[1]


@dataclass(frozen=True)
class Prediction:
    """What the model answers.

    Attributes:
        kind: "label" of the text, or by position "next", "token" or "tag".
        candidates: the most probable ones with their probabilities; one entry, or one for
            each position.
        actual: of "next": the probability of the text's own next token.
    """

    kind: Literal["label", "next", "token", "tag"]
    candidates: tuple[Candidates, ...]
    actual: tuple[float, ...] = ()


@dataclass(frozen=True)
class Pixels:
    """An image as a sequence: its width, and the colour #rrggbb of each token."""

    width: int
    colours: tuple[str, ...]


@dataclass(frozen=True)
class ModelInput:
    """One example for one model.

    Attributes:
        inputs: what the model is called with, without a batch dimension.
        tokens: what each position stands for.
        name_of: the text of a token id; None where the model has no vocabulary.
        pixels: of an image.
    """

    inputs: Mapping[str, Tensor]
    tokens: tuple[str, ...]
    name_of: Callable[[int], str] | None = None
    pixels: Pixels | None = None


@dataclass(frozen=True)
class Exploration:
    """A model, its kind and size, and what it does with one example."""

    name: str
    about: str
    example: ModelInput
    layers: tuple[LayerAttention, ...]
    prediction: Prediction | None


def explore(model: Any, example: ModelInput, *, name: str) -> Exploration:
    """Run a model of :mod:`mgk.models`, or "eager" of Hugging Face, on an example."""
    is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    called = model.get_encoder() if is_encoder_decoder else model
    with inference(called) as batch, recorded_calls(called) as calls:
        try:
            out = called(**batch(example.inputs), output_attentions=True)
        except Exception as error:  # models of others need inputs of all kinds
            if model.config.model_type == "mgk":
                raise
            raise UsageError(f"{name}: the model cannot read this: {first_line(error)}") from error
    with torch.no_grad():
        layers = _layers(out, tuple(calls), len(example.tokens), name)
        logits = getattr(out, "logits", None)
        is_causal = all(not np.triu(layer.weights, 1).any() for layer in layers)
        prediction = None
        if logits is not None:
            prediction = _prediction(logits[0].float(), model.config, example, is_causal)
    return Exploration(name, _about(model, layers), example, layers, prediction)


def _layers(out: Any, calls: Sequence[AttentionCall], length: int, name: str) -> tuple[LayerAttention, ...]:
    """From what the model returns, or from its calls of mixture attention."""
    given = getattr(out, "attentions", None) or ()
    is_complete = bool(given) and all(weights is not None for weights in given)
    if not is_complete and not calls:
        kind = type(out).__name__
        raise UsageError(f"{name}: {kind} has no attentions: this model does not return them")
    maps = [weights[0] for weights in given] if is_complete else [call.weights() for call in calls]
    if any(weights.shape[1:] != (length, length) for weights in maps):
        got = tuple(maps[0].shape[1:])
        raise UsageError(f"{name}: attention maps must be {length} x {length}, got {got}")
    of_layers = list(calls) if len(calls) == len(maps) else [None] * len(maps)
    return tuple(_layer(weights, call) for weights, call in zip(maps, of_layers, strict=True))


def _layer(weights: Tensor, call: AttentionCall | None) -> LayerAttention:
    if call is None or call.module.num_mixtures == 1:
        return LayerAttention(_array(weights))
    found = call.components()
    return LayerAttention(_array(weights), _array(found.responsibilities), _array(found.prior))


def _prediction(logits: Tensor, config: Any, example: ModelInput, is_causal: bool) -> Prediction | None:
    """From logits (C,), or (L, C) at each position."""
    if logits.ndim not in (1, 2) or (logits.ndim == 2 and len(logits) != len(example.tokens)):
        return None
    rows = logits.softmax(-1).reshape(-1, logits.shape[-1]).cpu()
    is_vocabulary = logits.ndim == 2 and logits.shape[-1] == getattr(config, "vocab_size", None)
    name_of = example.name_of
    if not is_vocabulary or name_of is None:
        labels = config.id2label
        name_of = lambda index: str(labels.get(index, index))  # noqa: E731
    best = rows.topk(min(_MOST_CANDIDATES, rows.shape[-1]))
    candidates = tuple(
        tuple((name_of(int(index)), float(value)) for value, index in zip(values, places, strict=True))
        for values, places in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )
    if logits.ndim == 1:
        return Prediction("label", candidates)
    if not is_vocabulary:
        return Prediction("tag", candidates)
    if not is_causal:
        return Prediction("token", candidates)
    following = example.inputs["input_ids"][1:, None].cpu()
    return Prediction("next", candidates, tuple(rows[:-1].gather(1, following)[:, 0].tolist()))


def _about(model: Any, layers: Sequence[LayerAttention]) -> str:
    """Such as "smgk: 4 layers, 2 heads, 2 components a key, ..."."""
    first = layers[0]
    kind = getattr(model.config, "attention", None) or model.config.model_type
    counts = [(len(layers), "layer"), (len(first.weights), "head")]
    if first.num_components > 1:
        counts.append((first.num_components, "component"))
    parts = [f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts]
    if first.num_components > 1:
        parts[-1] += " a key"
    return f"{kind}: {', '.join(parts)}, {sum(p.numel() for p in model.parameters()):,} parameters"


def _array(values: Tensor) -> Array:
    return values.float().cpu().numpy()
