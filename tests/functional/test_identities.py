"""What must hold between calls: special cases that are softmax attention, invariances, and causality."""

import pytest
import torch
from torch.nn.functional import normalize, scaled_dot_product_attention

import mgk
from support.cases import BACKENDS, FUNCTIONS, WITH_HARD, make_case


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def assert_equal(a, b):
    torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_component_with_the_dot_kernel_is_softmax_attention(backend, is_causal):
    query, key, value = normal(2, 3, 9, 5), normal(2, 3, 9, 5), normal(2, 3, 9, 4)
    out = mgk.mixture_attention(
        query, key.unsqueeze(2), value, kernel="dot", is_causal=is_causal, backend=backend
    )
    assert_equal(out, scaled_dot_product_attention(query, key, value, is_causal=is_causal))


@pytest.mark.parametrize("backend", BACKENDS)
def test_equation_6_one_gaussian_with_unit_norm_queries_and_keys_is_softmax_attention(backend):
    query, key = normalize(normal(2, 3, 9, 5), dim=-1), normalize(normal(2, 3, 11, 5), dim=-1)
    value = normal(2, 3, 11, 4)
    out = mgk.mixture_attention(query, key.unsqueeze(2), value, backend=backend)
    assert_equal(out, scaled_dot_product_attention(query, key, value))


@pytest.mark.parametrize("kernel", ["gaussian", "dot"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_of_one_key_with_any_prior_are_one_key(backend, kernel):
    query, key, value = normal(2, 3, 9, 5), normal(2, 3, 1, 11, 5), normal(2, 3, 11, 4)
    prior = normal(2, 3, 4, 1).log_softmax(2)
    out = mgk.mixture_attention(query, key.repeat(1, 1, 4, 1, 1), value, prior, kernel=kernel, backend=backend)
    assert_equal(out, mgk.mixture_attention(query, key, value, kernel=kernel, backend=backend))


@pytest.mark.parametrize("e_step", ["soft", "hard"])
def test_shifted_keys_are_the_sum_of_key_and_shifts(e_step):
    query, key, shifts, value = normal(2, 3, 9, 5), normal(2, 3, 11, 5), normal(3, 4, 5), normal(2, 3, 11, 4)
    keys = key.unsqueeze(2) + shifts[None, :, :, None]
    for backend in BACKENDS if e_step == "soft" else WITH_HARD:
        options = {"e_step": e_step, "backend": backend}
        out = mgk.shifted_mixture_attention(query, key, shifts, value, **options)
        assert_equal(out, mgk.mixture_attention(query, keys, value, **options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gaussian_kernel_sees_differences_only(backend):
    query, keys, value, offset = normal(1, 2, 9, 5), normal(1, 2, 3, 11, 5), normal(1, 2, 11, 4), 10 * normal(5)
    moved = mgk.mixture_attention(query + offset, keys + offset, value, backend=backend)
    assert_equal(moved, mgk.mixture_attention(query, keys, value, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_order_of_components_and_positions_does_not_matter(backend):
    query, keys, value, prior = (
        normal(1, 2, 9, 5),
        normal(1, 2, 3, 11, 5),
        normal(1, 2, 11, 4),
        normal(1, 2, 3, 11),
    )
    components, positions = torch.randperm(3), torch.randperm(11)
    shuffled = mgk.mixture_attention(
        query,
        keys[:, :, components][:, :, :, positions],
        value[:, :, positions],
        prior[:, :, components][..., positions],
        backend=backend,
    )
    assert_equal(shuffled, mgk.mixture_attention(query, keys, value, prior, backend=backend))


def test_a_prior_need_not_be_normalised():
    query, keys, value, prior = (
        normal(1, 2, 9, 5),
        normal(1, 2, 3, 11, 5),
        normal(1, 2, 11, 4),
        normal(1, 2, 3, 1),
    )
    for backend in BACKENDS:
        out = mgk.mixture_attention(query, keys, value, prior + 7, backend=backend)
        assert_equal(out, mgk.mixture_attention(query, keys, value, prior, backend=backend))


@pytest.mark.parametrize("e_step", ["soft", "hard"])
def test_soft_tends_to_hard_as_the_variance_vanishes(e_step):
    """Eq. 12 is the limit of Eq. 9: the nearest component takes all."""
    query, keys = normal(1, 1, 6, 3), normal(1, 1, 2, 7, 3)
    gamma = mgk.responsibilities(query, keys, e_step=e_step, variance=1e-6)
    nearest = (query[:, :, :, None, None] - keys.unsqueeze(2)).square().sum(-1).argmin(3)
    assert torch.equal(gamma.argmax(3), nearest)
    torch.testing.assert_close(gamma.amax(3), torch.ones(1, 1, 6, 7, dtype=torch.float64))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_causal_output_does_not_see_later_tokens(function, backend):
    case = make_case(function, sizes=(2, 2, 40, 40, 5, 4, 3), prior="component", is_causal=True)
    before = case.run(backend)["output"]
    for name, dim in (("query", 2), ("key", 2), ("keys", 3), ("value", 2)):
        if name in case.tensors:
            case.tensors[name].narrow(dim, 25, 15).normal_()
    after = case.run(backend)["output"]
    assert_equal(after[:, :, :25], before[:, :, :25])
    assert (after[:, :, 25:] - before[:, :, 25:]).abs().max() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_large_later_tokens_do_not_cost_earlier_outputs_their_precision(function, backend):
    case = make_case(function, sizes=(2, 2, 40, 40, 5, 4, 3), prior="component", is_causal=True)
    before = case.run(backend, torch.float32)["output"]
    for name, dim in (("query", 2), ("key", 2), ("keys", 3), ("value", 2)):
        if name in case.tensors:
            case.tensors[name].narrow(dim, 25, 15).mul_(10_000)
    after = case.run(backend, torch.float32)["output"]
    torch.testing.assert_close(after[:, :, :25], before[:, :, :25], atol=5e-6, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_is_served_as_its_parts_are(backend):
    case = make_case(prior="component", mask="pair", is_causal=True)
    whole = case.run(backend)["output"]
    for b in range(2):
        part = make_case(prior="component", mask="pair", is_causal=True)
        for name in ("query", "keys", "value", "attn_mask", "upstream"):
            part.tensors[name] = part.tensors[name][b : b + 1]
        assert_equal(part.run(backend)["output"], whole[b : b + 1])


def test_rows_of_weights_sum_to_one_and_reproduce_the_output():
    case = make_case(prior="position", variance="component", mask="pair", is_causal=True)
    inputs = {k: v for k, v in case.tensors.items() if k not in ("value", "upstream")}
    weights = mgk.mixture_weights(**inputs, is_causal=True)
    sums = weights.sum(-1)
    assert_equal(sums, (sums > 0).to(sums.dtype))
    assert_equal(weights @ case.tensors["value"], case.run("blockwise")["output"])
