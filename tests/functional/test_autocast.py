"""Under autocast inputs take its dtype, as SDPA's do, and sums stay in float32."""

import pytest
import torch

import mgk
from support.cases import BACKENDS

QUERY, KEYS, VALUE = torch.randn(1, 2, 60, 8), torch.randn(1, 2, 2, 60, 8), torch.randn(1, 2, 60, 8)


def rounded(*tensors):
    return [x.bfloat16() for x in tensors]


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_under_autocast_is_attention_of_rounded_inputs(backend):
    with torch.autocast("cpu", torch.bfloat16):
        out = mgk.mixture_attention(QUERY, KEYS, VALUE, backend=backend)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, mgk.mixture_attention(*rounded(QUERY, KEYS, VALUE), backend=backend))


def test_linear_attention_weights_and_m_step_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        out, state = mgk.linear_mixture_attention(QUERY, KEYS, VALUE, is_causal=True, return_state=True)
        weights = mgk.mixture_weights(QUERY, KEYS)
        counts = mgk.m_step(QUERY, KEYS).counts
    assert out.dtype == weights.dtype == torch.bfloat16
    assert state.numerator.dtype == counts.dtype == torch.float32
    expected = mgk.linear_mixture_attention(*rounded(QUERY, KEYS, VALUE), is_causal=True)
    assert torch.equal(out, expected)
    torch.testing.assert_close(counts.sum(2), torch.full((1, 2, 60), 60.0))


def test_mixed_dtypes_are_joined_under_autocast_and_float64_stays():
    with torch.autocast("cpu", torch.bfloat16):
        assert mgk.mixture_attention(QUERY, KEYS.bfloat16(), VALUE).dtype == torch.bfloat16
        doubles = [x.double() for x in (QUERY, KEYS, VALUE)]
        assert mgk.mixture_attention(*doubles).dtype == torch.float64


def test_backward_inside_autocast_keeps_float32_sums():
    grads = []
    for inside in (False, True):
        query = QUERY.clone().requires_grad_()
        out = mgk.mixture_attention(query, KEYS, VALUE, backend="blockwise")
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            grads.append(torch.autograd.grad(out.sum(), query)[0])
    torch.testing.assert_close(*grads, atol=1e-6, rtol=0)
