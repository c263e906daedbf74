"""The page of ``mgk explore``: what is stored, how exactly, and in how many bytes."""

import base64
import json
import re
import zlib

import numpy as np
import pytest
from explorer_example import exploration, image

from mgk.experiments.render.explorer_page import MOST_BYTES, PRECISIONS, Precision, encode, explorer_page


def stored(page):
    """The data inside a page."""
    return json.loads(re.search(r'id="explorer-data">(.*?)</script>', page, re.DOTALL)[1])


def decode(model, steps):
    """Weights (H, L, L) and responsibilities (H, M, L, L) of every layer, as the script reads them."""
    data, length, place = zlib.decompress(base64.b64decode(model["data"])), len(model["tokens"]), 0

    def take(count, dtype, *shape):
        nonlocal place
        values = np.frombuffer(data, dtype, count, place).reshape(shape)
        place += values.nbytes
        return values

    for layer in model["layers"]:
        heads, components, pairs = layer["heads"], layer["components"], length * length
        maxima = take(heads * length, "<u2", heads, length, 1) / 65535
        weights = maxima * (take(heads * pairs, np.uint8, heads, length, length) / steps["levels"]) ** 2
        shares = take(heads * (components - 1) * pairs, np.uint8, heads, components - 1, length, length)
        shares = shares / steps["shares"]
        yield weights, np.concatenate([shares, 1 - shares.sum(1, keepdims=True)], 1)
    assert place == len(data)


@pytest.mark.parametrize("components", [1, 2, 3])
def test_weights_and_responsibilities_come_back(components):
    found = exploration(components=components, layers=3)
    data = stored(explorer_page([found]))
    assert data["steps"] == {"levels": 255, "shares": 63}
    for (weights, shares), layer in zip(decode(data["models"][0], data["steps"]), found.layers, strict=True):
        assert np.abs(weights - layer.weights).max() < 0.005
        np.testing.assert_allclose(weights.sum(-1), 1, atol=0.02)
        if components > 1:
            is_stored = weights > 0
            error = np.abs(shares - layer.responsibilities).max(1)
            assert error[is_stored].max() < components / 63


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_coarser_page_has_the_largest_weights_right(precision):
    found = exploration(components=1)
    data = {"tokens": found.example.tokens, "layers": [{"heads": 2, "components": 1}] * 2}
    data["data"] = base64.b64encode(encode(found.layers, precision))
    for (weights, _), layer in zip(
        decode(data, {"levels": precision.levels, "shares": 1}), found.layers, strict=True
    ):
        largest = layer.weights.max(-1)
        np.testing.assert_allclose(weights.max(-1), largest, atol=1e-4)
        step = 1 / precision.levels + precision.floor
        assert (np.abs(weights - layer.weights) <= largest[..., None] * step + 1e-4).all()


@pytest.mark.parametrize("spread", [0.1, 2.0])
def test_256_tokens_of_two_models_take_less_than_3_mb(spread):
    tokens = [f"token{n}" for n in range(256)]
    options = {"tokens": tokens, "layers": 3, "spread": spread, "causal": False}
    page = explorer_page(
        [exploration(heads=4, **options), exploration("softmax", heads=8, components=1, **options)]
    )
    assert len(page.encode()) < MOST_BYTES == 3_000_000
    assert stored(page)["steps"] != {"levels": 255, "shares": 63}


def test_rows_without_any_weight_are_stored():
    found = exploration(components=1, layers=1)
    found.layers[0].weights[:, 3] = 0
    assert zlib.decompress(encode(found.layers, Precision(255, 63)))


def test_no_token_can_end_the_script():
    tokens = ["</script><script>alert(1)</script>", "<!--", "&amp;", "\u2028", '"', "\\"]
    page = explorer_page([exploration(tokens=tokens)], note="a < b")
    assert page.count("</script>") == 2
    assert "<script>alert" not in page
    assert stored(page)["models"][0]["tokens"] == tokens
    assert "a &lt; b" in page


def test_the_page_needs_no_network():
    page = explorer_page([exploration(), image()])
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", page)
    assert "http" not in page.replace("http://www.w3.org", "")
