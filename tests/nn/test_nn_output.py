"""The module is the public function of its variant on its own projections: outputs and the gradient of everything."""

import pytest
import torch
from recompute import GAUSSIAN, LINEAR, MIXTURES, PRIORS, VARIANTS, expected_output, make, padding_mask, tokens

import mgk


def output_and_gradients(attn, out, *inputs):
    leaves = {"input": inputs[0]} | dict(attn.named_parameters())
    grads = torch.autograd.grad(out.square().sum(), list(leaves.values()), allow_unused=True)
    return {"output": out.detach()} | dict(zip(leaves, grads, strict=True))


def assert_is_its_function(attn, x, tolerance=1e-10, **options):
    x.requires_grad_()
    result = output_and_gradients(attn, attn(x, **options), x)
    expected = output_and_gradients(attn, expected_output(attn, x, **options), x)
    for name, value in expected.items():
        torch.testing.assert_close(
            result[name], value, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("num_mixtures", [1, 2, 3], ids=lambda m: f"M{m}")
@pytest.mark.parametrize("variant", VARIANTS)
def test_output_and_gradients_are_those_of_the_function(variant, num_mixtures, is_causal):
    assert_is_its_function(make(variant, num_mixtures=num_mixtures), tokens(2, 7), is_causal=is_causal)


@pytest.mark.parametrize("variance", ["constant", "learned", "em"])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("variant", GAUSSIAN)
def test_priors_and_variances_enter_as_equation_7_says(variant, prior, variance):
    assert_is_its_function(make(variant, prior=prior, variance=variance), tokens(2, 7))


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("variant", ["mlk", "smlk"])
def test_priors_enter_the_linear_variants(variant, prior):
    assert_is_its_function(make(variant, prior=prior), tokens(2, 7))


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("variant", GAUSSIAN)
def test_a_hard_e_step_is_equation_12(variant, prior):
    assert_is_its_function(make(variant, e_step="hard", prior=prior), tokens(2, 7))


@pytest.mark.parametrize("feature_map", ["elu", "favor", "dpfp", torch.nn.Softplus()], ids=str)
@pytest.mark.parametrize("variant", LINEAR)
def test_every_feature_map(variant, feature_map):
    assert_is_its_function(make(variant, feature_map=feature_map), tokens(2, 7))


@pytest.mark.parametrize("variant", VARIANTS)
def test_cross_attention_attends_to_the_context(variant):
    attn, context = make(variant), tokens(2, 9)
    assert_is_its_function(attn, tokens(2, 5), context=context)
    assert_is_its_function(attn, tokens(2, 5), context=context, key_mask=padding_mask(9, 4, total=9))
    assert_is_its_function(attn, tokens(2, 5), context=context, is_causal=True)


@pytest.mark.parametrize("options", [{"head_dim": 5}, {"bias": False}, {"head_dim": 2, "bias": False}], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_head_dim_is_free_and_biases_optional(variant, options):
    attn = make(variant, **options)
    assert attn.head_dim == options.get("head_dim", 4)
    assert (attn.q_proj.bias is None) == ("bias" in options)
    assert_is_its_function(attn, tokens(2, 7))


def backends_of(variant):
    ready = [name for name, status in mgk.available_backends().items() if status == "ready"]
    return ("auto", "reference", "blockwise") if variant in LINEAR else ("auto", *ready)


@pytest.mark.parametrize(
    ("variant", "backend"), [(variant, backend) for variant in VARIANTS for backend in backends_of(variant)]
)
def test_every_backend(variant, backend):
    attn = make(variant, backend=backend)
    for is_causal in (False, True):
        assert_is_its_function(
            attn, tokens(2, 67), key_mask=padding_mask(67, 30, total=67), is_causal=is_causal
        )


OPTIONS = [
    *((variant, {}) for variant in VARIANTS),
    *((variant, {"prior": "em"}) for variant in MIXTURES),
    *((variant, {"variance": "learned"}) for variant in GAUSSIAN),
    *((variant, {"e_step": "hard"}) for variant in GAUSSIAN),
]


@pytest.mark.parametrize(("variant", "options"), OPTIONS, ids=str)
def test_gradients_reach_every_parameter(variant, options):
    attn = make(variant, **options)
    attn(tokens(2, 7)).square().sum().backward()
    # a bias common to all keys cancels in a softmax of dot products
    untouched = {"k_proj.bias"} if variant == "softmax" else set()
    norms = {name: p.grad.norm() for name, p in attn.named_parameters()}
    assert {name for name, norm in norms.items() if norm < 1e-12} == untouched


def test_dropout_acts_in_training_only():
    attn, x = make("mgk", dropout=0.5), tokens(2, 7)
    assert not torch.equal(attn(x), attn(x))
    attn.eval()
    torch.testing.assert_close(attn(x), expected_output(attn, x))


@pytest.mark.parametrize("bias", [False, True])
def test_projecting_all_at_once_in_training_changes_nothing(bias):
    attn = mgk.nn.MixtureAttention(12, 4, num_key_value_heads=2, variant="mgk", bias=bias)
    attn, x = attn.double(), torch.randn(2, 9, 12, dtype=torch.float64)
    for parameter in attn.parameters():
        torch.nn.init.normal_(parameter)
    results = []
    for training in (True, False):
        out = attn.train(training)(x, is_causal=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(attn.parameters()))))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    seen = []
    attn.train().k_proj.register_forward_hook(lambda *args: seen.append(args))
    attn(x)
    assert len(seen) == 1  # a projection that is watched is called by itself
