"""Every backend against the reference: output and all gradients, in float64, over the option matrix and odd sizes."""

import pytest
import torch

import mgk
from support.cases import BACKENDS, FUNCTIONS, OPTIONS, SIZES, WITH_HARD, largest_errors, make_case

OTHERS = tuple(name for name in BACKENDS if name not in ("reference", "blockwise"))
OTHERS_WITH_HARD = tuple(name for name in OTHERS if name in WITH_HARD)


def assert_agrees(case, backend):
    errors = largest_errors(case.run(backend), case.run("reference"))
    assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize(("function", "kernel", "prior", "variance", "mask", "is_causal"), OPTIONS)
def test_backends_agree_with_the_reference(function, kernel, prior, variance, mask, is_causal):
    options = {"kernel": kernel, "prior": prior, "variance": variance, "mask": mask, "is_causal": is_causal}
    for e_step in ("soft", "hard"):
        assert_agrees(make_case(function, e_step=e_step, **options), "blockwise")
        if mask != "float":  # the others have no gradient for it
            for backend in OTHERS if e_step == "soft" else OTHERS_WITH_HARD:
                assert_agrees(make_case(function, e_step=e_step, **options), backend)


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "B{}-H{}-L{}-S{}-D{}-E{}-M{}".format(*s))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_backends_agree_at_odd_sizes(function, sizes):
    for is_causal in (False, True):
        case = make_case(function, sizes=sizes, prior="component", is_causal=is_causal)
        for backend in BACKENDS:
            assert_agrees(case, backend)
        for backend in WITH_HARD:
            assert_agrees(make_case(function, sizes=sizes, e_step="hard", is_causal=is_causal), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_need_not_be_contiguous(backend):
    case = make_case(prior="position")
    truth = case.run("reference")
    for name in ("query", "keys", "value", "log_prior"):
        x = case.tensors[name]
        case.tensors[name] = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert max(largest_errors(case.run(backend), truth).values()) < 1e-10


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 17), (1, 1, 13, 1), (2, 3, 13, 17), (13, 17), (17,), (2, 1, 1, 1)], ids=str
)
def test_masks_broadcast_and_float_masks_have_gradients_of_their_own_shape(shape):
    case = make_case()
    case.tensors["attn_mask"] = torch.randn(shape, dtype=torch.float64)
    result = case.run("blockwise")
    assert result["attn_mask"].shape == shape
    assert max(largest_errors(result, case.run("reference")).values()) < 1e-10


@pytest.mark.parametrize("zero", ["batch", "queries", "keys"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_inputs_give_empty_outputs_or_zeros(zero, backend):
    batch, num_queries, num_keys = (0 if zero == name else 3 for name in ("batch", "queries", "keys"))
    case = make_case(sizes=(batch, 2, num_queries, num_keys, 4, 5, 2))
    query = case.tensors["query"].requires_grad_()
    out = mgk.mixture_attention(query, case.tensors["keys"], case.tensors["value"], backend=backend)
    assert out.shape == (batch, 2, num_queries, 5)
    assert not out.any()
    assert not torch.autograd.grad(out.sum(), query)[0].any()


@pytest.mark.parametrize("gone", [[0], [1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("backend", OTHERS)
def test_components_that_a_shared_prior_removes_are_gone(backend, function, is_causal, gone):
    case = make_case(function, sizes=(1, 2, 37, 37, 8, 8, 3), prior="component", is_causal=is_causal)
    case.tensors["log_prior"][:, 0, gone] = -torch.inf
    result = case.run(backend)
    assert max(largest_errors(result, case.run("reference")).values()) < 1e-10
    assert result["output"][:, 0].any() == (len(gone) < 3)


@pytest.mark.parametrize("e_step", ["soft", "hard"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_key_that_is_masked_leaves_nothing(backend, function, e_step):
    if e_step == "hard" and backend == "sdpa":
        return
    case = make_case(function, sizes=(1, 2, 5, 1, 4, 4, 3), prior="component", mask="key", e_step=e_step)
    case.tensors["attn_mask"] = torch.zeros_like(case.tensors["attn_mask"], dtype=torch.bool)
    assert not any(x.any() for x in case.run(backend).values())


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("backend", OTHERS)
def test_float_masks_that_need_no_gradient_are_obeyed(backend, function, is_causal):
    case = make_case(function, prior="component", mask="float", is_causal=is_causal)
    case.tensors["attn_mask"][3] = -torch.inf
    truth = case.run("reference")["output"]
    mask = case.tensors.pop("attn_mask")
    torch.testing.assert_close(case.run(backend, attn_mask=mask)["output"], truth, atol=1e-10, rtol=0)


@pytest.mark.parametrize("zero", ["batch", "queries", "keys"])
def test_empty_inputs_have_empty_weights_and_statistics(zero):
    batch, num_queries, num_keys = (0 if zero == name else 3 for name in ("batch", "queries", "keys"))
    query, keys = torch.randn(batch, 2, num_queries, 4), torch.randn(batch, 2, 2, num_keys, 4)
    assert mgk.mixture_weights(query, keys).shape == (batch, 2, num_queries, num_keys)
    assert mgk.mixture_weights(query, keys, e_step="hard").shape == (batch, 2, num_queries, num_keys)
    assert mgk.responsibilities(query, keys).shape == (batch, 2, num_queries, 2, num_keys)
    step = mgk.m_step(query, keys)
    assert step.counts.shape == step.prior.shape == step.variance.shape == (batch, 2, 2, num_keys)
    assert not step.counts.any()
