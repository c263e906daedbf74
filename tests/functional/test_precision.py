"""Numbers that hold everywhere: float32 and half precision against the reference in float64, and extreme inputs."""

import itertools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import mgk
from mgk.functional.mixture.backends import sdpa
from support.cases import BACKENDS, FUNCTIONS, Case, inputs_of, largest_errors, make_case

N, D = 512, 32
SIZES = (1, 2, N, N, D, D, 2)
SERVED = [
    pytest.param(function, e_step, backend, id=f"{function}-{e_step}-{backend}")
    for function, e_step, backend in itertools.product(FUNCTIONS, ("soft", "hard"), BACKENDS)
    if not (e_step == "hard" and backend == "sdpa")
]


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """The case with inputs that the dtype can hold, so that only the arithmetic differs."""
    for name, x in case.tensors.items():
        if x.is_floating_point():
            case.tensors[name] = x.to(dtype).double()
    return case


def error_bound(case: Case) -> float:
    """16 eps (1 + max |q - c| |k - c| / sigma^2), c the mean key."""
    if case.function == "mixture":
        keys = case.tensors["keys"]
    else:
        keys = case.tensors["key"].unsqueeze(2) + case.tensors["shifts"][None, :, :, None]
    centre = keys.mean((2, 3), keepdim=True)
    query = (case.tensors["query"].unsqueeze(2) - centre).norm(dim=-1).amax()
    reach = query * (keys - centre).norm(dim=-1).amax() / case.options.get("variance", D**0.5)
    return 16 * torch.finfo(torch.float32).eps * (1 + reach.item())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("function", "e_step", "backend"), SERVED)
def test_float32_of_unit_normal_inputs(function, e_step, backend, seed):
    case = rounded(make_case(function, sizes=SIZES, prior="component", e_step=e_step, seed=seed), torch.float32)
    errors = largest_errors(case.run(backend, torch.float32), case.run("reference"))
    assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize("variance", [None, "head", "component"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_float32_gradients_of_what_all_positions_share(function, backend, is_causal, variance):
    """The hardest figures, sums over 262,144 pairs: some seeds are much worse than others."""
    for seed in range(16):
        options = {"prior": "component", "variance": variance, "is_causal": is_causal, "seed": seed}
        case = rounded(make_case(function, sizes=(1, 1, N, N, D, D, 2), **options), torch.float32)
        errors = largest_errors(case.run(backend, torch.float32), case.run("reference"))
        assert max(errors.values()) < 5e-6, (seed, errors)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "reference"])
def test_shared_prior_gradient_adds_up_to_nothing(backend):
    case = rounded(make_case("mixture", sizes=(1, 2, N, N, D, D, 3), prior="component"), torch.float32)
    gradient = case.run(backend, torch.float32)["log_prior"]
    assert gradient.sum(2).abs().max() < 2 * torch.finfo(torch.float32).eps * gradient.abs().max()


@pytest.mark.parametrize(
    ("scale", "offset"), [(3, 0), (10, 0), (30, 0), (100, 0), (10_000, 0), (1, 100), (1, 1000)]
)
@pytest.mark.parametrize(("function", "e_step", "backend"), SERVED)
def test_float32_of_large_and_offset_inputs(function, e_step, backend, scale, offset):
    options = {"prior": "component", "e_step": e_step, "scale": scale, "offset": offset}
    case = rounded(make_case(function, sizes=SIZES, **options), torch.float32)
    result = case.run(backend, torch.float32)
    assert all(x.isfinite().all() for x in result.values())
    assert largest_errors(result, case.run("reference"))["output"] <= error_bound(case)


@pytest.mark.parametrize("variance", [1e-4, 1e-2, 1e2, 1e4])
@pytest.mark.parametrize(("function", "e_step", "backend"), SERVED)
def test_float32_of_small_and_large_variances(function, e_step, backend, variance):
    options = {"prior": "component", "e_step": e_step, "variance": variance}
    case = rounded(make_case(function, sizes=SIZES, **options), torch.float32)
    result = case.run(backend, torch.float32)
    assert all(x.isfinite().all() for x in result.values())
    assert largest_errors(result, case.run("reference"))["output"] <= error_bound(case)


def softmax_errors(dtype: torch.dtype, scale: float, seed: int) -> tuple[float, float]:
    """What scaled_dot_product_attention itself errs in its output and its gradients."""
    case = rounded(make_case("shifted", sizes=SIZES, scale=scale, seed=seed), dtype)
    case.tensors["value"] = case.tensors["value"] * scale

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        inputs = [case.tensors[name].to(dtype).requires_grad_() for name in ("query", "key", "value")]
        out = scaled_dot_product_attention(*inputs)
        return [out, *torch.autograd.grad(out, inputs, case.tensors["upstream"].to(dtype))]

    errors = [
        ((x.double() - y).abs().max() / y.abs().max()).item()
        for x, y in zip(run(dtype), run(torch.float64), strict=True)
    ]
    return errors[0], max(errors[1:])


@pytest.mark.parametrize("scale", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("function", "e_step", "backend"), SERVED)
def test_half_precision_errs_no_more_than_softmax_attention_itself(function, e_step, backend, dtype, scale):
    ours, theirs = [], []
    for seed in range(5):
        case = rounded(
            make_case(function, sizes=SIZES, prior="component", e_step=e_step, scale=scale, seed=seed), dtype
        )
        case.tensors["value"] = case.tensors["value"] * scale
        truth = case.run("reference")
        result = case.run(backend, dtype)
        errors = {
            name: ((result[name] - x).abs().max() / x.abs().max().clamp_min(1e-30)).item()
            for name, x in truth.items()
        }
        ours.append((errors.pop("output"), max(errors.values())))
        theirs.append(softmax_errors(dtype, scale, seed))
    (output, gradient), (softmax_output, softmax_gradient) = (
        torch.tensor(e).mean(0).tolist() for e in (ours, theirs)
    )
    assert output <= 2 * softmax_output
    assert gradient <= 3 * softmax_gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("function", "e_step", "backend"), SERVED)
def test_half_precision_is_finite_for_large_inputs(function, e_step, backend, dtype):
    case = rounded(make_case(function, sizes=SIZES, prior="component", e_step=e_step, scale=100), dtype)
    assert all(x.isfinite().all() for x in case.run(backend, dtype).values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tiny_and_zero_priors(function, backend, dtype):
    case = make_case(function, sizes=(2, 2, 33, 35, 8, 4, 3), prior="position")
    log_prior = case.tensors["log_prior"]
    log_prior[:, 0, 1] = -69.0  # 1e-30
    log_prior[:, 1, 2] = -torch.inf
    log_prior[1, :, :, :5] = -torch.inf  # positions without any component
    log_prior[0, 1] = -torch.inf  # a head without any key
    result = case.run(backend, dtype)
    errors = largest_errors(result, case.run("reference"))
    assert max(errors.values()) < (1e-10 if dtype == torch.float64 else 2e-5), errors
    assert not result["output"][0, 1].any()
    assert not result["log_prior"][0, 1].any()


@pytest.mark.parametrize("mixtures", [1, 2, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_duplicated_keys_and_queries_on_keys_have_finite_gradients(backend, mixtures):
    case = make_case(sizes=(1, 2, 20, 20, 6, 6, mixtures), prior="component")
    keys = case.tensors["keys"]
    keys[:, :, :, 1] = keys[:, :, :, 0]
    keys[:, :, -1] = keys[:, :, 0]
    case.tensors["query"] = keys[:, :, 0].clone()
    result = case.run(backend, torch.float32)
    assert all(x.isfinite().all() for x in result.values())
    assert max(largest_errors(result, case.run("reference")).values()) < 5e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("distance", [30.0, 300.0, 3000.0])
def test_shifts_so_far_apart_that_the_rank_m_factor_underflows(backend, distance):
    """Half of the queries and keys lie near each shift, so exp(row) and exp(column) underflow for one of the two."""
    case = make_case("shifted", sizes=(1, 1, 40, 40, 4, 4, 2), prior="component")
    direction = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    case.tensors["shifts"] = torch.stack([direction, -direction]).unsqueeze(0) * distance
    for name in ("query", "key"):
        case.tensors[name][:, :, ::2] += direction * distance
        case.tensors[name][:, :, 1::2] -= direction * distance
    case = rounded(case, torch.float32)
    assert max(largest_errors(case.run(backend), case.run("reference")).values()) < 1e-9
    result = case.run(backend, torch.float32)
    assert all(x.isfinite().all() for x in result.values())
    assert largest_errors(result, case.run("reference"))["output"] <= error_bound(case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mask", ["key", "pair", "float"])
def test_a_query_with_every_key_masked_gives_zeros_and_zero_gradient(function, backend, mask):
    case = make_case(function, mask=mask, prior="component")
    attn_mask = case.tensors.pop("attn_mask")
    gone = (slice(0, 1), slice(None), slice(2, 4)) if mask == "pair" else (slice(0, 1),)
    if mask == "float":
        attn_mask = attn_mask.expand(2, 1, -1, -1).clone()
    attn_mask[gone] = False if attn_mask.dtype == torch.bool else -torch.inf
    result = case.run(backend, attn_mask=attn_mask)
    rows = slice(2, 4) if mask == "pair" else slice(None)
    assert not result["output"][0, :, rows].any()
    assert not result["query"][0, :, rows].any()
    assert all(x.isfinite().all() for x in result.values())
    truth = case.run("reference", attn_mask=attn_mask)
    assert max(largest_errors(result, truth).values()) < 1e-10


def test_causal_queries_before_the_first_key_give_zeros():
    for function, backend in itertools.product(FUNCTIONS, BACKENDS):
        case = make_case(function, sizes=(1, 2, 9, 5, 4, 4, 2), is_causal=True)
        result = case.run(backend)
        assert not result["output"][:, :, :4].any()
        assert not result["query"][:, :, :4].any()


def test_weights_and_responsibilities_hold_in_half_precision():
    query, keys = torch.randn(1, 2, 30, 8), torch.randn(1, 2, 2, 30, 8)
    for function in (mgk.mixture_weights, mgk.responsibilities):
        half = function(query.bfloat16(), keys.bfloat16())
        assert half.dtype == torch.bfloat16
        exact = function(query.bfloat16().double(), keys.bfloat16().double())
        torch.testing.assert_close(half.double(), exact, atol=4e-3, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_padding_holds_does_not_cost_precision(function, backend):
    """A mean key over the padding too would lie far from every real key."""
    sizes = (2, 2, 64, 64, 8, 8, 2)
    mask = torch.arange(64) < 50
    case = rounded(make_case(function, sizes=sizes, prior="component"), torch.float32)
    truth = case.run("reference", attn_mask=mask)
    name, dim = ("keys", 3) if function == "mixture" else ("key", 2)
    case.tensors[name].narrow(dim, 50, 14).fill_(1e5)
    result = case.run(backend, torch.float32, attn_mask=mask)
    assert max(largest_errors(result, truth).values()) < 5e-6


@pytest.mark.parametrize("scale", [1, 3])
def test_the_bias_in_three_bfloat16_columns_is_precise(scale):
    """What other devices take for bfloat16, run here on the CPU."""
    case = rounded(make_case(sizes=SIZES, prior="component", scale=scale), torch.bfloat16)
    truth = case.run("reference")["output"]
    case.tensors = {
        name: x.bfloat16() if name != "log_prior" else x.float() for name, x in case.tensors.items()
    }
    out = sdpa._split_bias(inputs_of(case))
    assert out.dtype == torch.bfloat16
    assert (out.double() - truth).abs().max() <= 2 * softmax_errors(torch.bfloat16, scale, 0)[
        0
    ] * truth.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_variance_of_each_component_from_tiny_to_huge_with_components_and_keys_removed(function, backend):
    case = make_case(function, sizes=(1, 2, 40, 70, 8, 4, 3), prior="component", mask="key")
    case.tensors["variance"] = torch.tensor([1e-4, 1.0, 1e4]).double().view(1, 1, 3, 1)
    case.tensors["log_prior"][0, 1, 2] = -torch.inf
    case.tensors["attn_mask"][:, :, :, :64] = False  # a whole tile
    truth = case.run("reference")
    assert max(largest_errors(case.run(backend), truth).values()) < 1e-9
    assert all(x.isfinite().all() for x in case.run(backend, torch.float32).values())
    case.tensors["attn_mask"][:] = False
    assert not any(x.any() for x in case.run(backend, torch.float32).values())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("function", "e_step", "backend"), SERVED)
def test_a_common_offset_costs_no_precision(function, e_step, backend, seed):
    """Distances do not depend on the origin: a tenth of the bound leaves no room for the rounding of q - c - b."""
    options = {"prior": "component", "e_step": e_step, "offset": 1000, "seed": seed}
    case = rounded(make_case(function, sizes=(1, 2, 128, 128, D, D, 2), **options), torch.float32)
    assert (
        largest_errors(case.run(backend, torch.float32), case.run("reference"))["output"]
        <= error_bound(case) / 10
    )


def test_decoding_shifted_keys_at_a_common_offset():
    case = rounded(make_case("shifted", sizes=(1, 2, 1, 600, D, D, 2), offset=1000), torch.float32)
    exact = {name: x for name, x in case.tensors.items() if name != "upstream"}
    truth = mgk.shifted_mixture_attention(**exact, backend="reference")
    for backend in BACKENDS:
        out = mgk.shifted_mixture_attention(**{name: x.float() for name, x in exact.items()}, backend=backend)
        assert (out - truth).abs().max() < 2e-6, backend


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_inputs_of_1e15(function, backend):
    case = rounded(
        make_case(function, sizes=(1, 2, 40, 70, 8, 4, 2), prior="component", scale=1e15), torch.float32
    )
    result = case.run(backend, torch.float32)
    assert all(x.isfinite().all() for x in result.values())
    assert largest_errors(result, case.run("reference"))["output"] < 1e-5


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 5), (5, 0), (0, 0)])
def test_gradients_without_queries_or_keys_are_zeros(backend, num_queries, num_keys):
    case = make_case(sizes=(1, 2, num_queries, num_keys, 4, 3, 2), prior="component", variance="head")
    result = case.run(backend)
    assert not any(x.any() for x in result.values())
    assert result["keys"].shape == case.tensors["keys"].shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "sdpa"])
def test_the_winner_of_shifted_keys_in_half_precision_is_that_of_the_exact_sum(backend, dtype):
    case = rounded(make_case("shifted", sizes=(1, 2, 90, 93, 8, 3, 3), mask="float", e_step="hard"), dtype)
    mask = case.tensors.pop("attn_mask")
    errors = largest_errors(
        case.run(backend, dtype, attn_mask=mask), case.run("reference", dtype, attn_mask=mask)
    )
    assert max(errors.values()) < 1e-2, errors
