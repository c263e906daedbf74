"""Feature maps as modules: Favor's random features are seeded, redrawable, saved, and see one token at a time."""

import pytest
import torch
from recompute import LINEAR, make, tokens

from mgk.nn import Dpfp, Elu, Favor, MixtureAttention


def test_the_same_seed_draws_the_same_projection():
    assert torch.equal(Favor(8, seed=3).projection, Favor(8, seed=3).projection)
    assert not torch.equal(Favor(8, seed=3).projection, Favor(8, seed=4).projection)


def test_without_a_seed_the_global_generator_decides():
    drawn = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        drawn.append(Favor(8).projection)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_a_redraw_changes_the_output_and_can_be_repeated():
    attn, x = make("mlk", feature_map="favor"), tokens(2, 7)
    before = attn(x)
    attn.feature_map.redraw(seed=9)
    redrawn = attn(x)
    assert not torch.equal(before, redrawn)
    attn.feature_map.redraw()
    attn.feature_map.redraw(seed=9)
    assert torch.equal(attn(x), redrawn)
    assert attn.feature_map.projection.dtype == torch.float64


@pytest.mark.parametrize("variant", LINEAR)
def test_two_modules_have_their_own_projections_and_the_state_dict_carries_them(variant):
    attn, other = (MixtureAttention(12, 3, variant=variant, feature_map="favor") for _ in range(2))
    assert not torch.equal(attn.feature_map.projection, other.feature_map.projection)
    other.load_state_dict(attn.state_dict())
    x = tokens(2, 7, dtype=torch.float32)
    assert torch.equal(attn(x), other(x))


@pytest.mark.parametrize(
    "feature_map", [Elu(), Dpfp(nu=2), Favor(4, 16, seed=0)], ids=lambda m: type(m).__name__
)
def test_features_of_a_token_do_not_depend_on_the_others(feature_map):
    x = torch.randn(2, 3, 7, 4)
    for phi in (feature_map, getattr(feature_map, "features_of_queries", feature_map)):
        features = phi(x)
        assert features.shape[:-1] == x.shape[:-1]
        assert (features >= 0).all()
        torch.testing.assert_close(phi(x[:, :, 2:3]), features[:, :, 2:3])
        assert torch.equal(phi(torch.cat([x[:, :, :4], 100 * x[:, :, 4:]], 2))[:, :, :4], features[:, :, :4])


def test_favor_estimates_the_softmax_kernel():
    q, k = torch.randn(5, 4) / 2, torch.randn(6, 4) / 2
    favor = Favor(4, 20_000, seed=0)
    torch.testing.assert_close(favor(q) @ favor(k).mT, (q @ k.mT / 2).exp(), atol=0.05, rtol=0.05)


def test_sizes_of_the_features():
    x = torch.randn(3, 8)
    assert [phi(x).shape[-1] for phi in (Elu(), Dpfp(), Dpfp(nu=3), Favor(8), Favor(8, 5))] == [
        8,
        16,
        48,
        16,
        5,
    ]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Favor(0), "head_dim must be at least 1, got 0"),
        (lambda: Favor(4, 0), "num_features must be at least 1, got 0"),
        (lambda: Favor(4, 2.5), "num_features must be a whole number, got float"),
        (lambda: Dpfp(nu=0), "nu must be at least 1, got 0"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()
