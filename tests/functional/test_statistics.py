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


@pytest.mark.parametrize(
    ("function", "e_step", "mask", "is_causal"),
    list(itertools.product(("mixture", "shifted"), ("soft", "hard"), (None, "key", "pair", "float"), (False, True))),
)
def test_every_backend_equals_the_reference(function, e_step, mask, is_causal):
    case = make_case(
        function, sizes=(2, 2, 70, 75, 5, 4, 3), prior="component", e_step=e_step, mask=mask, is_causal=is_causal
    )
    query_mask = torch.rand(2, 70) > 0.3
    inputs, log_prior = inputs_of(case), case.tensors["log_prior"]
    expected = em_statistics.m_step(inputs, query_mask, log_prior, "reference")
    for backend in ("auto", *NAMES):
        result = em_statistics.m_step(inputs, query_mask, log_prior, backend)
        for name, a, b in zip(expected._fields, result, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9, msg=f"{backend}: {name}")
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
    step = mgk.m_step(torch.randn(1, 1, 5, 2, requires_grad=True), torch.randn(1, 1, 2, 5, 2, requires_grad=True))
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
        BACKENDS["softmax"]["blockwise"].flat_statistics(*features[:4], None, None, query, False, False)
    assert biggest < length * length / 4
