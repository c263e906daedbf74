"""Random shapes, options and masks: every backend agrees with the reference and stays finite."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mgk
from support.cases import BACKENDS, FUNCTIONS, WITH_HARD, largest_errors, make_case

OTHERS = [name for name in WITH_HARD if name != "reference"]
sizes = st.tuples(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 70), st.integers(1, 70), st.integers(1, 9), st.integers(1, 9),
    st.integers(1, 5),
)  # fmt: skip
options = st.fixed_dictionaries(
    {
        "prior": st.sampled_from([None, "head", "component", "position"]),
        "variance": st.sampled_from([None, 0.3, 5.0, "head", "component", "position"]),
        "mask": st.sampled_from([None, "key", "pair"]),
        "is_causal": st.booleans(),
        "scale": st.sampled_from([0.0, 0.1, 1.0, 5.0]),
        "seed": st.integers(0, 2**20),
    }
)
quick = settings(max_examples=60, deadline=None, derandomize=True)


@quick
@given(
    st.sampled_from(OTHERS),
    st.sampled_from(FUNCTIONS),
    sizes,
    options,
    st.sampled_from(["soft", "hard"]),
)
def test_own_backwards_agree_with_the_reference(backend, function, sizes, options, e_step):
    case = make_case(function, sizes=sizes, e_step=e_step, **options)
    if e_step == "hard" and options["scale"] == 0:
        return  # every component ties, and rounding decides
    assert max(largest_errors(case.run(backend), case.run("reference")).values()) < 1e-10


@quick
@given(st.sampled_from(FUNCTIONS), sizes, options)
def test_sdpa_agrees_with_the_reference(function, sizes, options):
    case = make_case(function, sizes=sizes, **options)
    assert max(largest_errors(case.run("sdpa"), case.run("reference")).values()) < 1e-10


@quick
@given(
    st.sampled_from(FUNCTIONS),
    st.sampled_from(BACKENDS),
    sizes,
    st.floats(-4, 5),
    st.floats(-4, 4),
    st.floats(0, 1e4),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_outputs_and_gradients_are_finite(function, backend, sizes, log_scale, log_variance, offset, dtype):
    case = make_case(
        function, sizes=sizes, scale=10**log_scale, offset=offset, variance=10**log_variance, prior="position"
    )
    result = case.run(backend, dtype)
    assert all(x.isfinite().all() for x in result.values())
    low, high = case.tensors["value"].amin(), case.tensors["value"].amax()
    slack = 0.02 * (high - low + 1)
    assert result["output"].min() >= low - slack  # a convex combination of the values
    assert result["output"].max() <= high + slack


@quick
@given(sizes, st.integers(0, 2**20), st.booleans(), st.sampled_from(["elu", "favor", "dpfp"]), st.data())
def test_linear_segments_equal_the_whole(sizes, seed, is_causal, feature_map, data):
    batch, heads, length, _, dim, width, mixtures = sizes
    x = make_case(sizes=(batch, heads, length, length, dim, width, mixtures), seed=seed).tensors
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) > 0.3
    shared = {"feature_map": feature_map, "is_causal": is_causal}
    reference = mgk.linear_mixture_attention(
        x["query"], x["keys"], x["value"], key_mask=mask, backend="reference", **shared
    )
    whole = mgk.linear_mixture_attention(x["query"], x["keys"], x["value"], key_mask=mask, **shared)
    torch.testing.assert_close(whole, reference, atol=1e-9, rtol=1e-9)
    if not is_causal:
        return
    cut = data.draw(st.integers(0, length))
    first, state = mgk.linear_mixture_attention(
        x["query"][:, :, :cut], x["keys"][:, :, :, :cut], x["value"][:, :, :cut], key_mask=mask[:, :cut],
        return_state=True, **shared,
    )  # fmt: skip
    second = mgk.linear_mixture_attention(
        x["query"][:, :, cut:], x["keys"][:, :, :, cut:], x["value"][:, :, cut:], key_mask=mask[:, cut:],
        initial_state=state, **shared,
    )  # fmt: skip
    torch.testing.assert_close(torch.cat([first, second], 2), whole, atol=1e-9, rtol=1e-9)
