"""Additive masks: only -inf removes a pair, every finite number is finite in every backend; shapes that are refused."""

import numpy as np
import pytest
import torch

import mgk
from support.cases import BACKENDS, FUNCTIONS, largest_errors, make_case
from support.versions import needs_fullgraph

LOWEST = torch.finfo(torch.float32).min
NUM_QUERIES, NUM_KEYS = 9, 70
SIZES = (2, 2, NUM_QUERIES, NUM_KEYS, 4, 4, 2)
E_STEPS = ("soft", "hard")


def lowest_rows(kind: str) -> torch.Tensor:
    """Masks whose last 30 keys count, of which whole rows, or all but one key, have the lowest number of float32."""
    mask = torch.full((1, 1, 1 if kind == "key" else NUM_QUERIES, NUM_KEYS), -torch.inf)
    mask[..., -30:] = LOWEST
    if kind == "pair":
        mask[:, :, 1, -3] = 0.0  # one number among the lowest
        mask[:, :, 2, -3] = LOWEST / 2
        mask[:, :, 3] = torch.linspace(-1, 1, NUM_KEYS)
        mask[:, :, 4] = -torch.inf
        mask[:, :, 5, 0] = -1e30
    return mask


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["key", "pair"])
@pytest.mark.parametrize("e_step", E_STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_of_the_lowest_number_weigh_their_keys_alike(function, backend, e_step, kind, dtype):
    if backend == "sdpa" and e_step == "hard":
        pytest.skip("soft only")
    case = make_case(function, sizes=SIZES, prior="component", e_step=e_step)
    mask = lowest_rows(kind)
    result = case.run(backend, dtype, attn_mask=mask)
    truth = case.run("reference", dtype, attn_mask=mask.double())
    value = case.tensors["value"].to(dtype).double()
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(
        result["output"][:, :, 0], value[:, :, -30:].mean(2), atol=tolerance, rtol=tolerance
    )
    if kind == "pair":
        for row in (1, 2):
            torch.testing.assert_close(
                result["output"][:, :, row], value[:, :, -3], atol=tolerance, rtol=tolerance
            )
        assert not result["output"][:, :, 4].any()
        torch.testing.assert_close(result["output"][:, :, 5], value[:, :, 0], atol=tolerance, rtol=tolerance)
    errors = largest_errors(result, truth)
    assert max(errors.values()) < tolerance, errors


@needs_fullgraph
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("number", [-1e9, LOWEST])
@pytest.mark.parametrize("kind", ["key", "pair"])
def test_sdpa_saves_a_precise_sum_of_rows_of_large_numbers(kind, number, is_causal, monkeypatch):
    """Padding on the left: under causality the first queries see keys of the number alone."""
    case = make_case(sizes=(2, 2, 40, 40, 4, 4, 2), prior="component")
    mask = torch.zeros(2, 1, 1 if kind == "key" else 40, 40)
    mask[..., :30] = number
    options = {"attn_mask": mask, "is_causal": is_causal}
    truth = case.run("reference", torch.float32, **options | {"attn_mask": mask.double()})
    results = {"eager": case.run("sdpa", torch.float32, **options)}
    torch._dynamo.reset()
    with monkeypatch.context() as patch:
        attend = torch.compile(mgk.mixture_attention, fullgraph=True, backend="aot_eager")
        patch.setattr(mgk, "mixture_attention", attend)
        results["compiled"] = case.run("sdpa", torch.float32, **options)
    for name, result in results.items():
        errors = largest_errors(result, truth)
        if name == "compiled" and number == LOWEST:  # where scores are rounded away, so are their gradients
            assert errors.pop("query") < 1
            assert errors.pop("keys") < 1
        assert max(errors.values()) < 2e-5, (name, errors)


@needs_fullgraph
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (9, 0)}, {"attn_mask": True}], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_large_prior_under_compile_is_as_in_eager_mode(function, options):
    case = make_case(function, sizes=(2, 2, 40, 40, 4, 4, 2), prior="position")
    if "attn_mask" in options:
        options = {"attn_mask": torch.rand(1, 1, 40, 40, generator=torch.Generator().manual_seed(0)) < 0.7}
    attend = mgk.mixture_attention if function == "mixture" else mgk.shifted_mixture_attention
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for number in (1e19, -LOWEST, -1e30, LOWEST):
        tensors = {name: x.float().requires_grad_() for name, x in case.tensors.items() if name != "upstream"}
        with torch.no_grad():
            tensors["log_prior"][:, :, 1, 7:] = number
            if number < 0:
                tensors["log_prior"].fill_(number)
        found = []
        for call, backend in ((attend, "reference"), (compiled, "sdpa")):
            out = call(**tensors, **options, backend=backend)
            wanted = (tensors["value"], tensors["log_prior"])  # scores are rounded away, so are their gradients
            found.append([out, *torch.autograd.grad(out, wanted, case.tensors["upstream"].float())])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [torch.finfo(torch.float64).min, -1e300])
def test_a_finite_number_of_float64_stays_finite_beside_float32(backend, number):
    case = make_case(sizes=SIZES)
    mask = torch.full((NUM_QUERIES, NUM_KEYS), number, dtype=torch.float64)
    out = case.run(backend, torch.float32, attn_mask=mask)["output"]
    expected = case.tensors["value"].mean(2, keepdim=True).expand_as(out)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    out = case.run(backend, torch.float64, attn_mask=mask)["output"]
    torch.testing.assert_close(out, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_sum_of_a_large_score_and_a_large_mask_is_finite(backend):
    """Scores of -1e33 and the lowest number: each is finite, so the keys take part."""
    query = torch.full((1, 1, 3, 1), 5e16)
    keys = torch.full((1, 1, 2, 70, 1), -5e16)
    value = torch.randn(1, 1, 70, 2)
    for mask in (torch.full((3, 70), LOWEST), torch.full((1, 70), LOWEST)):
        out = mgk.mixture_attention(query, keys, value, attn_mask=mask, backend=backend)
        torch.testing.assert_close(out, value.mean(2, keepdim=True).expand_as(out), atol=1e-5, rtol=0)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("e_step", E_STEPS)
def test_decoding_takes_the_lowest_number_as_a_number(function, e_step):
    case = make_case(function, sizes=(1, 2, 1, 2000, 8, 8, 2), e_step=e_step)
    inputs = {name: x.float() for name, x in case.tensors.items() if name != "upstream"}
    attend = mgk.mixture_attention if function == "mixture" else mgk.shifted_mixture_attention
    mask = torch.full((1, 2000), LOWEST)
    for kept in (None, 1234):
        if kept is not None:
            mask[:, kept] = 3.0
        for backend in BACKENDS:
            if backend == "sdpa" and e_step == "hard":
                continue
            out = attend(**inputs, attn_mask=mask, e_step=e_step, backend=backend)
            value = inputs["value"] if kept is None else inputs["value"][:, :, kept : kept + 1]
            torch.testing.assert_close(out, value.mean(2, keepdim=True), atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_half_precision_priors_and_masks_are_added_in_float32(backend):
    case = make_case(sizes=(1, 2, 40, 60, 8, 8, 2), prior="position")
    tensors = {name: x.bfloat16() for name, x in case.tensors.items() if name != "upstream"}
    mask = (torch.randn(1, 1, 1, 60) * 20).bfloat16()
    out = mgk.mixture_attention(**tensors, attn_mask=mask, backend=backend)
    exact = mgk.mixture_attention(
        **{name: x.double() for name, x in tensors.items()}, attn_mask=mask.double(), backend="reference"
    )
    # the weights of triton are rounded too, for products of bfloat16
    limit = 2**-7 if backend == "triton" else 2**-8
    assert (out.double() - exact).abs().max() < limit * exact.abs().max()


@pytest.mark.parametrize("function", ["attention", "shifted", "weights", "responsibilities", "m_step"])
def test_a_mask_of_three_dimensions_is_refused_unless_the_first_is_one(function):
    query, keys, value = torch.randn(3, 3, 4, 2), torch.randn(3, 3, 2, 5, 2), torch.randn(3, 3, 5, 2)
    call = {
        "attention": lambda mask: mgk.mixture_attention(query, keys, value, attn_mask=mask),
        "shifted": lambda mask: mgk.shifted_mixture_attention(
            query, keys[:, :, 0], torch.randn(3, 2, 2), value, attn_mask=mask
        ),
        "weights": lambda mask: mgk.mixture_weights(query, keys, attn_mask=mask),
        "responsibilities": lambda mask: mgk.responsibilities(query, keys, attn_mask=mask),
        "m_step": lambda mask: mgk.m_step(query, keys, attn_mask=mask),
    }[function]
    with pytest.raises(ValueError, match=r"attn_mask must have shape \(L, S\) or .* got .*\(3, 4, 5\)"):
        call(torch.ones(3, 4, 5, dtype=torch.bool))
    call(torch.ones(1, 4, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attn_mask must be broadcastable .* got shape \(4, 6\)"):
        call(torch.ones(4, 6, dtype=torch.bool))


def test_weights_and_responsibilities_of_the_lowest_number():
    query, keys = torch.randn(1, 1, 3, 2), torch.randn(1, 1, 2, 5, 2)
    mask = torch.full((3, 5), LOWEST)
    mask[:, 4] = -torch.inf
    weights = mgk.mixture_weights(query, keys, attn_mask=mask)
    np.testing.assert_allclose(weights[0, 0], [[0.25] * 4 + [0.0]] * 3, atol=1e-6)
    gamma = mgk.responsibilities(query, keys, attn_mask=mask)
    assert not gamma[..., 4].any()
