"""Decoding with a cache: the same output however the sequence is fed, in the memory that the variant promises."""

import itertools

import pytest
import torch
from recompute import GAUSSIAN, LINEAR, MIXTURES, VARIANTS, make, padding_mask, tokens
from torch.autograd import forward_ad
from torch.func import jvp

from mgk.nn import EMPrior, KeyValueCache, MixtureAttention, StateCache, rotary_tables
from support.versions import needs_fullgraph

KEY_VALUE = ("softmax", *GAUSSIAN)
LENGTH = 9
FEEDS = {"one go": [9], "chunks": [4, 1, 3, 1], "token by token": [1] * 9}
OPTIONS = [
    *((variant, {}) for variant in VARIANTS),
    *((variant, {"prior": "em", "num_mixtures": 3}) for variant in MIXTURES),
    *((variant, {"variance": "learned"}) for variant in GAUSSIAN),
    *((variant, {"variance": "em", "prior": "uniform"}) for variant in GAUSSIAN),
    *((variant, {"e_step": "hard"}) for variant in GAUSSIAN),
    *((variant, {"feature_map": "favor"}) for variant in LINEAR),
]


def feed(attn, x, sizes, *, cache=None, key_mask=None, positions=None):
    """The outputs (B, L, C) of x in parts; ``positions`` turn on rotary."""
    cache = attn.new_cache() if cache is None else cache
    outputs, start = [], 0
    for size in sizes:
        stop, options = start + size, {}
        if key_mask is not None:
            options["key_mask"] = key_mask[:, :stop]
        if positions is not None:
            options["rotary"] = rotary_tables(positions[..., start:stop], attn.head_dim)
        outputs.append(attn(x[:, start:stop], is_causal=True, cache=cache, **options))
        start = stop
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("with_grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("sizes", FEEDS.values(), ids=list(FEEDS))
@pytest.mark.parametrize(("variant", "options"), OPTIONS, ids=str)
def test_decoding_in_parts_equals_one_pass(variant, options, sizes, with_grad):
    attn, x = make(variant, **options), tokens(2, LENGTH)
    with torch.set_grad_enabled(with_grad):
        torch.testing.assert_close(feed(attn, x, sizes), attn(x, is_causal=True))


@pytest.mark.parametrize("sizes", FEEDS.values(), ids=list(FEEDS))
@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_in_parts_equals_one_pass_with_rotary_positions(variant, sizes):
    attn, x, positions = make(variant), tokens(2, LENGTH), torch.arange(LENGTH)
    whole = attn(x, is_causal=True, rotary=rotary_tables(positions, attn.head_dim))
    torch.testing.assert_close(feed(attn, x, sizes, positions=positions), whole)


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_longer_than_the_blocks_of_the_backends(variant):
    attn, x = make(variant, backend="blockwise"), tokens(1, 300)
    torch.testing.assert_close(feed(attn, x, [130, 100, 70]), attn(x, is_causal=True))


@pytest.mark.parametrize("sizes", FEEDS.values(), ids=list(FEEDS))
@pytest.mark.parametrize("variant", VARIANTS)
def test_left_padded_and_cached_equals_unpadded_and_uncached(variant, sizes):
    attn, x, lengths = make(variant), tokens(3, LENGTH), (9, 6, 2)
    mask = padding_mask(*lengths, total=LENGTH, side="left")
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    padded = feed(attn, x, sizes, key_mask=mask, positions=positions)
    for row, length in enumerate(lengths):
        rotary = rotary_tables(torch.arange(length), attn.head_dim)
        alone = attn(x[row : row + 1, -length:], is_causal=True, rotary=rotary)
        torch.testing.assert_close(padded[row : row + 1, -length:], alone)


@pytest.mark.parametrize("variant", VARIANTS)
def test_beams_continue_from_the_sequences_they_were_reordered_to(variant):
    attn, x, index = make(variant), tokens(3, LENGTH), torch.tensor([2, 0, 0, 1])
    cache = attn.new_cache()
    feed(attn, x[:, :5], [2, 3], cache=cache)
    cache.reorder(index)
    more = tokens(4, 4)
    beams = torch.cat([x[index, :5], more], 1)
    torch.testing.assert_close(feed(attn, more, [1, 3], cache=cache), attn(beams, is_causal=True)[:, 5:])


@pytest.mark.parametrize("length", [0, 3, 9])
@pytest.mark.parametrize("variant", KEY_VALUE)
def test_a_cropped_cache_continues_as_if_the_rest_had_never_been(variant, length):
    attn, x = make(variant), tokens(2, LENGTH)
    cache = attn.new_cache()
    feed(attn, x, [4, 5], cache=cache)
    cache.crop(length)
    assert cache.length == length
    more = tokens(2, 4)
    whole = attn(torch.cat([x[:, :length], more], 1), is_causal=True)
    torch.testing.assert_close(feed(attn, more, [1, 3], cache=cache), whole[:, length:])


@pytest.mark.parametrize("variant", LINEAR)
def test_a_state_can_be_emptied_but_not_cropped(variant):
    attn, x = make(variant), tokens(2, LENGTH)
    cache = attn.new_cache()
    whole = feed(attn, x, [9], cache=cache)
    with pytest.raises(ValueError, match="a linear state of 9 tokens cannot be cropped to 4"):
        cache.crop(4)
    cache.crop(9)
    assert cache.length == 9
    cache.crop(0)
    assert (cache.length, cache.nbytes) == (0, 0)
    torch.testing.assert_close(feed(attn, x, [9], cache=cache), whole)


def nbytes_after(attn, num_tokens):
    cache = attn.new_cache()
    assert cache.nbytes == 0
    attn(torch.randn(2, num_tokens, attn.embed_dim), is_causal=True, cache=cache)
    assert cache.length == num_tokens
    return cache.nbytes


@pytest.mark.parametrize("num_mixtures", [1, 2, 3], ids=lambda m: f"M{m}")
@pytest.mark.parametrize(("variant", "keys"), [("softmax", "1"), ("mgk", "M"), ("smgk", "1")])
def test_a_key_value_cache_holds_its_keys_and_one_value_a_token(variant, keys, num_mixtures):
    attn = MixtureAttention(32, 4, variant=variant, num_mixtures=num_mixtures)
    num_keys = num_mixtures if keys == "M" else 1
    for num_tokens in (1, 7, 40):
        assert nbytes_after(attn, num_tokens) == 2 * num_tokens * 4 * 8 * (num_keys + 1) * 4


def test_half_the_heads_of_smgk_mean_half_the_cache_of_softmax():
    smgk = MixtureAttention(32, 2, variant="smgk", head_dim=8)
    softmax = MixtureAttention(32, 4, variant="softmax", head_dim=8)
    assert 2 * nbytes_after(smgk, 33) == nbytes_after(softmax, 33)


@pytest.mark.parametrize("variant", LINEAR)
def test_a_state_does_not_grow_with_the_length(variant):
    attn = MixtureAttention(32, 4, variant=variant)
    sizes = {nbytes_after(attn, num_tokens) for num_tokens in (1, 7, 300)}
    assert sizes == {2 * 4 * (8 * 8 + 8) * 4}  # B H (F E + F) float32


@torch.no_grad()
def test_adding_a_token_seldom_copies_the_past():
    attn, cache = make("mgk", dtype=torch.float32), KeyValueCache()
    addresses = []
    for _ in range(300):
        attn(tokens(1, 1, dtype=torch.float32), is_causal=True, cache=cache)
        addresses.append((cache.keys.data_ptr(), cache.value.data_ptr()))
    moves = sum(now != before for before, now in itertools.pairwise(addresses))
    assert moves <= 5  # 16, 32, 64, 128, 256
    assert cache.length == 300


@pytest.mark.parametrize("variant", VARIANTS)
def test_entries_are_detached_and_new_tokens_have_their_gradient(variant):
    attn, past, new = make(variant), tokens(2, 5).requires_grad_(), tokens(2, 4).requires_grad_()
    cache = attn.new_cache()
    attn(past, is_causal=True, cache=cache)
    out = attn(new, is_causal=True, cache=cache)
    held = (cache.keys, cache.value) if variant in KEY_VALUE else cache.state
    assert not any(entry.requires_grad for entry in held)
    to_new, to_past = torch.autograd.grad(out.square().sum(), (new, past), allow_unused=True)
    assert to_past is None
    whole = attn(torch.cat([past.detach(), new], 1), is_causal=True)[:, 5:]
    torch.testing.assert_close(to_new, torch.autograd.grad(whole.square().sum(), new)[0])


@pytest.mark.parametrize("frozen", [(), ("k_proj", "v_proj")], ids=["trainable", "frozen keys"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_backward_may_wait_until_later_tokens_are_in_the_cache(variant, frozen):
    attn, x = make(variant), tokens(2, LENGTH)
    for name in frozen:
        getattr(attn, name).requires_grad_(False)
    expected = torch.autograd.grad(attn(x, is_causal=True)[:, :4].square().sum(), attn.q_proj.weight)
    cache = attn.new_cache()
    early = attn(x[:, :4], is_causal=True, cache=cache)
    attn(x[:, 4:], is_causal=True, cache=cache)
    torch.testing.assert_close(torch.autograd.grad(early.square().sum(), attn.q_proj.weight), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_family_has_its_kind_of_cache_and_refuses_the_other(variant):
    attn = make(variant)
    kind, other = (StateCache, KeyValueCache) if variant in LINEAR else (KeyValueCache, StateCache)
    assert type(attn.new_cache()) is kind
    with pytest.raises(TypeError, match=f"cache must be what new_cache.* gives, got {other.__name__}"):
        attn(tokens(2, 3), is_causal=True, cache=other())


REFUSED = {
    "batch": (3, {}, "cache holds a batch of 2 sequences, got x with 3"),
    "mask": (
        2,
        {"key_mask": torch.ones(2, 2, dtype=torch.bool)},
        r"key_mask must have shape \(B, S\) = \(2, 5\), got",
    ),
    "flag": (2, {"is_causal": 1}, "is_causal must be True or False, got 1"),
}


@pytest.mark.parametrize(("batch", "options", "message"), REFUSED.values(), ids=list(REFUSED))
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_refused_call_leaves_the_cache_as_it_was(variant, batch, options, message):
    attn, x = make(variant), tokens(2, LENGTH)
    cache = attn.new_cache()
    attn(x[:, :3], is_causal=True, cache=cache)
    with pytest.raises((TypeError, ValueError), match=message):
        attn(tokens(batch, 2), cache=cache, **{"is_causal": True} | options)
    assert cache.length == 3
    rest = attn(x[:, 3:], is_causal=True, cache=cache)
    torch.testing.assert_close(rest, attn(x, is_causal=True)[:, 3:])


@pytest.mark.parametrize("variant", GAUSSIAN)
def test_a_cache_of_another_module_is_refused(variant):
    attn, cache = make(variant), KeyValueCache()
    attn(tokens(2, 3), is_causal=True, cache=cache)
    other = MixtureAttention(12, 2, variant=variant).double()
    with pytest.raises(ValueError, match=r"the cache holds .* keys"):
        other(tokens(2, 3), is_causal=True, cache=cache)


@pytest.mark.parametrize("kind", [KeyValueCache, StateCache])
def test_bad_arguments_of_caches(kind):
    cache = kind()
    with pytest.raises(ValueError, match="length must be from 0 to the cache's 0, got 3"):
        cache.crop(3)
    with pytest.raises(TypeError, match="length must be a whole number, got float"):
        cache.crop(0.0)
    with pytest.raises(TypeError, match="index must be a tensor"):
        cache.reorder([0, 1])
    with pytest.raises(TypeError, match="index must have one of the dtypes int64, int32"):
        cache.reorder(torch.zeros(2))
    cache.reorder(torch.tensor([0, 0]))  # nothing to reorder yet


@pytest.mark.parametrize("sizes", FEEDS.values(), ids=list(FEEDS))
@pytest.mark.parametrize(("variant", "options"), OPTIONS, ids=str)
@torch.no_grad()
def test_a_cache_of_fixed_length_decodes_the_same(variant, options, sizes):
    attn, x, mask = make(variant, **options), tokens(2, LENGTH), padding_mask(9, 6, total=LENGTH, side="left")
    for max_length in (LENGTH, LENGTH + 4):
        cache = attn.new_cache(max_length)
        torch.testing.assert_close(feed(attn, x, sizes, cache=cache), attn(x, is_causal=True))
        assert cache.length == LENGTH
        cache = attn.new_cache(max_length)
        full = torch.nn.functional.pad(mask, (0, max_length - LENGTH), value=True)
        outputs = [
            attn(part, is_causal=True, cache=cache, key_mask=full) for part in x.split(list(sizes), dim=1)
        ]
        torch.testing.assert_close(torch.cat(outputs, 1)[mask], attn(x, is_causal=True, key_mask=mask)[mask])


@torch.no_grad()
def test_a_cache_of_fixed_length_shows_weights_crops_and_reorders():
    attn, x, index = make("mgk"), tokens(3, LENGTH), torch.tensor([2, 0])
    cache = attn.new_cache(12)
    attn(x[:, :5], is_causal=True, cache=cache)
    out, weights = attn(x[:, 5:], is_causal=True, cache=cache, need_weights=True)
    expected, whole = attn(x, is_causal=True, need_weights=True)
    torch.testing.assert_close((out, weights[..., :LENGTH]), (expected[:, 5:], whole[:, :, 5:]))
    assert weights.shape[-1] == 12
    assert not weights[..., LENGTH:].any()
    cache.crop(5)
    cache.reorder(index)
    torch.testing.assert_close(attn(x[index, 5:], is_causal=True, cache=cache), expected[index, 5:])
    assert cache.nbytes == 2 * 9 * 3 * 4 * (2 + 1) * 8  # entries in use, not places


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cache_of_fixed_length_refuses(variant):
    attn, x = make(variant), tokens(2, LENGTH)
    cache = attn.new_cache(LENGTH)
    with pytest.raises(ValueError, match=r"a cache of fixed length has no derivatives: use torch\.no_grad"):
        attn(x, is_causal=True, cache=cache)
    assert cache.length == 0
    with torch.no_grad():
        attn(x[:, :8], is_causal=True, cache=cache)
        with pytest.raises(ValueError, match="the cache has max_length=9 places, got 10 tokens"):
            attn(x[:, :2], is_causal=True, cache=cache)
    assert cache.length == 8
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        attn.new_cache(0)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_forward_mode_through_a_step_sees_its_own_keys(variant):
    attn, x = make(variant), tokens(2, LENGTH)
    direction = torch.randn_like(x)
    direction[:, :5] = 0  # the past is held without a tangent
    _, expected = jvp(lambda x: attn(x, is_causal=True), (x,), (direction,))
    with forward_ad.dual_level():
        cache = attn.new_cache()
        attn(x[:, :5], is_causal=True, cache=cache)
        step = forward_ad.make_dual(x[:, 5:], direction[:, 5:])
        tangent = forward_ad.unpack_dual(attn(step, is_causal=True, cache=cache)).tangent
        torch.testing.assert_close(tangent, expected[:, 5:])
        with pytest.raises(ValueError, match="a cache of fixed length has no derivatives"):
            attn(step, is_causal=True, cache=attn.new_cache(LENGTH))


@pytest.mark.parametrize("variant", LINEAR)
@torch.no_grad()
def test_a_prior_of_positions_needs_their_numbers(variant):
    if variant == "linear":
        pytest.skip("it has no prior")
    attn = make(variant, prior=EMPrior(3, 2, max_positions=20))
    with pytest.raises(ValueError, match="a prior with max_positions needs the place of a token as a number"):
        attn(tokens(2, 3), is_causal=True, cache=attn.new_cache(9))


@pytest.mark.parametrize("max_length", [None, 12])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cache_filled_in_inference_mode_is_continued_outside(variant, max_length):
    attn, x, index = make(variant), tokens(2, LENGTH), torch.tensor([1, 0])
    whole = attn(x, is_causal=True)
    cache = attn.new_cache(max_length)
    with torch.inference_mode():
        attn(x[:, :3], is_causal=True, cache=cache)
        cache.reorder(index)
    with torch.no_grad():
        middle = attn(x[index, 3:6], is_causal=True, cache=cache)
    torch.testing.assert_close(middle, whole[index, 3:6])
    with torch.inference_mode():
        late = attn(x[index, 6:7], is_causal=True, cache=cache)
    torch.testing.assert_close(late, whole[index, 6:7])
    if max_length is None:  # and with gradients
        last = attn(x[index, 7:], is_causal=True, cache=cache)
        torch.testing.assert_close(last, whole[index, 7:])
        last.sum().backward()


MISFITS = [
    {"key_mask": torch.ones(2, 3, dtype=torch.bool)},
    {"attn_mask": torch.ones(7, 7, dtype=torch.bool)},
    {"attn_mask": torch.zeros(2, 6, dtype=torch.int64)},
]


@pytest.mark.parametrize("filled", [False, True], ids=["empty", "filled"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_fails_after_the_keys_were_appended_leaves_the_cache_as_it_was(variant, filled):
    attn, x = make(variant), tokens(2, LENGTH)
    cache = attn.new_cache()
    if filled:
        attn(x[:, :4], is_causal=True, cache=cache)
    before = (cache.length, cache.batch, cache.nbytes)
    for bad in MISFITS:
        with pytest.raises((TypeError, ValueError)):
            attn(x[:, 4:6], is_causal=True, cache=cache, **bad)
        assert (cache.length, cache.batch, cache.nbytes) == before
    attn.backend = "reference" if variant in LINEAR else "sdpa"
    broken = attn.log_prior
    attn.log_prior = lambda *args: torch.zeros(9, 9)  # what fails after the keys were appended
    with pytest.raises((TypeError, ValueError)):
        attn(x[:, 4:6], is_causal=True, cache=cache)
    assert (cache.length, cache.batch, cache.nbytes) == before
    attn.log_prior = broken
    attn.backend = "auto"
    if not filled:
        attn(x[:, :4], is_causal=True, cache=cache)
    rest = attn(x[:, 4:], is_causal=True, cache=cache)
    torch.testing.assert_close(rest, attn(x, is_causal=True)[:, 4:])


@needs_fullgraph
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_one_compiled_step_serves_every_length(variant):
    attn, x = make(variant, dtype=torch.float32), tokens(2, LENGTH).float()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(attn, fullgraph=True, backend="eager")
    cache = attn.new_cache(LENGTH)
    outputs = [attn(x[:, :3], is_causal=True, cache=cache)]
    outputs += [step(x[:, at : at + 1], is_causal=True, cache=cache) for at in range(3, LENGTH)]
    torch.testing.assert_close(torch.cat(outputs, 1), attn(x, is_causal=True), atol=1e-5, rtol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
