"""torch.compile(fullgraph=True), and what torch.library asks of operators."""

import pytest
import torch

import mgk
from mgk.functional.mixture.features import score_features
from support.cases import BACKENDS, inputs_of, make_case
from support.versions import needs_fullgraph

pytestmark = needs_fullgraph


def compiled(function):
    """AOT autograd with the graph run as it is: what can break in our code, without a compiler's minutes."""
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def assert_same(function, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = function(*leaves)
    expected_grads = torch.autograd.grad(expected.square().sum(), leaves)
    out = compiled(function)(*leaves)
    torch.testing.assert_close(out, expected, atol=1e-9, rtol=0)
    for a, b in zip(torch.autograd.grad(out.square().sum(), leaves), expected_grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_attention_compiles(backend, is_causal):
    x = make_case(sizes=(1, 2, 80, 80, 4, 4, 2), prior="component").tensors
    shifted = make_case("shifted", sizes=(1, 2, 80, 80, 4, 4, 2)).tensors
    options = {"backend": backend, "is_causal": is_causal}
    assert_same(
        lambda q, k, v, p: mgk.mixture_attention(q, k, v, p, **options),
        x["query"],
        x["keys"],
        x["value"],
        x["log_prior"],
    )
    assert_same(
        lambda q, k, s, v: mgk.shifted_mixture_attention(q, k, s, v, **options),
        *(shifted[name] for name in ("query", "key", "shifts", "value")),
    )


def test_hard_attention_with_dropout_compiles():
    x = make_case(sizes=(1, 2, 80, 80, 4, 4, 2)).tensors
    function = compiled(lambda q, k, v: mgk.mixture_attention(q, k, v, e_step="hard", dropout_p=0.5))
    assert function(x["query"], x["keys"], x["value"]).isfinite().all()


@pytest.mark.parametrize("feature_map", ["elu", "favor", "dpfp"])
def test_linear_attention_compiles(feature_map):
    x = make_case(sizes=(1, 2, 80, 80, 4, 4, 2)).tensors
    assert_same(
        lambda q, k, v: mgk.linear_mixture_attention(q, k, v, feature_map=feature_map, is_causal=True),
        *(x[name] for name in ("query", "keys", "value")),
    )


def test_weights_and_m_step_compile():
    x = make_case(sizes=(1, 2, 20, 20, 4, 4, 2)).tensors
    assert_same(lambda q, k: mgk.mixture_weights(q, k), x["query"], x["keys"])
    assert_same(lambda q, k: mgk.responsibilities(q, k), x["query"], x["keys"])
    assert_same(lambda q, k: mgk.linear_mixture_weights(q, k), x["query"], x["keys"])
    step = compiled(lambda q, k: mgk.m_step(q, k))(x["query"], x["keys"])
    for a, b in zip(step, mgk.m_step(x["query"], x["keys"]), strict=True):
        torch.testing.assert_close(a, b)


def test_lengths_may_be_dynamic():
    torch._dynamo.reset()
    function = torch.compile(
        lambda q, k, v: mgk.mixture_attention(q, k, v, backend="blockwise"),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for length in (40, 50, 300):
        x = make_case(sizes=(1, 2, length, length, 4, 4, 2)).tensors
        inputs = (x["query"], x["keys"], x["value"])
        torch.testing.assert_close(function(*inputs), mgk.mixture_attention(*inputs, backend="reference"))


@pytest.mark.parametrize("function", ["mixture", "shifted"])
@pytest.mark.parametrize("mask", [None, "pair", "float"])
@pytest.mark.parametrize("variance", [None, "head", "component"])
@pytest.mark.parametrize("e_step", ["soft", "hard"])
def test_operators_pass_opcheck(function, mask, e_step, variance):
    case = make_case(function, sizes=(1, 2, 9, 8, 4, 3, 2), mask=mask, prior="component", variance=variance)
    if variance is not None:
        case.tensors["variance"].requires_grad_()
    inputs = inputs_of(case)._replace(e_step=e_step)
    features = score_features(inputs, with_affine=True)
    assert (features.score_affine is not None) == (
        variance is not None and mask != "float" and e_step == "soft"
    )
    features = [x if x is None else x.detach().requires_grad_() for x in features]
    if inputs.attn_mask is not None and inputs.attn_mask.is_floating_point():
        inputs.attn_mask.requires_grad_()
    is_hard = e_step == "hard"
    arguments = (*features, inputs.value.clone().requires_grad_(), inputs.attn_mask, None)
    arguments = (*arguments, None, is_hard, None, 0, 0.0)  # no segments, no window, causal
    torch.library.opcheck(torch.ops.mgk.blockwise_forward.default, arguments)
    if "cpu" in BACKENDS and mask != "float":  # cpu has no gradient for it
        torch.library.opcheck(torch.ops.mgk.cpu_forward.default, arguments)
    detached = [x if x is None else x.detach() for x in features]
    mask = None if inputs.attn_mask is None else inputs.attn_mask.detach()
    query_mask = torch.ones(1, 9, dtype=torch.bool)
    for points in (None, inputs.query):
        arguments = (*detached[:4], mask, query_mask, points, None, is_hard, None, None)
        torch.library.opcheck(torch.ops.mgk.blockwise_statistics.default, arguments)
        if "cpu" in BACKENDS and points is None:  # cpu has no moments
            torch.library.opcheck(torch.ops.mgk.cpu_statistics.default, arguments)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels are not built")
def test_decoding_passes_opcheck_and_compiles():
    query, keys, value = torch.randn(1, 2, 1, 4), torch.randn(1, 2, 2, 9, 4), torch.randn(1, 2, 9, 3)
    prior, variance = torch.randn(1, 2, 2, 1), torch.tensor(2.0)
    arguments = (query, keys, None, value, prior, variance, None, False, True)
    torch.library.opcheck(torch.ops.mgk.cpu_decode.default, arguments)
    function = compiled(lambda q, k, v: mgk.mixture_attention(q, k, v, backend="cpu"))
    torch.testing.assert_close(function(query, keys, value), mgk.mixture_attention(query, keys, value))


def test_other_operators_pass_opcheck():
    query, keys = torch.rand(1, 2, 9, 4), torch.rand(1, 2, 3, 8, 4)
    torch.library.opcheck(torch.ops.mgk.linear_counts.default, (query, keys, None, None, True))
    torch.library.opcheck(torch.ops.mgk.favor_projection.default, (query, 7, 0))


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("blockwise", "cpu")])
def test_second_derivatives_are_refused_with_own_backwards_and_given_by_the_reference(backend):
    x = make_case(sizes=(1, 1, 4, 4, 2, 2, 2)).tensors
    query = x["query"].requires_grad_()

    def curvature(backend):
        out = mgk.mixture_attention(query, x["keys"], x["value"], backend=backend)
        (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
        return torch.autograd.grad(grad.sum(), query)[0]

    assert curvature("reference").abs().max() > 0
    with pytest.raises(RuntimeError, match="use backend='reference'"):
        curvature(backend)
