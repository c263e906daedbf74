"""The linear family's backend ``triton``: outputs, states and all gradients against the equations in float64."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import mgk
from mgk.functional.backends import select
from mgk.functional.linear import triton_launch
from mgk.functional.linear.inputs import validate_inputs

# B, H, L, S, D, E, M
SIZES = (2, 2, 70, 70, 5, 7, 2)
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "whole": {"sizes": (2, 2, 33, 70, 5, 7, 3)},
    "one": {"sizes": (1, 1, 1, 1, 1, 1, 1), "is_causal": True},
    "fewer queries": {"sizes": (1, 2, 40, 100, 5, 7, 2), "is_causal": True, "state": True},
    "more queries": {"sizes": (1, 1, 90, 40, 5, 7, 2), "is_causal": True, "state": True},
    "prior, mask": {"is_causal": True, "prior": "position", "mask": True},
    "component prior, groups, state": {"is_causal": True, "prior": "component", "groups": 2, "state": True},
    "whole, groups, state, mask": {"groups": 2, "state": True, "mask": True, "prior": "component"},
    "segments": {"is_causal": True, "segments": True, "groups": 2, "mask": True},
    "segments, fewer queries, state": {
        "sizes": (2, 1, 50, 101, 5, 7, 2),
        "is_causal": True,
        "segments": True,
        "state": True,
    },
    "wide": {"sizes": (1, 1, 40, 40, 40, 70, 2), "is_causal": True, "state": True},
    "dpfp": {"is_causal": True, "feature_map": "dpfp", "prior": "component"},
    "favor": {"feature_map": "favor"},
}


def make_call(
    *,
    sizes: tuple[int, ...] = SIZES,
    groups: int = 1,
    prior: str | None = None,
    mask: bool = False,
    segments: bool = False,
    state: bool = False,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Float tensors by name, those of the state too, and options."""
    batch, heads, num_queries, num_keys, width, value_width, mixtures = sizes
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "query": normal(batch, heads * groups, num_queries, width),
        "keys": normal(batch, heads, mixtures, num_keys, width),
        "value": normal(batch, heads, num_keys, value_width),
    }
    if prior is not None:
        shape = (batch, heads, mixtures, num_keys) if prior == "position" else (1, heads, mixtures, 1)
        tensors["log_prior"] = normal(*shape).log_softmax(2)
    if state:
        tensors["numerator"] = normal(batch, heads, width, value_width)
        tensors["normaliser"] = normal(batch, heads, width).abs()
    if mask:
        options["key_mask"] = torch.rand(batch, num_keys, generator=generator) > 0.3
    if segments:
        options["segment_ids"] = torch.randint(4, (batch, num_keys), generator=generator).sort(1).values
    return tensors, options


def run(tensors: dict[str, torch.Tensor], options: dict[str, Any], backend: str, dtype: torch.dtype) -> Any:
    """Output, state and gradients."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in tensors.items()}
    arguments = dict(leaves)
    if "numerator" in arguments:
        arguments["initial_state"] = (arguments.pop("numerator"), arguments.pop("normaliser"))
    out, state = mgk.linear_mixture_attention(**arguments, **options, return_state=True, backend=backend)
    results = [out, *state]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in results]
    gradients = torch.autograd.grad(results, list(leaves.values()), grads)
    return dict(zip(("out", "S", "z", *leaves), [*results, *gradients], strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_outputs_states_and_gradients_are_those_of_the_reference(name: str) -> None:
    call = make_call(**CALLS[name])
    got = run(*call, "triton", torch.float32)
    want = run(*call, "reference", torch.float64)
    for key, expected in want.items():
        error = (got[key].double() - expected).abs().max() / expected.abs().max().clamp_min(1.0)
        assert error < 2e-5, f"{key}: {error}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["causal", "whole", "component prior, groups, state"])
def test_half_precision_is_that_of_its_inputs(name: str, dtype: torch.dtype) -> None:
    tensors, options = make_call(**CALLS[name])
    tensors = {name: x.to(dtype).float() for name, x in tensors.items()}
    got = run(tensors, options, "triton", dtype)
    want = run(tensors, options, "reference", torch.float64)
    for key, expected in want.items():
        error = (got[key].double() - expected).abs().max() / expected.abs().max().clamp_min(1.0)
        assert error < 4 * torch.finfo(dtype).eps, f"{key}: {error}"


def test_sums_beyond_float16_stay_finite() -> None:
    tensors, options = make_call(is_causal=True)
    tensors = {name: (x.abs() * 100).half().float() for name, x in tensors.items()}
    got = run(tensors, options, "triton", torch.float16)
    want = run(tensors, options, "reference", torch.float64)
    assert (got["out"].double() - want["out"]).abs().max() < 2e-3 * want["out"].abs().max()


@pytest.mark.parametrize("groups", [1, 3])
def test_steps_equal_the_whole(groups: int) -> None:
    tensors, options = make_call(
        sizes=(2, 2, 9, 9, 5, 40, 2), groups=groups, is_causal=True, prior="position", mask=True
    )
    want, state_wanted = mgk.linear_mixture_attention(**tensors, **options, return_state=True)
    mask = options.pop("key_mask")
    state, outs = None, []
    for t in range(9):
        now = {
            name: x[:, :, t : t + 1] if name in ("query", "value") else x[:, :, :, t : t + 1]
            for name, x in tensors.items()
        }
        out, state = mgk.linear_mixture_attention(
            **now,
            **options,
            key_mask=mask[:, t : t + 1],
            initial_state=state,
            return_state=True,
            backend="triton",
        )
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), want, atol=1e-5, rtol=1e-5)
    for got, wanted in zip(state, state_wanted, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_one_position_without_gradients_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = make_call(sizes=(1, 2, 1, 1, 5, 4, 2), is_causal=True)
    launched = []
    original = triton_launch.launch
    monkeypatch.setattr(triton_launch, "launch", lambda *x: launched.append(x[0]) or original(*x))
    mgk.linear_mixture_attention(**tensors, **options, backend="triton")
    assert launched == [triton_launch.kernels.step]


def test_no_sums_give_zeros_and_no_gradient() -> None:
    tensors, options = make_call(is_causal=True)
    options["key_mask"] = torch.ones(2, 70, dtype=torch.bool)
    options["key_mask"][0] = False
    got = run(tensors, options, "triton", torch.float32)
    assert not got["out"][0].any()
    assert not got["query"][0].any()
    assert all(x.isfinite().all() for x in got.values())


@pytest.mark.parametrize("zero", ["queries", "keys"])
def test_empty_inputs(zero: str) -> None:
    sizes = (1, 2, 0, 3, 4, 4, 2) if zero == "queries" else (1, 2, 3, 0, 4, 4, 2)
    call = make_call(sizes=sizes, is_causal=True)
    got, want = run(*call, "triton", torch.float32), run(*call, "reference", torch.float32)
    for key in want:
        torch.testing.assert_close(got[key], want[key])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"segments": True}, "its segments are causal"),
        ({"sizes": (1, 1, 2, 2, 257, 4, 1)}, "256 features, not 257"),
    ],
    ids=["segments", "width"],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    tensors, options = make_call(**options)
    with pytest.raises(ValueError, match=f"backend 'triton' cannot serve this call: .*{reason}"):
        mgk.linear_mixture_attention(**tensors, **options, backend="triton")


def test_what_it_lacks_goes_to_another_backend() -> None:
    tensors, _ = make_call(sizes=(1, 1, 9, 9, 4, 4, 2))
    inputs = validate_inputs(**tensors)
    with pytest.raises(ValueError, match="no statistics of the linear family"):
        select("linear", inputs, "triton", "counts")
    attend = lambda x, name: mgk.linear_mixture_attention(  # noqa: E731
        x, tensors["keys"], tensors["value"], backend=name
    )
    with pytest.raises(ValueError, match=r"none of torch\.func"):
        torch.func.vmap(attend, (0, None))(tensors["query"][None], "triton")
    torch.func.vmap(attend, (0, None))(tensors["query"][None], "auto")


def test_operators_are_as_torch_library_asks() -> None:
    tensors, _ = make_call(sizes=(1, 1, 5, 5, 4, 4, 2), is_causal=True, prior="component", state=True)
    leaves = [x.requires_grad_() for x in tensors.values()]
    arguments = (*leaves, None, None, True, True)
    torch.library.opcheck(torch.ops.mgk.triton_linear, arguments, rtol=1e-4, atol=1e-4)
    detached = (*(x.detach() for x in leaves), None, None, True, True)
    out, denominator, *state = torch.ops.mgk.triton_linear(*detached)
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.mgk.triton_linear_backward, (out, *state, out, denominator, *detached), test_utils=utilities
    )
    one = [x.detach()[:, :, :1] for x in leaves[:1]]
    one += [leaves[1].detach()[:, :, :, :1], leaves[2].detach()[:, :, :1], *detached[3:]]
    torch.library.opcheck(torch.ops.mgk.triton_linear_step, tuple(one), test_utils=utilities)


def test_attention_compiles_without_a_break() -> None:
    tensors, options = make_call(is_causal=True, prior="component")
    leaves = [x.requires_grad_() for x in tensors.values()]
    attend = lambda *x: mgk.linear_mixture_attention(*x, **options, backend="triton")  # noqa: E731
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for function in (attend, compiled):
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_second_derivatives_are_refused() -> None:
    tensors, options = make_call(sizes=(1, 1, 5, 5, 4, 4, 2), is_causal=True)
    query = tensors.pop("query").requires_grad_()
    out = mgk.linear_mixture_attention(query, **tensors, **options, backend="triton")
    (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        grad.sum().backward()


def test_products_with_the_state_are_counted() -> None:
    tensors, options = make_call(sizes=(1, 2, 9, 9, 5, 4, 2), is_causal=True)
    leaves = {name: x.requires_grad_() for name, x in tensors.items()}
    with FlopCounterMode(display=False) as counter:
        mgk.linear_mixture_attention(**leaves, **options, backend="triton").sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 9 * 5 * 4 * (2 + 5)
