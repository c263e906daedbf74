"""The M-step in blocks: equal to the materialised one, better likelihood, no N x N memory."""

import itertools

import pytest
import torch

import mgk
from mgk.functional.backends import BACKENDS
from mgk.functional.mixture import em_statistics
from mgk.functional.mixture.features import score_features
from mgk.functional.mixture.inputs import validate_inputs
from support.cases import BACKENDS as NAMES
from support.cases import inputs_of, make_case

COUNTS = [name for name in NAMES if name != "sdpa"]
MOMENTS = [name for name in COUNTS if name != "cpu"]


@pytest.mark.parametrize(
    ("function", "e_step", "mask", "is_causal"),
    list(
        itertools.product(
            ("mixture", "shifted"), ("soft", "hard"), (None, "key", "pair", "float"), (False, True)
        )
    ),
)
def test_every_backend_equals_the_reference(function, e_step, mask, is_causal):
    case = make_case(
        function,
        sizes=(2, 2, 70, 75, 5, 4, 3),
        prior="component",
        e_step=e_step,
        mask=mask,
        is_causal=is_causal,
    )
    query_mask = torch.rand(2, 70) > 0.3
    inputs, log_prior = inputs_of(case), case.tensors["log_prior"]
    expected = em_statistics.m_step(inputs, query_mask, log_prior, "reference")
    for backend in ("auto", *MOMENTS):
        result = em_statistics.m_step(inputs, query_mask, log_prior, backend)
        for name, a, b in zip(expected._fields, result, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9, msg=f"{backend}: {name}")
    for backend in ("auto", *COUNTS):
        torch.testing.assert_close(em_statistics.counts(inputs, query_mask, backend), expected.counts)


def log_likelihood(query, keys, log_prior, variance):
    """sum_ij log sum_r pi_jr N(q_i | k_jr, sigma_jr^2 I)."""
    dim = query.shape[-1]
    squared = (query[:, :, :, None, None] - keys.unsqueeze(2)).square().sum(-1)  # (B, H, L, M, S)
    density = -squared / (2 * variance.unsqueeze(2)) - dim / 2 * variance.log().unsqueeze(2)
    return (log_prior.unsqueeze(2) + density).logsumexp(3).sum()


def test_the_m_step_never_lowers_the_likelihood():
    """True with the 1/D of an isotropic Gaussian; Eq. 13 as printed lacks it."""
    query, keys = torch.randn(1, 1, 60, 4, dtype=torch.float64), torch.randn(1, 1, 3, 6, 4, dtype=torch.float64)
    log_prior = torch.full((1, 1, 3, 6), 1 / 3, dtype=torch.float64).log()
    variance = torch.ones(1, 1, 3, 6, dtype=torch.float64)
    last = log_likelihood(query, keys, log_prior, variance)
    for _ in range(20):
        normalised = log_prior - 2 * variance.log()  # -(D / 2) log sigma^2
        step = mgk.m_step(query, keys, normalised, variance=variance)
        keys, log_prior, variance = step.keys, step.prior.log(), step.variance
        now = log_likelihood(query, keys, log_prior, variance)
        assert now >= last - 1e-9
        last = now


def test_priors_of_a_position_sum_to_one_and_counts_to_the_admitted_queries():
    query, keys = torch.randn(2, 3, 50, 4), torch.randn(2, 3, 4, 50, 4)
    step = mgk.m_step(query, keys, is_causal=True)
    torch.testing.assert_close(step.prior.sum(2), torch.ones(2, 3, 50))
    torch.testing.assert_close(step.counts.sum(2), torch.arange(50, 0, -1.0).expand(2, 3, -1))


def test_the_m_step_stays_outside_autograd():
    step = mgk.m_step(
        torch.randn(1, 1, 5, 2, requires_grad=True), torch.randn(1, 1, 2, 5, 2, requires_grad=True)
    )
    assert not any(x.requires_grad for x in step)


def test_no_matrix_of_all_pairs_is_made():
    """Every tensor that the operators make is counted; none reaches a quarter of L * S elements."""
    length = 4096
    biggest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal biggest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                if isinstance(x, torch.Tensor):
                    biggest = max(biggest, x.numel())
            return out

    query, keys = torch.randn(1, 1, length, 2), torch.randn(1, 1, 2, length, 2)
    with Watch():
        # to the dispatcher an operator is one call, so its implementation is called here
        features = score_features(validate_inputs(query, keys))
        BACKENDS["softmax"]["blockwise"].flat_statistics(
            *features[:4], None, None, query, None, False, None, None
        )
    assert biggest < length * length / 4


@pytest.mark.parametrize("backend", ["auto", *MOMENTS])
@pytest.mark.parametrize("update_keys", [True, False])
def test_variances_of_tight_clusters_far_from_the_mean_key(backend, update_keys):
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([100.0, -100.0])
    query = (centres.repeat(300)[:, None] + 0.01 * torch.randn(600, 4, generator=generator))[None, None]
    keys = centres.view(1, 1, 2, 1, 1).expand(1, 1, 2, 5, 4).contiguous() + 0.002
    exact = validate_inputs(query.double(), keys.double(), variance=1.0)
    expected = em_statistics.m_step(exact, None, None, "reference", update_keys).variance
    result = em_statistics.m_step(
        validate_inputs(query, keys, variance=1.0), None, None, backend, update_keys
    ).variance
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=0)
    assert 5e-5 < expected.max() < 2e-4


def test_without_evidence_the_prior_is_the_given_one_normalised():
    query, keys = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 3, 5, 4)
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[:, 3:] = False
    log_prior = torch.randn(1, 2, 3, 5)  # not normalised
    log_prior[..., 4] = -torch.inf
    prior = mgk.m_step(query, keys, log_prior, attn_mask=mask).prior
    torch.testing.assert_close(prior[..., 3], log_prior[..., 3].softmax(2))
    assert not prior[..., 4].any()
    torch.testing.assert_close(prior[..., :3].sum(2), torch.ones(1, 2, 3))
    shared = mgk.m_step(query, keys, torch.randn(1, 2, 1, 5), attn_mask=mask).prior
    torch.testing.assert_close(shared.sum(2), torch.ones(1, 2, 5))
    torch.testing.assert_close(shared[..., 3:], torch.full((1, 2, 3, 2), 1 / 3))
    removed = mgk.m_step(query, keys, torch.full((1, 1, 1, 1), -torch.inf), attn_mask=mask).prior
    assert not removed.any()


def test_the_variance_alone_never_lowers_the_likelihood():
    """About the given keys it does not; about new keys that are not taken it would."""
    query = torch.randn(1, 1, 60, 4, dtype=torch.float64)
    keys = 2 * torch.randn(1, 1, 3, 6, 4, dtype=torch.float64)
    log_prior = torch.full((1, 1, 3, 6), 1 / 3, dtype=torch.float64).log()
    variance = torch.ones(1, 1, 3, 6, dtype=torch.float64)
    last = log_likelihood(query, keys, log_prior, variance)
    for _ in range(20):
        step = mgk.m_step(query, keys, log_prior - 2 * variance.log(), variance=variance, update_keys=False)
        assert (step.keys == keys).all()
        variance = step.variance
        now = log_likelihood(query, keys, log_prior, variance)
        assert now >= last - 1e-9
        last = now
    about_new_keys = mgk.m_step(query, keys, log_prior - 2 * variance.log(), variance=variance).variance
    assert log_likelihood(query, keys, log_prior, about_new_keys) < last


def test_the_module_sums_tight_clusters_precisely():
    """What EMVariance adds up: sum_i gamma_ijr |q_i - k_jr|^2."""
    query = torch.tensor([100.0, -100.0]).repeat(50)[None, None, :, None] + 0.01 * torch.randn(1, 1, 100, 4)
    keys = torch.tensor([100.0, -100.0]).view(1, 1, 2, 1, 1).expand(1, 1, 2, 3, 4)
    for dtype in (torch.float32, torch.float64):
        inputs = validate_inputs(query.to(dtype), keys.to(dtype), variance=1.0)
        distances = em_statistics.squared_distances(inputs, em_statistics.moments(inputs))
        near = (query.double() - keys.double()[:, :, 0, :1]).square().sum(-1)
        torch.testing.assert_close(distances[0, 0, 0, 0].double(), near[near < 1].sum(), rtol=1e-3, atol=0)
