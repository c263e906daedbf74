"""What ``auto`` chooses, and what a backend says when it cannot serve a call."""

import pytest
import torch

import mgk
from mgk.functional import dispatch
from mgk.functional.attention import checked_call


def make_call(num_queries=200, num_keys=200, mixtures=2, shifted=False, **options):
    query, value = torch.randn(1, 2, num_queries, 8), torch.randn(1, 2, num_keys, 8)
    keys = torch.randn(1, 2, 1 if shifted else mixtures, num_keys, 8)
    defaults = {"log_prior": None, "variance": None, "kernel": "gaussian", "e_step": "soft", "attn_mask": None}
    defaults |= {"is_causal": False, "dropout_p": 0.0}
    shifts = torch.randn(2, mixtures, 8) if shifted else None
    return checked_call(query, keys, shifts, value, **(defaults | options))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (make_call(), "sdpa"),
        (make_call(shifted=True), "sdpa"),
        (make_call(shifted=True, is_causal=True), "sdpa"),
        (make_call(mixtures=1, kernel="dot"), "sdpa"),
        (make_call(mixtures=1, kernel="dot", is_causal=True), "sdpa"),
        (make_call(is_causal=True), "sdpa"),
        (make_call(e_step="hard"), "blockwise"),
        (make_call(e_step="hard", mixtures=1), "sdpa"),
        (make_call(dropout_p=0.1), "blockwise"),
        (make_call(mixtures=1, kernel="dot", dropout_p=0.1), "blockwise"),
        (make_call(attn_mask=torch.zeros(200, 200, requires_grad=True)), "blockwise"),
        (make_call(attn_mask=torch.zeros(200, 200)), "sdpa"),
        (make_call(num_queries=1, num_keys=5000), "reference"),
        (make_call(num_queries=20, num_keys=20), "reference"),
    ],
)
def test_auto_takes_the_fastest_exact_backend(call, expected):
    assert dispatch.choose(call) == expected


def test_available_backends_are_named_with_their_state():
    assert mgk.available_backends() == {"reference": "ready", "blockwise": "ready", "sdpa": "ready"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"e_step": "hard"}, "hard"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"attn_mask": torch.zeros(200, 200, requires_grad=True)}, "gradient of attn_mask"),
    ],
)
def test_a_named_backend_that_cannot_serve_the_call_says_why(options, reason):
    query, keys = torch.randn(1, 2, 200, 8), torch.randn(1, 2, 2, 200, 8)
    with pytest.raises(ValueError, match=rf"backend 'sdpa' cannot serve this call: .*{reason}"):
        mgk.mixture_attention(query, keys, query, backend="sdpa", **options)


def test_every_choice_agrees_with_the_reference():
    for options in ({}, {"is_causal": True}, {"e_step": "hard"}, {"attn_mask": torch.rand(200, 200) > 0.5}):
        query, keys = torch.randn(1, 2, 200, 8), torch.randn(1, 2, 2, 200, 8)
        for length in (1, 20, 200):
            mask = {"attn_mask": options["attn_mask"][:length]} if "attn_mask" in options else {}
            arguments = (query[:, :, :length], keys, query)
            torch.testing.assert_close(
                mgk.mixture_attention(*arguments, **(options | mask)),
                mgk.mixture_attention(*arguments, **(options | mask), backend="reference"),
                atol=5e-6,
                rtol=0,
            )
