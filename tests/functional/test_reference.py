"""The oracle against loops over single numbers, written from the equations."""

import itertools

import numpy as np
import pytest
import torch

import mgk
from support import loops
from support.cases import WITH_HARD

B, H, L, S, D, E, M = 2, 2, 4, 5, 3, 2, 3
KERNELS, E_STEPS, MASKS = (
    ("gaussian", "dot"),
    ("soft", "hard"),
    ("none", "bool", "float", "causal", "bool-causal"),
)


def make_inputs(mask_kind):
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = {"bool": torch.rand(B, H, L, S, generator=generator) > 0.4, "float": normal(B, H, L, S)}
    mask = mask.get(mask_kind.split("-")[0], torch.ones(B, H, L, S, dtype=torch.bool))
    mask[0, 0, 1] = False if mask.dtype == torch.bool else -torch.inf  # a query with no key left
    return {
        "query": normal(B, H, L, D),
        "keys": normal(B, H, M, S, D),
        "log_prior": normal(B, H, M, S).log_softmax(2),
        "variance": normal(B, H, M, S).exp(),
        "attn_mask": mask,
        "is_causal": mask_kind.endswith("causal"),
    }


def as_loops(inputs, kernel, e_step):
    arrays = [inputs[name].numpy() for name in ("query", "keys", "log_prior", "variance")]
    return *arrays, kernel, e_step, inputs["attn_mask"].numpy(), inputs["is_causal"]


@pytest.mark.parametrize(("kernel", "e_step", "mask"), list(itertools.product(KERNELS, E_STEPS, MASKS)))
def test_weights_and_output_are_equation_9_and_10(kernel, e_step, mask):
    inputs = make_inputs(mask)
    expected = loops.weights(*as_loops(inputs, kernel, e_step))
    weights = mgk.mixture_weights(**inputs, kernel=kernel, e_step=e_step)
    np.testing.assert_allclose(weights.numpy(), expected, atol=1e-13)
    value = torch.randn(B, H, S, E, dtype=torch.float64)
    out = mgk.mixture_attention(**inputs, value=value, kernel=kernel, e_step=e_step, backend="reference")
    np.testing.assert_allclose(out.numpy(), expected @ value.numpy(), atol=1e-13)


@pytest.mark.parametrize(("kernel", "e_step", "mask"), list(itertools.product(KERNELS, E_STEPS, MASKS)))
def test_responsibilities_are_equation_11(kernel, e_step, mask):
    inputs = make_inputs(mask)
    gamma = mgk.responsibilities(**inputs, kernel=kernel, e_step=e_step)
    np.testing.assert_allclose(
        gamma.numpy(), loops.responsibilities(*as_loops(inputs, kernel, e_step)), atol=1e-13
    )


@pytest.mark.parametrize(("e_step", "mask"), list(itertools.product(E_STEPS, MASKS)))
def test_m_step_is_equation_13_with_one_over_d(e_step, mask):
    inputs = make_inputs(mask)
    query_mask = torch.tensor([[True, True, False, True], [True, True, True, True]])
    gamma = loops.responsibilities(*as_loops(inputs, "gaussian", e_step))
    counts, priors, means, variances = loops.m_step(gamma, inputs["query"].numpy(), query_mask.numpy())
    result = mgk.m_step(**inputs, e_step=e_step, query_mask=query_mask)
    np.testing.assert_allclose(result.counts.numpy(), counts, atol=1e-12)
    seen = counts > 0
    position_seen = np.broadcast_to(seen.any(2, keepdims=True), seen.shape)
    np.testing.assert_allclose(result.prior.numpy()[position_seen], priors[position_seen], atol=1e-12)
    np.testing.assert_allclose(result.keys.numpy()[seen], means[seen], atol=1e-12)
    np.testing.assert_allclose(result.variance.numpy()[seen], variances[seen], atol=1e-12)
    unseen = torch.from_numpy(~seen)
    assert torch.equal(result.keys[unseen], inputs["keys"][unseen])
    assert torch.equal(result.variance[unseen], inputs["variance"][unseen])
    kept = torch.from_numpy(~position_seen)
    torch.testing.assert_close(result.prior[kept], inputs["log_prior"].softmax(2)[kept])


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["elu", "dpfp"])
def test_linear_weights_and_output_are_equation_14(name, is_causal):
    feature_map = {
        "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
        "dpfp": lambda x: (y := np.maximum(np.concatenate([x, -x]), 0)) * np.roll(y, 1),
    }[name]
    inputs = make_inputs("none")
    key_mask = torch.rand(B, S) > 0.3
    expected = loops.linear_weights(
        *(inputs[n].numpy() for n in ("query", "keys", "log_prior")), feature_map, key_mask.numpy(), is_causal
    )
    arguments = (inputs["query"], inputs["keys"])
    options = {"feature_map": name, "key_mask": key_mask, "is_causal": is_causal}
    weights = mgk.linear_mixture_weights(*arguments, inputs["log_prior"], **options)
    np.testing.assert_allclose(weights.numpy(), expected, atol=1e-13)
    value = torch.randn(B, H, S, E, dtype=torch.float64)
    for backend in ("reference", "blockwise"):
        out = mgk.linear_mixture_attention(*arguments, value, inputs["log_prior"], **options, backend=backend)
        np.testing.assert_allclose(out.numpy(), expected @ value.numpy(), atol=1e-12)


def test_hard_gradient_goes_to_the_lowest_component_on_a_tie():
    key = torch.randn(1, 1, 1, 4, 3, dtype=torch.float64)
    query, value = torch.randn(1, 1, 6, 3, dtype=torch.float64), torch.randn(1, 1, 4, 2, dtype=torch.float64)
    for backend in WITH_HARD:
        keys = key.repeat(1, 1, 3, 1, 1).requires_grad_()
        out = mgk.mixture_attention(query, keys, value, e_step="hard", backend=backend)
        (grad,) = torch.autograd.grad(out.square().sum(), keys)
        assert grad[:, :, 0].abs().max() > 0
        assert not grad[:, :, 1:].any()
