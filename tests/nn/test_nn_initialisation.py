"""The start: the spread of the scores of a new module is that of the formula, for every variant, width and start."""

import pytest
import torch

import mgk
from mgk import variants
from mgk.analysis.initial_scores import key_variance, score_std
from mgk.functional.linear.feature_maps import elu_features
from mgk.nn import MixtureAttention

SIZES = [(96, 2, 16), (96, 4, 16), (64, 8, 32), (256, 1, 64)]  # embed_dim, num_heads, head_dim
STARTS = ["paper", "narrow", 0.1, 0.4]


def component_scores(attn, length=64):
    """s_ijr without the terms of i alone, of layer-normalised tokens: (H, M, L, S)."""
    x = torch.nn.functional.layer_norm(torch.randn(1, length, attn.embed_dim), (attn.embed_dim,))
    query, keys, _ = attn.project(x)
    if attn.shifts is not None:
        keys = keys + attn.shifts[:, :, None]
    if attn.is_linear:
        products = torch.einsum("bhid,bhmjd->hmij", elu_features(query), elu_features(keys))
        return products / products.mean(-1, keepdim=True)
    scores = torch.einsum("bhid,bhmjd->hmij", query, keys)
    if attn.kernel == "gaussian":
        scores = scores - keys[0].square().sum(-1)[:, :, None] / 2
    return scores / attn.head_dim**0.5


def measured_std(variant, size, draws=24, **options):
    """Over keys, of the mean over components: root mean square over queries, heads and draws."""
    torch.manual_seed(0)
    embed_dim, num_heads, head_dim = size
    variances = []
    for _ in range(draws):
        attn = MixtureAttention(embed_dim, num_heads, head_dim=head_dim, variant=variant, **options)
        variances.append(component_scores(attn).mean(1).var(-1).mean())
    return torch.stack(variances).mean().sqrt().item()


@pytest.mark.parametrize("init", STARTS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("variant", ["softmax", "mgk", "smgk"])
@torch.no_grad()
def test_scores_start_as_wide_as_the_formula_says(variant, size, init):
    expected = score_std(
        variant, **dict(zip(("embed_dim", "num_heads", "head_dim"), size, strict=True)), init=init
    )
    assert measured_std(variant, size, init=init) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("num_mixtures", [1, 4])
@pytest.mark.parametrize(("variant", "kernel"), [("mgk", "gaussian"), ("mgk", "dot"), ("smgk", "gaussian")])
@torch.no_grad()
def test_components_and_kernels_enter_the_formula(variant, kernel, num_mixtures):
    options = {"num_mixtures": num_mixtures, "kernel": kernel, "init": 0.3}
    expected = score_std(variant, embed_dim=96, num_heads=2, head_dim=16, **options)
    assert measured_std(variant, (96, 2, 16), **options) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("variant", ["linear", "mlk"])
@torch.no_grad()
def test_linear_weights_start_as_wide_as_the_formula_says(variant):
    expected = score_std(variant, embed_dim=96, num_heads=2, head_dim=16, init=0.02)
    assert measured_std(variant, (96, 2, 16), init=0.02) == pytest.approx(expected, rel=0.1)


def test_the_start_does_not_depend_on_the_heads_except_in_the_paper():
    stds = [
        [score_std("mgk", embed_dim=64, num_heads=h, head_dim=32, init=init) for h in (1, 8)] for init in STARTS
    ]
    assert stds[0][0] > 3 * stds[0][1]
    assert all(one == eight for one, eight in stds[1:])


@torch.no_grad()
def test_narrow_has_a_name_and_a_number():
    torch.manual_seed(0)
    named = MixtureAttention(32, 2, variant="smgk", init="narrow")
    torch.manual_seed(0)
    number = MixtureAttention(32, 2, variant="smgk", init=variants.NARROW_SCORE_STD)
    for ours, theirs in zip(named.parameters(), number.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert key_variance(32, 2, 16, "narrow") == variants.NARROW_SCORE_STD


@pytest.mark.parametrize("variant", ["mgk", "smgk"])
@torch.no_grad()
def test_values_and_outputs_start_as_in_the_paper(variant):
    for init in STARTS:
        torch.manual_seed(0)
        attn = MixtureAttention(96, 2, head_dim=16, variant=variant, init=init)
        for projection in (attn.v_proj, attn.o_proj):
            assert projection.weight.var().item() == pytest.approx(2 / (96 + 32), rel=0.1)


@pytest.mark.parametrize("variance", ["constant", "learned"])
@torch.no_grad()
def test_the_dot_kernel_of_the_module_is_equation_8(variance):
    attn = MixtureAttention(12, 3, kernel="dot", variance=variance, prior="uniform").double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    query, keys, value = attn.project(x)
    heads = mgk.mixture_attention(query, keys, value, kernel="dot")
    torch.testing.assert_close(attn(x), attn.o_proj(heads.transpose(1, 2).flatten(2)))
