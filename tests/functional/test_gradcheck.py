"""Float64 finite differences for every differentiable function and every float argument."""

import pytest
import torch
from torch.autograd import gradcheck

import mgk
from mgk.functional.linear.feature_maps import dpfp_features, elu_features, favor_features, favor_projection
from support.cases import BACKENDS, WITH_HARD


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def positive(*shape):
    return (torch.rand(*shape, dtype=torch.float64) + 0.5).requires_grad_()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kernel", ["gaussian", "dot"])
@pytest.mark.parametrize("e_step", ["soft", "hard"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_mixture_attention(backend, e_step, kernel, is_causal):
    if e_step == "hard" and backend not in WITH_HARD:
        pytest.skip(f"{backend} has no hard E-step")
    inputs = [leaf(1, 2, 5, 3), leaf(1, 2, 3, 4, 3), leaf(1, 2, 4, 2), leaf(1, 2, 3, 4), positive(1, 2, 3, 1)]
    if backend in ("reference", "eager", "blockwise"):  # which have gradients for a mask
        inputs.append(leaf(5, 4))

    def function(query, keys, value, log_prior, variance, attn_mask=None):
        options = {"variance": variance, "attn_mask": attn_mask, "kernel": kernel, "e_step": e_step}
        return mgk.mixture_attention(
            query, keys, value, log_prior, is_causal=is_causal, backend=backend, **options
        )

    assert gradcheck(function, inputs)


@pytest.mark.parametrize("variance", [(1, 2, 1, 1), (2, 3), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("e_step", ["soft", "hard"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_shifted_mixture_attention(backend, e_step, variance):
    if e_step == "hard" and backend not in WITH_HARD:
        pytest.skip(f"{backend} has no hard E-step")
    inputs = [
        leaf(1, 2, 5, 3),
        leaf(1, 2, 4, 3),
        leaf(2, 3, 3),
        leaf(1, 2, 4, 2),
        leaf(2, 3),
        positive(*variance),
    ]

    def function(*tensors):
        return mgk.shifted_mixture_attention(*tensors[:5], variance=tensors[5], e_step=e_step, backend=backend)

    assert gradcheck(function, inputs)


@pytest.mark.parametrize("e_step", ["soft", "hard"])
def test_mixture_weights(e_step):
    inputs = [leaf(1, 2, 5, 3), leaf(1, 2, 3, 4, 3), leaf(1, 2, 3, 1), positive(1, 2, 3, 1), leaf(5, 4)]
    assert gradcheck(
        lambda q, k, p, v, m: mgk.mixture_weights(
            q, k, p, variance=v, attn_mask=m, e_step=e_step, is_causal=True
        ),
        inputs,
    )


def test_responsibilities():
    inputs = [leaf(1, 2, 5, 3), leaf(1, 2, 3, 4, 3), leaf(1, 2, 3, 1), positive(1, 2, 3, 1)]
    assert gradcheck(lambda q, k, p, v: mgk.responsibilities(q, k, p, variance=v, is_causal=True), inputs)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("feature_map", ["elu", "favor", "dpfp"])
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_linear_mixture_attention(backend, feature_map, is_causal):
    width = {"elu": 3, "favor": 6, "dpfp": 6}[feature_map]
    inputs = [leaf(1, 2, 5, 3), leaf(1, 2, 3, 7, 3), leaf(1, 2, 7, 2), leaf(1, 2, 3, 7)]
    inputs += [positive(1, 2, width, 2), positive(1, 2, width)]
    mask = torch.tensor([[True] * 5 + [False] + [True]])

    def function(query, keys, value, log_prior, numerator, normaliser):
        out, state = mgk.linear_mixture_attention(
            query,
            keys,
            value,
            log_prior,
            feature_map=feature_map,
            key_mask=mask,
            is_causal=is_causal,
            initial_state=(numerator, normaliser),
            return_state=True,
            backend=backend,
        )
        return out, *state

    assert gradcheck(function, inputs)


def test_linear_mixture_weights():
    inputs = [leaf(1, 2, 5, 3), leaf(1, 2, 3, 7, 3), leaf(1, 2, 3, 7)]
    assert gradcheck(lambda q, k, p: mgk.linear_mixture_weights(q, k, p, is_causal=True), inputs)


def test_feature_maps():
    x = leaf(4, 6)
    projection = favor_projection(6, 9, seed=1).double()
    assert gradcheck(elu_features, [x])
    assert gradcheck(lambda x: dpfp_features(x, nu=3), [x])
    assert gradcheck(lambda x: favor_features(x, projection), [x])
