"""What ``auto`` chooses, and what a backend says when it cannot serve a call."""

import pytest
import torch

import mgk
from mgk.functional.mixture import dispatch
from mgk.functional.mixture.api import checked_call
from mgk.functional.mixture.backends import cpu_kernels


def make_call(num_queries=200, num_keys=200, mixtures=2, shifted=False, **options):
    query, value = torch.randn(1, 2, num_queries, 8), torch.randn(1, 2, num_keys, 8)
    keys = torch.randn(1, 2, 1 if shifted else mixtures, num_keys, 8)
    defaults = {"log_prior": None, "variance": None, "kernel": "gaussian", "e_step": "soft", "attn_mask": None}
    defaults |= {"is_causal": False, "dropout_p": 0.0}
    shifts = torch.randn(2, mixtures, 8) if shifted else None
    return checked_call(query, keys, shifts, value, **(defaults | options))


# the call, what serves it with the kernels, and without
CHOICES = [
    ({}, "cpu", "sdpa"),
    ({"shifted": True}, "cpu", "sdpa"),
    ({"shifted": True, "is_causal": True}, "cpu", "sdpa"),
    ({"mixtures": 1, "kernel": "dot"}, "cpu", "sdpa"),
    ({"is_causal": True}, "cpu", "sdpa"),
    ({"e_step": "hard"}, "cpu", "blockwise"),
    ({"e_step": "hard", "mixtures": 1}, "cpu", "sdpa"),
    ({"dropout_p": 0.1}, "cpu", "blockwise"),
    ({"mixtures": 1, "kernel": "dot", "dropout_p": 0.1}, "cpu", "blockwise"),
    ({"variance": torch.ones(1, 2, 1, 1, requires_grad=True)}, "cpu", "blockwise"),
    ({"mixtures": 9}, "sdpa", "sdpa"),
    ({"mixtures": 9, "e_step": "hard"}, "blockwise", "blockwise"),
    ({"attn_mask": torch.zeros(200, 200, requires_grad=True)}, "blockwise", "blockwise"),
    ({"attn_mask": torch.zeros(200, 200)}, "cpu", "sdpa"),
    ({"num_queries": 1, "num_keys": 50_000}, "cpu", "reference"),
    ({"num_queries": 1, "num_keys": 20}, "cpu", "reference"),
    ({"num_queries": 1, "num_keys": 20, "mixtures": 9}, "reference", "reference"),
    ({"num_queries": 20, "num_keys": 20}, "reference", "reference"),
]


@pytest.mark.parametrize(("options", "with_kernels", "without"), CHOICES)
def test_auto_takes_the_fastest_exact_backend(options, with_kernels, without, monkeypatch):
    call = make_call(**options)
    if cpu_kernels.STATUS == "ready":
        assert dispatch.choose(call) == with_kernels
    monkeypatch.setattr(cpu_kernels, "STATUS", "not built")
    assert dispatch.choose(call) == without


def test_available_backends_are_named_with_their_state(monkeypatch):
    always = {"reference": "ready", "blockwise": "ready", "sdpa": "ready"}
    assert mgk.available_backends() == always | {"cpu": cpu_kernels.STATUS}
    monkeypatch.setattr(cpu_kernels, "STATUS", "not built: there was no C++ compiler")
    assert mgk.available_backends() == always | {"cpu": "not built: there was no C++ compiler"}
    with pytest.raises(ValueError, match="backend 'cpu' cannot serve this call: it is not built"):
        mgk.mixture_attention(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 2, 2), torch.ones(1, 1, 2, 2), backend="cpu")


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
