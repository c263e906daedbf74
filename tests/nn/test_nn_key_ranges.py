"""The module with grouped heads, windows and segments: against repeated weights, masks, separate calls and caches."""

import itertools

import pytest
import torch
from recompute import EMBED_DIM, GAUSSIAN, LINEAR, VARIANTS, make, tokens

from mgk.nn import MixtureAttention
from support.versions import needs_fullgraph

KEY_VALUE = ("softmax", *GAUSSIAN)


def grouped(variant, **options):
    """Six query heads that read two key heads."""
    attn = MixtureAttention(
        EMBED_DIM, 6, num_key_value_heads=2, head_dim=4, variant=variant, **options
    ).double()
    with torch.no_grad():
        for parameter in attn.parameters():
            parameter.add_(torch.randn_like(parameter) / 4)
    return attn


def repeated(attn):
    """The module with six key heads that have the parameters of ``attn``, each three times."""
    full = MixtureAttention(EMBED_DIM, 6, head_dim=4, variant=attn.variant, window=attn.window).double()
    state = attn.state_dict()
    for name, x in state.items():
        if name.startswith(("k_proj", "v_proj")):
            state[name] = x.unflatten(0, (2, -1)).repeat_interleave(3, 0).flatten(0, 1)
        elif name.startswith(("shifts", "prior", "variance")):
            state[name] = x.repeat_interleave(3, 0)
    full.load_state_dict(state)
    return full


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_grouped_heads_equal_repeated_parameters(variant, is_causal):
    attn, x = grouped(variant), tokens(2, 9)
    out, weights = attn(x, is_causal=is_causal, need_weights=True)
    expected = repeated(attn)(x, is_causal=is_causal, need_weights=True)
    torch.testing.assert_close((out, weights), expected)
    assert weights.shape == (2, 6, 9, 9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_belongs_to_key_heads_is_smaller(variant):
    attn, mixtures = grouped(variant), 1 if variant in ("softmax", "linear") else 2
    assert attn.v_proj.weight.shape == (8, EMBED_DIM)
    assert attn.k_proj.weight.shape == (8 * attn.keys_per_token, EMBED_DIM)
    assert attn.o_proj.weight.shape == (EMBED_DIM, 24)
    if attn.shifts is not None:
        assert attn.shifts.shape == (2, 2, 4)
    if mixtures > 1:
        assert attn.prior.logits.shape == (2, 2)
    cache, x = attn.new_cache(), tokens(1, 5)
    attn(x, is_causal=True, cache=cache)
    full = repeated(attn).new_cache()
    repeated(attn)(x, is_causal=True, cache=full)
    assert 3 * cache.nbytes == full.nbytes


@pytest.mark.parametrize("options", [{"prior": "em"}, {"variance": "em"}], ids=str)
@pytest.mark.parametrize("variant", GAUSSIAN)
def test_the_m_step_counts_every_query_of_a_group(variant, options):
    attn, x = grouped(variant, **options), tokens(2, 9)
    attn(x)
    counts = (attn.prior if "prior" in options else attn.variance).counts
    torch.testing.assert_close(counts.sum().double(), torch.tensor(2.0 * 6 * 9 * 9), check_dtype=False)
    attn.m_step()
    assert attn(x).isfinite().all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [0, 2, (1, 3), (None, 1)], ids=str)
@pytest.mark.parametrize("variant", KEY_VALUE)
def test_a_window_equals_its_mask(variant, window, is_causal):
    attn, x = make(variant), tokens(2, 9)
    distance = torch.arange(9) - torch.arange(9)[:, None]  # j - i
    left, right = window if isinstance(window, tuple) else (window, window)
    mask = (distance >= -(9 if left is None else left)) & (distance <= right)
    expected = attn(x, attn_mask=mask, is_causal=is_causal, need_weights=True)
    attn.window = window
    torch.testing.assert_close(attn(x, is_causal=is_causal, need_weights=True), expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_segments_equal_separate_calls(variant, is_causal):
    attn, x = make(variant), tokens(1, 11)
    ids = torch.tensor([[3, 3, 3, 3, 0, 0, 3, 3, 3, 7, 7]])
    out, weights = attn(x, is_causal=is_causal, segment_ids=ids, need_weights=True)
    for start, stop in itertools.pairwise((0, 4, 6, 9, 11)):
        alone = attn(x[:, start:stop], is_causal=is_causal, need_weights=True)
        torch.testing.assert_close((out[:, start:stop], weights[:, :, start:stop, start:stop]), alone)


FEEDS = {"one go": [200], "chunks": [90, 1, 70, 39], "tokens": [150, *[1] * 50]}


@pytest.mark.parametrize("sizes", FEEDS.values(), ids=list(FEEDS))
@pytest.mark.parametrize("with_segments", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_in_parts_equals_one_pass(variant, with_segments, sizes):
    options = {} if variant in LINEAR else {"window": 7}
    attn, x = grouped(variant, **options), tokens(2, 200)
    cuts = torch.rand(2, 200, generator=torch.Generator().manual_seed(0)) < 0.1
    ids = cuts.cumsum(1) % 2
    mask = torch.rand(2, 200, generator=torch.Generator().manual_seed(1)) > 0.2
    segments = {"segment_ids": ids} if with_segments else {}
    whole = attn(x, is_causal=True, key_mask=mask, **segments)
    for with_grad in (False, True):
        cache, start, outputs = attn.new_cache(), 0, []
        for size in sizes:
            stop = start + size
            more = {name: value[:, :stop] for name, value in segments.items()}
            with torch.set_grad_enabled(with_grad):
                part = attn(x[:, start:stop], is_causal=True, key_mask=mask[:, :stop], cache=cache, **more)
            outputs.append(part)
            start = stop
        torch.testing.assert_close(torch.cat(outputs, 1), whole)
        assert cache.length == 200


@pytest.mark.parametrize("variant", KEY_VALUE)
def test_a_cache_with_a_window_forgets_and_counts_what_it_holds(variant):
    attn = make(variant, window=5)
    cache, plain = attn.new_cache(), make(variant).new_cache()
    with torch.no_grad():
        attn(tokens(1, 300), is_causal=True, cache=cache)
        make(variant)(tokens(1, 69), is_causal=True, cache=plain)
        assert cache.length == 300
        assert cache.nbytes == plain.nbytes  # 5 + 64 tokens
        for _ in range(400):
            attn(tokens(1, 1), is_causal=True, cache=cache)
    assert cache.length == 700
    assert cache.nbytes == plain.nbytes
    assert sum(x.numel() for x in cache._tensors) <= 5 * sum(x.numel() for x in plain._entries())


def test_weights_and_masks_keep_a_column_for_every_token():
    attn, x = make("mgk", window=3), tokens(2, 100)
    cache = attn.new_cache()
    mask = torch.rand(2, 1, 100, 100) > 0.2
    _, whole = attn(x, is_causal=True, attn_mask=mask, need_weights=True)
    attn(x[:, :90], is_causal=True, attn_mask=mask[:, :, :90, :90], cache=cache)
    _, weights = attn(x[:, 90:], is_causal=True, attn_mask=mask[:, :, 90:], cache=cache, need_weights=True)
    assert weights.shape == (2, 3, 10, 100)
    torch.testing.assert_close(weights, whole[:, :, 90:])


@pytest.mark.parametrize("dropped", [1, 64])
@pytest.mark.parametrize("variant", KEY_VALUE)
def test_a_cropped_and_reordered_cache_continues(variant, dropped):
    attn, x, index = grouped(variant, window=6), tokens(2, 150), torch.tensor([1, 1, 0])
    cache = attn.new_cache()
    attn(x, is_causal=True, cache=cache)
    cache.crop(150 - dropped)
    cache.reorder(index)
    more = tokens(3, 12)
    whole = attn(torch.cat([x[index, : 150 - dropped], more], 1), is_causal=True)[:, 150 - dropped :]
    parts = [attn(more[:, part], is_causal=True, cache=cache) for part in (slice(0, 1), slice(1, 12))]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_cropping_further_raises_and_emptying_works():
    attn, cache = make("mgk", window=6), make("mgk", window=6).new_cache()
    attn(tokens(1, 150), is_causal=True, cache=cache)
    with pytest.raises(ValueError, match="length must be 0 or from 86 to 150, got 85"):
        cache.crop(85)
    cache.crop(86)
    with pytest.raises(ValueError, match="length must be 0 or from 86 to 86, got 85"):
        cache.crop(85)
    cache.crop(0)
    assert (cache.length, cache.nbytes) == (0, 0)
    x = tokens(2, 9)
    torch.testing.assert_close(attn(x, is_causal=True, cache=cache), attn(x, is_causal=True))
    short = attn.new_cache()
    attn(tokens(1, 60), is_causal=True, cache=short)
    short.crop(3)  # nothing has been forgotten
    assert short.length == 3


BAD = {
    "heads that do not divide": (
        {"num_key_value_heads": 2},
        ValueError,
        "num_key_value_heads must divide num_heads=3, got 2",
    ),
    "no heads": ({"num_key_value_heads": 0}, ValueError, "num_key_value_heads must be at least 1"),
    "a negative window": ({"window": -1}, ValueError, "window must be at least 0"),
    "a float window": ({"window": 0.5}, TypeError, "window must be an int or a pair"),
    "a window of a linear state": (
        {"window": 3, "variant": "mlk"},
        ValueError,
        "window must be None for variant='mlk'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_raise_by_name(name):
    options, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        make(**options)


def test_bad_arguments_raise_by_name():
    x = tokens(2, 5)
    with pytest.raises(ValueError, match=r"window=2 .* cannot be used with context"):
        make("mgk", window=2)(x, context=x)
    with pytest.raises(ValueError, match="cache must be of a window with left=2, got one with left=1"):
        make("mgk", window=2)(x, is_causal=True, cache=make("mgk", window=1).new_cache())
    ids = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"segment_ids .* cannot be used with context"):
        make("mgk")(x, context=x, segment_ids=ids)
    for variant in ("mgk", "mlk"):
        with pytest.raises(TypeError, match="segment_ids must have one of the dtypes"):
            make(variant)(x, segment_ids=ids.double())
        attn = make(variant)
        cache = attn.new_cache()
        attn(x, is_causal=True, cache=cache)
        with pytest.raises(ValueError, match=r"segment_ids must have shape \(B, S\) = \(2, 10\)"):
            attn(x, is_causal=True, cache=cache, segment_ids=ids)


@needs_fullgraph
@pytest.mark.parametrize("variant", ["mgk", "mlk"])
def test_compiled_modules_equal_eager_ones(variant):
    torch.compiler.reset()
    attn, x = grouped(variant, **({"window": 3} if variant == "mgk" else {})), tokens(2, 20)
    ids = torch.arange(20).expand(2, 20) // 6
    compiled = torch.compile(attn, fullgraph=True, backend="aot_eager")
    options = {"is_causal": True, "segment_ids": ids}
    torch.testing.assert_close(compiled(x, **options), attn(x, **options))
