"""Names, shapes and numbers of parameters; state dicts, copies and where everything starts."""

import copy

import pytest
import torch
from recompute import GAUSSIAN, MIXTURES, VARIANTS, make, tokens
from torch import nn

from mgk import variants
from mgk.nn import EMPrior, EMVariance, LearnedPrior, MixtureAttention

H, D, C = 4, 8, 32  # heads, their width, the embedding


def shapes(module):
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def projections(keys_per_token):
    names = {"q_proj": H * D, "k_proj": H * keys_per_token * D, "v_proj": H * D}
    rows = {f"{name}.weight": (size, C) for name, size in names.items()}
    return (
        rows
        | {f"{name}.bias": (size,) for name, size in names.items()}
        | {
            "o_proj.weight": (C, H * D),
            "o_proj.bias": (C,),
        }
    )


EXPECTED_SHAPES = {
    "softmax": projections(1),
    "linear": projections(1),
    "mgk": projections(3) | {"prior.logits": (H, 3)},
    "smgk": projections(1) | {"prior.logits": (H, 3), "shifts": (H, 3, D)},
    "mlk": projections(3) | {"prior.logits": (H, 3)},
    "smlk": projections(1) | {"prior.logits": (H, 3), "shifts": (H, 3, D)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dict_has_the_names_and_shapes_of_the_variant(variant):
    attn = MixtureAttention(C, H, variant=variant, num_mixtures=3)
    assert shapes(attn) == EXPECTED_SHAPES[variant]


@pytest.mark.parametrize(
    ("options", "extra"),
    [
        ({"prior": "uniform"}, {}),
        ({"prior": "em"}, {"prior.pi": (H, 2, 1), "prior.counts": (H, 2, 1)}),
        (
            {"prior": EMPrior(H, 2, max_positions=16)},
            {"prior.pi": (H, 2, 16), "prior.counts": (H, 2, 16)},
        ),
        ({"variance": "learned", "prior": "uniform"}, {"variance.log_variance": (H, 2)}),
        (
            {"variance": "em", "prior": "uniform"},
            {"variance.sigma2": (H, 2), "variance.counts": (H, 2), "variance.distances": (H, 2)},
        ),
    ],
    ids=["uniform", "em", "em table", "learned variance", "em variance"],
)
def test_priors_and_variances_add_their_own_names(options, extra):
    assert shapes(MixtureAttention(C, H, **options)) == projections(2) | extra


def test_favor_keeps_its_projection_in_the_state_dict():
    assert shapes(MixtureAttention(C, H, variant="linear", feature_map="favor")) == projections(1) | {
        "feature_map.projection": (2 * D, D)
    }


def count(variant, num_heads, **options):
    return sum(
        p.numel() for p in MixtureAttention(C, num_heads, variant=variant, head_dim=D, **options).parameters()
    )


@pytest.mark.parametrize(("shifted", "projected"), [("smgk", "mgk"), ("smlk", "mlk")])
def test_shifts_cost_fewer_parameters_than_projections_and_half_the_heads_fewer_than_all(shifted, projected):
    assert count(shifted, H) < count(projected, H) < count("softmax", 2 * H)


@pytest.mark.parametrize("variant", GAUSSIAN)
@pytest.mark.parametrize(
    "prior", ["learned", "em", "uniform", LearnedPrior(H, 2)], ids=["learned", "em", "uniform", "module"]
)
def test_a_hard_e_step_has_no_trainable_prior(variant, prior):
    attn = MixtureAttention(C, H, variant=variant, e_step="hard", prior=prior)
    assert not [name for name, _ in attn.named_parameters() if name.startswith("prior")]


@pytest.mark.parametrize("variant", ["softmax", "linear"])
def test_one_key_has_neither_prior_nor_mixtures(variant):
    attn = MixtureAttention(C, H, variant=variant, num_mixtures=5, prior="em")
    assert attn.num_mixtures == 1
    assert not list(attn.prior.state_dict())


def test_shifts_start_standard_normal_in_the_paper_and_as_wide_as_keys_by_default():
    attn = MixtureAttention(128, 4, variant="smgk", num_mixtures=8, head_dim=64, init="paper")
    assert attn.shifts.mean().abs() < 0.1
    assert (attn.shifts.std() - 1).abs() < 0.1
    attn = MixtureAttention(128, 4, variant="smgk", num_mixtures=8, head_dim=64)
    assert attn.init == "narrow"
    assert attn.shifts.std().item() == pytest.approx(variants.NARROW_SCORE_STD**0.5, rel=0.1)


def test_biases_start_at_zero_and_keys_with_the_spread_of_queries():
    attn = MixtureAttention(128, 4, num_mixtures=8)
    assert not any(p.any() for name, p in attn.named_parameters() if name.endswith("bias"))
    torch.testing.assert_close(attn.k_proj.weight.std(), attn.q_proj.weight.std(), rtol=0.05, atol=0)


def test_reset_parameters_starts_anew():
    attn = make("smgk", prior="em", variance="em")
    attn(tokens(2, 5))
    attn.reset_parameters()
    assert (attn.prior.pi == 0.5).all()
    assert (attn.variance.sigma2 == attn.head_dim**0.5).all()
    assert not attn.prior.counts.any()
    assert not attn.variance.distances.any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_state_dict_round_trip(variant, tmp_path):
    attn, other = make(variant, feature_map="favor"), make(variant, feature_map="favor")
    x = tokens(2, 5)
    assert not torch.equal(attn(x), other(x))
    torch.save(attn.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(attn(x), other(x))


@pytest.mark.parametrize("variant", MIXTURES)
def test_state_dict_carries_statistics_between_two_m_steps(variant):
    options = {"prior": "em"} | ({"variance": "em"} if variant in GAUSSIAN else {})
    attn, other = make(variant, **options), make(variant, **options)
    attn(tokens(2, 5))
    other.load_state_dict(attn.state_dict())
    x = tokens(2, 5)
    for module in (attn, other):
        module(x)
        module.m_step()
    for name, value in attn.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, msg=name)


def test_a_deep_copy_shares_nothing():
    attn = make("mgk", prior="em", variance="em")
    attn(tokens(2, 5))
    twin = copy.deepcopy(attn)
    before = {name: value.clone() for name, value in attn.state_dict().items()}
    twin(tokens(2, 5)).sum().backward()
    twin.m_step()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    for name, value in attn.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in attn.parameters())
    assert not torch.equal(twin.prior.pi, attn.prior.pi)


def test_statistics_are_buffers_without_gradients():
    attn = make("mgk", prior="em", variance="em")
    attn(tokens(2, 5)).sum().backward()
    buffers = dict(attn.named_buffers())
    assert buffers["prior.counts"].any()
    assert not any(b.requires_grad or b.grad_fn for b in buffers.values())
    assert not any(
        isinstance(module, EMPrior | EMVariance) and list(module.parameters()) for module in attn.modules()
    )


def test_repr_tells_the_options():
    text = repr(
        MixtureAttention(C, H, variant="smgk", dropout=0.1, prior=EMPrior(H, 2, momentum=0.9, max_positions=7))
    )
    for part in ("variant='smgk'", "num_mixtures=2", "dropout=0.1", "momentum=0.9", "max_positions=7"):
        assert part in text


@pytest.mark.parametrize(("saved", "loaded"), [("mlk", "mgk"), ("linear", "softmax"), ("smgk", "smlk")])
def test_weights_of_another_variant_with_the_same_shapes_are_refused(saved, loaded):
    options = {"num_heads": 2, "prior": "uniform"}
    weights = nn.Sequential(MixtureAttention(8, variant=saved, **options)).state_dict()
    model = nn.Sequential(MixtureAttention(8, variant=loaded, **options))
    message = f"0: they are of variant='{saved}', this module has variant='{loaded}'"
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(weights)
    model.load_state_dict(dict(weights))  # without the mark of state_dict() they pass
    nn.Sequential(MixtureAttention(8, variant=saved, **options)).load_state_dict(weights)
