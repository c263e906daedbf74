"""Explorations with known numbers, for the page's tests."""

import numpy as np

from mgk.analysis.explorer import Exploration, LayerAttention, ModelInput, Pixels, Prediction


def softmax(scores, axis=-1):
    scores = np.exp(scores - scores.max(axis, keepdims=True))
    return (scores / scores.sum(axis, keepdims=True)).astype(np.float32)


def exploration(
    name="smgk", *, tokens=None, layers=2, heads=2, components=2, causal=True, kind="next", seed=0, spread=2.0
):
    """Random attention; ``spread`` is the standard deviation of the scores."""
    random = np.random.default_rng(seed)
    tokens = tuple(
        tokens or ["The", "bank", "of", "the", "river", "and", "the", "bank", "of", "the", "town", "."]
    )
    length = len(tokens)
    found = []
    for _ in range(layers):
        scores = spread * random.standard_normal((heads, length, length))
        if causal:
            scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        gamma = softmax(2 * random.standard_normal((heads, components, length, length)), 1)
        prior = softmax(random.standard_normal((heads, components)))
        mixture = (gamma, prior) if components > 1 else (None, None)
        found.append(LayerAttention(softmax(scores), *mixture))
    rows = 1 if kind == "label" else length
    values = softmax(2 * random.standard_normal((rows, 4)))
    candidates = tuple(
        tuple((f"word{n}", float(value)) for n, value in enumerate(np.sort(row)[::-1])) for row in values
    )
    actual = tuple(random.random(length - 1).tolist()) if kind == "next" else ()
    about = f"{name}: {layers} layers, {heads} heads"
    return Exploration(name, about, ModelInput({}, tokens), tuple(found), Prediction(kind, candidates, actual))


def image(width=8, first=()):
    """An image of width x width grey pixels, classified, with tokens before them."""
    shades = [(row * width + column) * 255 // width**2 for row in range(width) for column in range(width)]
    found = exploration("image", tokens=[*first, *map(str, shades)], causal=False, kind="label")
    pixels = Pixels(width, tuple(f"#{shade:02x}{shade:02x}{shade:02x}" for shade in shades))
    example = ModelInput({}, found.example.tokens, None, pixels)
    return Exploration(found.name, found.about, example, found.layers, found.prediction)
