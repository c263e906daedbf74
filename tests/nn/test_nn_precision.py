"""Half precision, double precision and autocast: close to float32, with statistics that stay in float32 or better."""

import copy

import pytest
import torch
from recompute import GAUSSIAN, MIXTURES, VARIANTS, make, padding_mask, tokens

HALVES = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02}


def make_float32(variant, **options):
    return make(variant, dtype=torch.float32, **options)


def em_options(variant):
    return {"prior": "em"} | ({"variance": "em"} if variant in GAUSSIAN else {})


def statistics(attn):
    return {name: value for name, value in attn.named_buffers() if name.startswith(("prior", "variance"))}


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", HALVES, ids=name_of)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_half_precision_module_is_close_to_float32(variant, dtype):
    attn, x = make_float32(variant), tokens(2, 7, dtype=torch.float32)
    half = copy.deepcopy(attn).to(dtype)
    out, weights = half(x.to(dtype), key_mask=padding_mask(7, 4, total=7), is_causal=True, need_weights=True)
    assert out.dtype == weights.dtype == dtype
    expected = attn(x, key_mask=padding_mask(7, 4, total=7), is_causal=True)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    out.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in half.parameters())


@pytest.mark.parametrize("move", ["bfloat16", "half", "double", "float"])
@pytest.mark.parametrize("variant", MIXTURES)
def test_statistics_stay_in_float32_at_least(variant, move):
    attn = make_float32(variant, **em_options(variant))
    kept = {name: value.clone() for name, value in statistics(attn).items()}
    getattr(attn, move)()
    wanted = torch.float64 if move == "double" else torch.float32
    x = tokens(2, 7).to(attn.q_proj.weight.dtype)
    for name, value in statistics(attn).items():
        assert value.dtype == wanted, name
        assert torch.equal(value, kept[name].to(wanted)), name  # without a detour over fewer bits
    out = attn(x)
    out.sum().backward()
    attn.m_step()
    assert out.dtype == x.dtype
    assert all(value.dtype == wanted and value.isfinite().all() for value in statistics(attn).values())


@pytest.mark.parametrize("variant", MIXTURES)
def test_counts_pass_the_largest_float16(variant):
    attn = make(variant, dtype=torch.float16, prior="em")
    attn(tokens(2, 300, dtype=torch.float16))
    assert (attn.prior.counts.sum((1, 2)) - 2 * 300 * 300).abs().max() < 1
    attn.m_step()
    torch.testing.assert_close(attn.prior.pi.sum(1), torch.ones(3, 1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_float64_stays_float64(variant):
    attn, x = make(variant), tokens(2, 7)
    out, weights = attn(x, need_weights=True)
    assert out.dtype == weights.dtype == torch.float64
    single = copy.deepcopy(attn).float()(x.float())
    assert 0 < (single - out).abs().max() < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_is_close_to_float32(variant):
    attn, x = make_float32(variant), tokens(2, 7, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, weights = attn(x, is_causal=True, need_weights=True)
    assert out.dtype == weights.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), attn(x, is_causal=True), atol=0.1, rtol=0.1)
    out.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in attn.parameters())


@pytest.mark.parametrize("variant", MIXTURES)
def test_autocast_leaves_the_statistics_in_float32(variant):
    attn, x = make_float32(variant, **em_options(variant)), tokens(2, 7, dtype=torch.float32)
    attn(x)
    exact = {name: value.clone() for name, value in statistics(attn).items()}
    for part in (attn.prior, attn.variance):
        for name in ("counts", "distances"):
            getattr(part, name, torch.zeros(())).zero_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attn(x)
    for name, value in statistics(attn).items():
        assert value.dtype == torch.float32, name
        torch.testing.assert_close(value, exact[name], atol=0, rtol=0.02, msg=name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_under_autocast_equals_one_pass_under_it(variant):
    attn, x = make_float32(variant), tokens(2, 7, dtype=torch.float32)
    cache = attn.new_cache()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        whole = attn(x, is_causal=True)
        parts = [attn(part, is_causal=True, cache=cache) for part in x.split([4, 1, 2], 1)]
    torch.testing.assert_close(torch.cat(parts, 1).float(), whole.float(), atol=0.03, rtol=0.03)
