"""Padding, masks and causality: what does not take part changes nothing."""

import itertools

import pytest
import torch
from recompute import GAUSSIAN, PRIORS, VARIANTS, expected_output, make, padding_mask, tokens

from mgk.nn import EMPrior, MultiheadMixtureAttention

KEY_MASK = padding_mask(7, 4, total=7)
WITH_MASKS = ("softmax", *GAUSSIAN)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_never_changes_real_positions(variant, is_causal):
    attn, x = make(variant, dtype=torch.float32), tokens(2, 7, dtype=torch.float32)
    other = torch.where(KEY_MASK[..., None], x, 1e4 * tokens(2, 7, dtype=torch.float32))
    out, same = (attn(inputs, key_mask=KEY_MASK, is_causal=is_causal) for inputs in (x, other))
    assert not torch.equal(x, other)
    torch.testing.assert_close(same[KEY_MASK], out[KEY_MASK], atol=1e-6, rtol=0)
    alone = attn(x[1:, :4], is_causal=is_causal)
    torch.testing.assert_close(out[1:, :4], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("content", [torch.nan, torch.inf, 1e30, torch.finfo(torch.float32).max], ids=str)
@pytest.mark.parametrize("kind", ["self", "context", "drop-in"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_that_is_not_finite_reaches_no_parameter(variant, kind, content):
    """Without care the gradient of a projection is 0 * NaN."""
    attn = make(variant, dtype=torch.float32)
    clean, query = (tokens(2, length, dtype=torch.float32) for length in (7, 3))
    if kind == "drop-in":
        attn = MultiheadMixtureAttention(12, 3, variant=variant, batch_first=True)
        clean, query = torch.randn(2, 7, 12), torch.randn(2, 3, 12)
    dirty = clean.masked_fill(~KEY_MASK[..., None], content)
    results = []
    for x in (clean, dirty):
        if kind == "self":
            out = attn(x, key_mask=KEY_MASK)[KEY_MASK]
        elif kind == "context":
            out = attn(query, context=x, key_mask=KEY_MASK)
        else:
            out = attn(query, x, x, key_padding_mask=~KEY_MASK)[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), list(attn.parameters()))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", ["bool", "float", "bool per head", "float without batch"])
@pytest.mark.parametrize("variant", WITH_MASKS)
def test_key_mask_attn_mask_and_causality_are_all_obeyed(variant, kind, is_causal):
    attn, x = make(variant), tokens(2, 7)
    attn_mask = {
        "bool": torch.rand(2, 1, 7, 7) > 0.4,
        "float": torch.randn(2, 1, 7, 7, dtype=torch.float64),
        "bool per head": torch.rand(1, attn.num_heads, 7, 7) > 0.4,
        "float without batch": torch.randn(7, 7, dtype=torch.float64),
    }[kind]
    options = {"key_mask": KEY_MASK, "attn_mask": attn_mask, "is_causal": is_causal}
    out, weights = attn(x, need_weights=True, **options)
    torch.testing.assert_close(out, expected_output(attn, x, **options))
    excluded = ~KEY_MASK[:, None, None] | (~attn_mask if attn_mask.dtype == torch.bool else False)
    if is_causal:
        excluded = excluded | torch.ones(7, 7, dtype=torch.bool).triu(1)
    assert not weights[excluded.expand_as(weights)].any()


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_without_keys_gives_the_output_bias_and_no_gradient(variant, backend):
    attn, x = make(variant, backend=backend), tokens(2, 7).requires_grad_()
    nothing = torch.tensor([[True], [False]]).expand(2, 7)
    out = attn(x, key_mask=nothing)
    assert torch.equal(out[1], attn.o_proj.bias.expand_as(out[1]))
    out.square().sum().backward()
    assert x.grad.isfinite().all()
    assert not x.grad[1].any()
    assert all(p.grad.isfinite().all() for p in attn.parameters())


@pytest.mark.parametrize("variant", WITH_MASKS)
def test_a_query_that_its_mask_leaves_without_keys_gives_the_output_bias(variant):
    attn, x = make(variant), tokens(2, 7).requires_grad_()
    attn_mask = torch.ones(7, 7, dtype=torch.bool)
    attn_mask[3] = False
    out = attn(x, attn_mask=attn_mask)
    assert torch.equal(out[:, 3], attn.o_proj.bias.expand_as(out[:, 3]))
    (grad,) = torch.autograd.grad(out[:, 3].square().sum(), x)
    assert not grad.any()


def options_of(variant):
    priors = ("learned",) if variant in ("softmax", "linear") else PRIORS
    variances = ("constant", "learned", "em") if variant in GAUSSIAN else ("constant",)
    return itertools.product([variant], priors, variances)


CAUSAL_CASES = list(itertools.chain.from_iterable(map(options_of, VARIANTS)))


@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("variant", "prior", "variance"), CAUSAL_CASES)
def test_tokens_from_t_on_leave_causal_outputs_before_t(variant, prior, variance, is_training):
    attn = make(variant, prior=prior, variance=variance, dtype=torch.float32)
    attn(tokens(2, 9, dtype=torch.float32), is_causal=True)
    attn.m_step()
    attn.train(is_training)
    x = tokens(2, 9, dtype=torch.float32)
    out = attn(x, is_causal=True)
    for t in (1, 4, 8):
        changed = torch.cat([x[:, :t], tokens(2, 9 - t, dtype=torch.float32)], 1)
        other = attn(changed, is_causal=True)
        torch.testing.assert_close(other[:, :t], out[:, :t], atol=1e-6, rtol=0)
        assert (other[:, t:] - out[:, t:]).abs().max() > 1e-3


@pytest.mark.parametrize("variant", ["mgk", "smgk", "mlk", "smlk"])
def test_a_causal_prior_per_position_does_not_leak(variant):
    attn = make(variant, prior=EMPrior(3, 2, max_positions=9), dtype=torch.float32)
    x = tokens(2, 9, dtype=torch.float32)
    out = attn(x, is_causal=True)
    changed = torch.cat([x[:, :5], tokens(2, 4, dtype=torch.float32)], 1)
    torch.testing.assert_close(attn(changed, is_causal=True)[:, :5], out[:, :5], atol=1e-6, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sequence_does_not_depend_on_its_batch(variant):
    attn, x = make(variant), tokens(4, 7)
    torch.testing.assert_close(attn(x)[2:3], attn(x[2:3]))
