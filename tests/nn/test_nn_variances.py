"""Variances: constant at sqrt(D), learned and positive, or updated by the M-step (Eq. 13 with the 1/D)."""

import itertools
import math

import pytest
import torch
from recompute import GAUSSIAN, expected_responsibilities, make, padding_mask, squared_distances, tokens

from mgk.nn import ConstantVariance, EMVariance, LearnedVariance, MixtureAttention

KEY_MASK = padding_mask(7, 4, total=7)
H, M, D = 3, 2, 4


def expected_variance(attn, batches, **masks):
    """sum gamma |q - k|^2 / (D sum gamma) over the batches (H, M)."""
    gammas = [expected_responsibilities(attn, x, **masks) for x in batches]
    distances = sum(
        (g * squared_distances(attn, x)).sum((0, 2, 4)) for g, x in zip(gammas, batches, strict=True)
    )
    return distances / (attn.head_dim * sum(g.sum((0, 2, 4)) for g in gammas))


@pytest.mark.parametrize("kind", [LearnedVariance, EMVariance])
@pytest.mark.parametrize("head_dim", [1, 4, 7])
def test_variances_start_at_the_square_root_of_the_width(kind, head_dim):
    expected = torch.full((1, H, M, 1), math.sqrt(head_dim))
    torch.testing.assert_close(kind(H, M, head_dim)(), expected)
    assert ConstantVariance(head_dim)() == math.sqrt(head_dim)


@pytest.mark.parametrize("variant", GAUSSIAN)
@pytest.mark.parametrize("variance", ["learned", "em"])
def test_a_variance_at_its_start_changes_nothing(variant, variance):
    torch.manual_seed(1)
    attn = MixtureAttention(12, H, variant=variant, variance=variance)
    torch.manual_seed(1)
    constant = MixtureAttention(12, H, variant=variant)
    x = tokens(2, 7, dtype=torch.float32)
    torch.testing.assert_close(attn(x), constant(x))


@pytest.mark.parametrize("variant", GAUSSIAN)
def test_a_learned_variance_stays_positive_while_sgd_moves_it(variant):
    attn = MixtureAttention(12, H, variant=variant, variance="learned")
    optimizer = torch.optim.SGD(attn.variance.parameters(), lr=1.0)
    for _ in range(5):
        optimizer.zero_grad()
        attn(tokens(2, 7, dtype=torch.float32)).square().sum().backward()
        optimizer.step()
    assert (attn.variance() > 0).all()
    assert (attn.variance() - math.sqrt(D)).abs().max() > 0.1


@pytest.mark.parametrize("variant", GAUSSIAN)
def test_the_normaliser_enters_the_responsibilities(variant):
    """Where q = k_0 = k_1, gamma_r is proportional to pi_r sigma_r^-D."""
    attn = MixtureAttention(12, H, variant=variant, variance="learned", prior="em").double()
    with torch.no_grad():
        for name, parameter in attn.named_parameters():
            if name.startswith(("q_proj", "k_proj", "shifts")):
                parameter.zero_()
        attn.variance.log_variance.copy_(torch.tensor([[0.0, 1.0]] * H))
    attn(tokens(2, 7))
    attn.m_step()
    expected = torch.tensor([[1.0, math.exp(-D / 2)]] * H, dtype=torch.float64)
    torch.testing.assert_close(attn.prior.pi.squeeze(-1), expected / expected.sum(1, keepdim=True))


@pytest.mark.parametrize("prior", ["learned", "em", "uniform"])
@pytest.mark.parametrize("masks", [{}, {"key_mask": KEY_MASK, "is_causal": True}], ids=["none", "key-causal"])
@pytest.mark.parametrize("variant", GAUSSIAN)
def test_the_m_step_sets_the_mean_squared_distance(variant, masks, prior):
    attn, batches = make(variant, variance="em", prior=prior, num_mixtures=3), [tokens(2, 7), tokens(2, 7)]
    before = attn.variance.sigma2.clone()
    expected = expected_variance(attn, batches, **masks)
    for x in batches:
        attn(x, **masks)
    assert torch.equal(attn.variance.sigma2, before)
    attn.m_step()
    torch.testing.assert_close(attn.variance.sigma2, expected)
    assert (expected - before).abs().max() > 1e-2
    assert not attn.variance.counts.any()
    assert not attn.variance.distances.any()


def test_momentum_keeps_a_part_of_the_old_variance():
    attn, x = make("mgk", variance=EMVariance(H, M, D, momentum=0.9)), tokens(2, 7)
    expected = 0.9 * attn.variance.sigma2 + 0.1 * expected_variance(attn, [x])
    attn(x)
    attn.m_step()
    torch.testing.assert_close(attn.variance.sigma2, expected)


def test_keys_that_coincide_with_queries_leave_the_floor():
    attn = MixtureAttention(12, H, variance="em", num_mixtures=1)
    attn.k_proj.load_state_dict(attn.q_proj.state_dict())
    x = tokens(1, 1, dtype=torch.float32).expand(2, 7, -1)
    attn(x)
    attn.m_step()
    torch.testing.assert_close(attn.variance.sigma2, torch.full((H, 1), 1e-6), rtol=1e-6, atol=0)
    assert attn(x).isfinite().all()


def test_without_evidence_a_variance_stays():
    attn = make("mgk", variance="em")
    before = attn.variance.sigma2.clone()
    attn(tokens(2, 7), key_mask=torch.zeros(2, 7, dtype=torch.bool))
    attn.eval()
    attn(tokens(2, 7))
    attn.m_step()
    assert torch.equal(attn.variance.sigma2, before)


@pytest.mark.parametrize("num_mixtures", [1, 2], ids=lambda m: f"M{m}")
@pytest.mark.parametrize("backend", ["reference", "blockwise", "auto"])
def test_a_backward_after_the_m_step_has_the_gradients_of_its_forward(backend, num_mixtures):
    attn, x = make("mgk", variance="em", backend=backend, num_mixtures=num_mixtures), tokens(2, 7)
    expected = torch.autograd.grad(attn(x).square().sum(), list(attn.parameters()))
    out = attn(x)
    attn.m_step()
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), list(attn.parameters())), expected)


def test_m_steps_raise_the_likelihood_of_the_queries():
    """EM with fixed points: as printed, without the 1/D, Eq. 13 would lower it."""
    attn, x = make("mgk", variance="em", prior="em", num_mixtures=3), tokens(4, 16)

    def log_likelihood():
        """sum_ij log sum_r pi_r N(q_i; k_jr, sigma_r^2), up to a constant."""
        variance = attn.variance.sigma2[:, None, :, None]
        exponent = -squared_distances(attn, x) / (2 * variance) - D / 2 * variance.log()
        return (exponent + attn.prior.pi[:, None].log()).logsumexp(3).sum().item()

    values = [log_likelihood()]
    for _ in range(4):
        attn(x)
        attn.m_step()
        values.append(log_likelihood())
    assert all(later > earlier for earlier, later in itertools.pairwise(values)), values


@pytest.mark.parametrize("variant", ["mgk", "smgk"])
def test_unequal_variances_are_the_authors_without_a_normaliser(variant):
    """h_i = sum_jr softmax_jr(log pi_r - |q_i - k_jr|^2 / (2 sigma_r^2)) v_j, sigma_r^2 = sqrt(D), sqrt(D) / 3."""
    torch.manual_seed(0)
    attn = MixtureAttention(8, 2, variant=variant, variance="unequal").double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    query, keys, value = attn.project(x)  # (B, H, L, D), (B, H, M, L, D)
    if variant == "smgk":
        keys = keys + attn.shifts[:, :, None]
    sigma2 = torch.tensor([2.0, 2.0 / 3], dtype=torch.float64)[:, None, None]
    distance = (query[:, :, None, :, None] - keys[:, :, :, None]).square().sum(-1)
    scores = attn.prior(5).unsqueeze(-2) - distance / (2 * sigma2)  # (B, H, M, L, S)
    weights = scores.transpose(2, 3).flatten(3).softmax(-1).unflatten(3, (2, 5)).sum(3)
    heads = (weights @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attn(x), attn.o_proj(heads))
    again = MixtureAttention(8, 2, variant=variant, variance="unequal").double()
    again.load_state_dict(attn.state_dict())
    torch.testing.assert_close(again(x), attn(x))
