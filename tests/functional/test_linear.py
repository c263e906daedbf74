"""Linear attention with mixed keys: O(N) form, chunks, steps and segments agree."""

import pytest
import torch

import mgk
from mgk.functional.linear.api import LinearState
from mgk.functional.linear.feature_maps import dpfp_features, elu_features, favor_features, favor_projection

MAPS = ("elu", "favor", "dpfp")


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def make_inputs(num_queries=130, num_keys=130, mixtures=3):
    shape = (2, 3)
    return {
        "query": normal(*shape, num_queries, 5),
        "keys": normal(*shape, mixtures, num_keys, 5),
        "value": normal(*shape, num_keys, 4),
        "log_prior": normal(1, 3, mixtures, 1).log_softmax(2),
    }


def assert_equal(a, b, atol=1e-11):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("num_queries", "num_keys"),
    [(1, 1), (7, 7), (63, 63), (64, 64), (65, 65), (300, 300), (5, 200), (200, 5), (1, 90)],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_linear_form_equals_the_materialised_one_with_all_gradients(num_queries, num_keys, is_causal):
    inputs = make_inputs(num_queries, num_keys)
    results = []
    for backend in ("reference", "blockwise"):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        out = mgk.linear_mixture_attention(**leaves, is_causal=is_causal, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))])
    for a, b in zip(*results, strict=True):
        assert_equal(a, b, atol=1e-10)


@pytest.mark.parametrize("feature_map", MAPS)
def test_step_by_step_equals_chunks(feature_map):
    inputs = make_inputs()
    prior = inputs.pop("log_prior")
    options = {"feature_map": feature_map, "is_causal": True, "return_state": True}
    whole, whole_state = mgk.linear_mixture_attention(**inputs, log_prior=prior, **options)
    state, steps = None, []
    for t in range(130):
        now = (
            inputs["query"][:, :, t : t + 1],
            inputs["keys"][:, :, :, t : t + 1],
            inputs["value"][:, :, t : t + 1],
        )
        out, state = mgk.linear_mixture_attention(*now, prior, **options, initial_state=state)
        steps.append(out)
    assert_equal(torch.cat(steps, 2), whole)
    for a, b in zip(state, whole_state, strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("lengths", [(130,), (1, 129), (64, 66), (40, 50, 40), (129, 1)], ids=str)
def test_segments_with_the_state_handed_on_equal_the_whole(lengths, backend):
    inputs = make_inputs()
    prior = inputs.pop("log_prior")
    mask = torch.rand(2, 130) > 0.2
    whole = mgk.linear_mixture_attention(**inputs, log_prior=prior, key_mask=mask, is_causal=True)
    state, outs = None, []
    parts = zip(
        inputs["query"].split(lengths, 2),
        inputs["keys"].split(lengths, 3),
        inputs["value"].split(lengths, 2),
        mask.split(lengths, 1),
        strict=True,
    )
    for query, keys, value, key_mask in parts:
        out, state = mgk.linear_mixture_attention(
            query,
            keys,
            value,
            prior,
            key_mask=key_mask,
            is_causal=True,
            initial_state=state,
            return_state=True,
            backend=backend,
        )
        outs.append(out)
    assert isinstance(state, LinearState)
    assert_equal(torch.cat(outs, 2), whole)


def test_the_last_causal_query_sees_what_every_query_sees_without_causality():
    inputs = make_inputs()
    causal, state = mgk.linear_mixture_attention(**inputs, is_causal=True, return_state=True)
    full, full_state = mgk.linear_mixture_attention(**inputs, return_state=True)
    assert_equal(causal[:, :, -1], full[:, :, -1])
    for a, b in zip(state, full_state, strict=True):
        assert_equal(a, b)


def test_a_state_does_not_grow_with_the_number_of_keys():
    sizes = {
        n: [x.shape for x in mgk.linear_mixture_attention(**make_inputs(n, n), return_state=True)[1]]
        for n in (1, 10, 500)
    }
    assert sizes[1] == sizes[10] == sizes[500]


@pytest.mark.parametrize("is_causal", [False, True])
def test_padding_touches_neither_output_nor_state(is_causal):
    inputs = make_inputs()
    mask = torch.ones(2, 130, dtype=torch.bool)
    mask[:, 100:] = False
    short = {
        "query": inputs["query"][:, :, :100],
        "keys": inputs["keys"][:, :, :, :100],
        "value": inputs["value"][:, :, :100],
        "log_prior": inputs["log_prior"],
    }
    inputs["keys"][:, :, :, 100:] = torch.nan
    inputs["value"][:, :, 100:] = 1e6
    out, state = mgk.linear_mixture_attention(**inputs, key_mask=mask, is_causal=is_causal, return_state=True)
    expected, expected_state = mgk.linear_mixture_attention(**short, is_causal=is_causal, return_state=True)
    assert_equal(out[:, :, :100], expected)
    for a, b in zip(state, expected_state, strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_normaliser_of_zero_gives_zeros_and_zero_gradient(is_causal, backend):
    inputs = {name: x.requires_grad_() for name, x in make_inputs(9, 9).items()}
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 5:] = True
    out = mgk.linear_mixture_attention(**inputs, key_mask=mask, is_causal=is_causal, backend=backend)
    assert not out[1].any()
    if is_causal:
        assert not out[0, :, :5].any()
    grads = torch.autograd.grad(out.sum(), list(inputs.values()))
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][1].any()


def test_disjoint_dpfp_features_give_zeros():
    query, key = torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[[-1.0, 0.0]]]]])
    assert mgk.linear_mixture_attention(query, key, torch.ones(1, 1, 1, 3), feature_map="dpfp").eq(0).all()


def test_one_component_is_plain_linear_attention_and_copies_change_nothing():
    inputs = make_inputs(mixtures=1)
    inputs["log_prior"] = None
    once = mgk.linear_mixture_attention(**inputs, is_causal=True)
    phi_q, phi_k = elu_features(inputs["query"]), elu_features(inputs["keys"][:, :, 0])
    products = (phi_q @ phi_k.mT).tril()
    assert_equal(once, products @ inputs["value"] / products.sum(-1, keepdim=True))
    inputs["keys"] = inputs["keys"].repeat(1, 1, 4, 1, 1)
    inputs["log_prior"] = normal(1, 3, 4, 1).log_softmax(2)
    assert_equal(mgk.linear_mixture_attention(**inputs, is_causal=True), once)


def test_the_mixture_is_taken_after_the_feature_map():
    inputs = make_inputs(9, 9)
    pi = inputs["log_prior"].exp().unsqueeze(-1)
    mixed = (pi * elu_features(inputs["keys"])).sum(2)
    products = elu_features(inputs["query"]) @ mixed.mT
    assert_equal(
        mgk.linear_mixture_attention(**inputs), products @ inputs["value"] / products.sum(-1, keepdim=True)
    )


def test_a_causal_output_does_not_see_later_tokens():
    for feature_map in MAPS:
        inputs = make_inputs()
        before = mgk.linear_mixture_attention(**inputs, is_causal=True, feature_map=feature_map)
        inputs["keys"][:, :, :, 70:] += 1
        inputs["value"][:, :, 70:] += 1
        after = mgk.linear_mixture_attention(**inputs, is_causal=True, feature_map=feature_map)
        assert_equal(after[:, :, :70], before[:, :, :70])


def test_rows_of_weights_sum_to_one_and_reproduce_the_output():
    inputs = make_inputs(40, 40)
    value = inputs.pop("value")
    mask = torch.rand(2, 40) > 0.2
    mask[:, 0] = True
    weights = mgk.linear_mixture_weights(**inputs, key_mask=mask, is_causal=True)
    assert_equal(weights.sum(-1), torch.ones(2, 3, 40, dtype=torch.float64))
    assert_equal(
        weights @ value, mgk.linear_mixture_attention(**inputs, value=value, key_mask=mask, is_causal=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1, 3, 100])
@pytest.mark.parametrize("feature_map", ["elu", "dpfp"])
def test_lower_precision_is_finite_and_close(dtype, scale, feature_map):
    exact = {
        name: (x * scale if name in ("query", "keys") else x).to(dtype).double()
        for name, x in make_inputs().items()
    }
    options = {"feature_map": feature_map, "is_causal": True}
    expected = mgk.linear_mixture_attention(**exact, **options, backend="reference")
    out = mgk.linear_mixture_attention(**{name: x.to(dtype) for name, x in exact.items()}, **options)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() < 8 * torch.finfo(dtype).eps * max(1, expected.abs().max())


def test_callables_serve_as_feature_maps():
    inputs = make_inputs()
    assert torch.equal(
        mgk.linear_mixture_attention(**inputs, feature_map=elu_features),
        mgk.linear_mixture_attention(**inputs, feature_map="elu"),
    )
    with pytest.raises(ValueError, match="feature_map must map"):
        mgk.linear_mixture_attention(**inputs, feature_map=lambda x: x.sum(-1))


def test_elu_features_keep_their_precision_for_negative_numbers():
    x = torch.tensor([-30.0, -10.0, 0.0, 2.0])
    torch.testing.assert_close(elu_features(x).double(), torch.cat([x[:3].double().exp(), x[3:].double() + 1]))


def test_dpfp_features_are_nonnegative_and_wide():
    features = dpfp_features(normal(4, 6), nu=3)
    assert features.shape == (4, 36)
    assert (features >= 0).all()


def test_favor_features_estimate_the_softmax_kernel():
    """E[phi(q) . phi(k)] = exp(q . k / sqrt(D)), the mean over many draws."""
    query, key = normal(6, 8) / 2, normal(6, 8) / 2
    exact = (query @ key.mT / 8**0.5).exp()
    draws = [favor_projection(8, 512, seed).double() for seed in range(100)]
    estimate = torch.stack([favor_features(query, w) @ favor_features(key, w).mT for w in draws]).mean(0)
    assert ((estimate - exact) / exact).abs().max() < 0.1


def test_favor_projections_are_seeded_and_orthogonal():
    a = favor_projection(8, 20, seed=1)
    assert torch.equal(a, favor_projection(8, 20, seed=1))
    assert not torch.equal(a, favor_projection(8, 20, seed=2))
    gram = a[:8].double() @ a[:8].double().mT
    assert_equal(gram - gram.diagonal().diag(), torch.zeros_like(gram), atol=1e-5)


def test_favor_features_of_a_far_query_do_not_vanish():
    inputs = {name: x.float() for name, x in make_inputs().items()}
    inputs["query"] = inputs["query"] * 100
    out = mgk.linear_mixture_attention(**inputs, feature_map="favor")
    assert out.isfinite().all()
    assert out.abs().amax(-1).min() > 0
