"""Every kernel in Triton's interpreter against the equations in float64: output, lse and all gradients."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from mgk.functional.mixture.backends.triton_backend import launch, tiles
from mgk.functional.mixture.backends.triton_backend.forward import mixed_exp2
from support import triton_oracle as oracle

OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {"mixtures": 1, "dot": True},
    "mgk": {},
    "M3": {"mixtures": 3, "prior": "position"},
    "hard": {"mixtures": 3, "hard": True},
    "dot": {"dot": True, "variance": "component", "prior": "component"},
    "head": {"variance": "head", "heads": 2, "batch": 1},
    "component": {"variance": "component", "prior": "component"},
    "position": {"variance": "position", "prior": "dead", "right": 0},
    "hard-position": {"variance": "position", "hard": True, "prior": "dead"},
    "causal": {"right": 0, "prior": "dead"},
    "causal-more-queries": {"right": 0, "queries": 70, "keys": 45},
    "window": {"left": 9, "right": 4},
    "segments": {"segments": True, "right": 0, "queries": 60},
    "groups": {"groups": 2, "heads": 2, "mask": "bool"},
    "float-mask": {"mask": "float", "right": 3},
    "removing-mask": {"mask": "removing", "variance": "component"},
    "dropout": {"dropout_p": 0.3},
    "smgk": {"shifted": True, "variance": "head", "prior": "component"},
    "smgk-M1": {"shifted": True, "mixtures": 1},
    "smgk-M3-causal": {"shifted": True, "mixtures": 3, "right": 0, "prior": "dead", "groups": 2},
    "smgk-hard": {"shifted": True, "hard": True, "mixtures": 3, "mask": "float", "variance": "head"},
    "smgk-large": {"shifted": True, "scale": 12.0, "right": 0},
    "smgk-dropout": {"shifted": True, "dropout_p": 0.3, "left": 20, "right": 0},
    "smgk-component": {"shifted": True, "variance": "component", "prior": "component"},
    "smgk-dot": {"shifted": True, "variance": "component", "dot": True},
    "large": {"scale": 10.0},
    "offset": {"offset": 1000.0},
    "wide": {"width": 70, "value_width": 40, "queries": 20, "keys": 37},
}


def dropout_factors(params: launch.AttentionParams) -> torch.Tensor | None:
    """The kernel's own mask: attention to values that are the identity shows the weights."""
    if params.seed is None:
        return None
    num_keys = params.keys.shape[3]
    identity = torch.eye(num_keys).expand(*params.keys.shape[:2], -1, -1)
    plain = params._replace(value=identity, seed=None, dropout_p=0.0)
    dropped = launch.forward(params._replace(value=identity)).out
    weights = launch.forward(plain).out
    return torch.where(weights > 0, dropped / weights.clamp_min(1e-30), 0.0).double()


@pytest.mark.parametrize("name", OPTIONS)
def test_output_lse_and_gradients(name: str) -> None:
    params = oracle.params(**OPTIONS[name])
    result = launch.forward(params)
    exact = oracle.as_double(params, requires_grad=True)
    out, lse = oracle.attention(exact, dropout_factors(params))
    scale = 16 * torch.finfo(torch.float32).eps * _largest_score(params)
    assert_near(result.out, out, scale)
    assert_near(result.lse, lse, scale * (1 + lse[lse.isfinite()].abs().max()))
    grad, lse_grad = torch.randn(out.shape), torch.randn(lse.shape)
    lse_grad = lse_grad.where(lse.detach().isfinite(), 0.0)
    names = [n for n, x in exact._asdict().items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    loss = (out * grad).sum() + (lse.where(lse.isfinite(), 0.0) * lse_grad).sum()
    wanted = torch.autograd.grad(loss, [getattr(exact, n) for n in names], allow_unused=True)
    gradients = launch.backward(grad, lse_grad, params, result, (True, "mask" in names))
    for n, want in zip(names, wanted, strict=True):
        got = getattr(gradients, n)
        if params.is_hard and n == "log_prior":
            continue
        assert got is not None, n
        want = torch.zeros_like(got) if want is None else want.masked_fill(want.isnan(), 0.0)
        try:
            assert_near(got.double().masked_fill(want == 0, 0.0) if n == "log_prior" else got, want, scale)
        except AssertionError as error:
            raise AssertionError(f"gradient of {n}: {error}") from None


_COLUMNS = tiles.Tile(64, 32, 8, 1, splits_columns=True, mixes_exp2=True)
_ACROSS = tiles.Tile(64, 32, 8, 1, queries_first=True)
_OF_ACROSS = ("mgk", "hard", "position", "segments", "dropout", "smgk")


@pytest.mark.parametrize(
    ("name", "other"),
    [*((name, _COLUMNS) for name in ("mgk", "causal", "smgk")), *((name, _ACROSS) for name in _OF_ACROSS)],
)
def test_tiles_of_other_targets(name: str, other: tiles.Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    params = oracle.params(**{**OPTIONS[name], "queries": 67, "keys": 130})
    wanted = launch.forward(params)
    gradients = launch.backward(wanted.out, None, params, wanted)
    monkeypatch.setattr(tiles, "SMALL", other)
    result = launch.forward(params)
    assert_near(result.out, wanted.out, 1e-4)
    for got, want in zip(launch.backward(wanted.out, None, params, result), gradients, strict=True):
        if want is not None:
            assert_near(got, want, 3e-4)


@triton.jit
def _mixed_exp2(out, x):
    i = tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out + i, mixed_exp2(tl.load(x + i)))


def test_exponentials_by_polynomial() -> None:
    x = -torch.cat([torch.linspace(0, 4, 256), torch.logspace(0, 3, 256)]).view(16, 32)
    out = torch.empty_like(x)
    _mixed_exp2[(1,)](out, x)
    torch.testing.assert_close(out, torch.exp2(x), rtol=2e-4, atol=2e-38)
    torch.testing.assert_close(out[:, :16], torch.exp2(x)[:, :16])


def _largest_score(params: launch.AttentionParams) -> float:
    """1 + max |q-c| |k-c| / sigma^2."""
    keys = params.keys if params.shifts is None else params.keys + params.shifts[None, :, :, None]
    centre = keys.float().mean((2, 3))
    by_query = centre.repeat_interleave(params.query.shape[1] // keys.shape[1], 1)[:, :, None]
    query_norm = (params.query.float() - by_query).norm(dim=-1).max()
    key_norm = (keys.float() - centre[:, :, None, None]).norm(dim=-1).max()
    return float(1 + query_norm * key_norm / params.variance.min())


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    """Infinities at the same places, and elsewhere near, in units of the largest."""
    want = want.detach().double()
    got = got.detach().double()
    assert got.shape == want.shape
    assert not got.isnan().any()
    assert torch.equal(got.isinf(), want.isinf())
    finite = want.isfinite()
    error = (got - want)[finite].abs().max().item()
    bound = tolerance * max(1.0, want[finite].abs().max().item())
    assert error <= bound, f"{error} > {bound}"


HALF = ("softmax", "mgk", "component", "smgk", "causal", "hard")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_as_exact_as_softmax(name: str, dtype: torch.dtype) -> None:
    """Outputs err at most twice, gradients three times as much as softmax attention of PyTorch in the same dtype."""
    params = oracle.params(**{**OPTIONS[name], "prior": "none"}, dtype=dtype)
    exact = oracle.as_double(params, requires_grad=True)
    out, _ = oracle.attention(exact)
    grad = torch.randn(out.shape).to(dtype)
    result = launch.forward(params)
    gradients = launch.backward(grad, None, params, result)
    names = ("query", "keys", "value")
    wanted = torch.autograd.grad(out, [getattr(exact, n) for n in names], grad.double())
    limits = softmax_errors(params, grad)
    assert result.out.dtype == dtype
    assert (result.out.double() - out).norm() / out.norm() < 2 * limits[0]
    for n, want, limit in zip(names, wanted, limits[1:], strict=True):
        error = (getattr(gradients, n).double() - want).norm() / want.norm()
        assert error < 3 * limit, f"{n}: {error} >= 3 * {limit}"


def softmax_errors(params: launch.AttentionParams, grad: torch.Tensor) -> list[float]:
    """Relative errors of output and gradients of PyTorch's softmax attention in the same dtype."""
    tensors = [x.detach() for x in (params.query, params.keys[:, :, 0], params.value)]
    low = [x.clone().requires_grad_() for x in tensors]
    high = [x.double().requires_grad_() for x in tensors]
    results = []
    for inputs in (low, high):
        query, key, value = inputs
        weights = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1)
        out = weights @ value
        results.append([out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))])
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(*results, strict=True)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixtures": 3, "hard": True, "mask": "removing"},
        {"variance": "position", "prior": "dead", "left": 30},
        {"shifted": True, "groups": 2, "prior": "component", "segments": True},
        {"shifted": True, "dot": True, "variance": "component", "mask": "bool"},
        {"dtype": torch.bfloat16},
        {"scale": 30.0, "offset": 100.0},
    ],
    ids=str,
)
def test_decoding(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "DECODE_CHUNK", 64)
    params = oracle.params(**{"queries": 1, "keys": 150, **options})
    if params.mask is not None and params.mask.dtype == torch.bool:
        params.mask[..., 0, ::2] = True
    strided = params.keys.repeat_interleave(2, 3)[:, :, :, ::2]
    out, lse = launch.decode(params._replace(keys=strided))
    want, want_lse = oracle.attention(oracle.as_double(params))
    tolerance = 2 * torch.finfo(params.query.dtype).eps + 1e-5
    assert_near(out, want, tolerance)
    assert_near(lse, want_lse, 1e-5)


@pytest.mark.parametrize(
    "name", ["mgk", "M3", "hard", "position", "smgk", "smgk-M3-causal", "window", "groups", "segments"]
)
def test_counts(name: str) -> None:
    params = oracle.params(**OPTIONS[name])
    query_mask = torch.rand(params.query.shape[0], params.query.shape[2]) > 0.3
    got = launch.counts(params, query_mask)
    assert_near(got, oracle.counts(oracle.as_double(params), query_mask), 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"right": 0},
        {"right": 0, "shifted": True},
        {"left": 5, "right": 3},
        {"segments": True, "right": 0, "queries": 70},
        {"prior": "dead", "batch": 1},
    ],
    ids=str,
)
def test_keys_and_values_that_a_query_does_not_see_do_not_reach_it(options: dict[str, Any]) -> None:
    """NaN and infinities in dead keys and values change no output and no gradient of the others."""
    params = oracle.params(**options)
    spoiled = params._replace(keys=params.keys.clone(), value=params.value.clone())
    spoiled.keys[..., 20, 0], spoiled.value[..., 20, 0] = torch.nan, torch.inf
    seen = (oracle.scores(oracle.as_double(params)) > -torch.inf).any(2)[..., 20]  # (B, Hq, L)
    grad = torch.randn(*params.query.shape[:3], params.value.shape[-1]).masked_fill(seen[..., None], 0.0)
    results = []
    for x in (params, spoiled):
        result = launch.forward(x)
        gradients = launch.backward(grad.where(~seen[..., None], 0.0), None, x, result)
        results.append((result.out, gradients))
    (out, wanted), (spoiled_out, got) = results
    assert torch.equal(out[~seen], spoiled_out[~seen])
    assert spoiled_out[seen].isnan().all()
    assert torch.equal(wanted.query[~seen], got.query[~seen])
    blind = (
        ~(oracle.scores(oracle.as_double(params)) > -torch.inf).any(2)[seen].any(0)
        if seen.any()
        else slice(None)
    )
    assert torch.equal(wanted.value[..., blind, :].isnan(), got.value[..., blind, :].isnan())


def test_saturating_float16_stays_finite() -> None:
    params = oracle.params(dtype=torch.float16, scale=2e4)
    assert launch.forward(params).out.isfinite().all()


def test_dropout_keeps_the_expected_share() -> None:
    params = oracle.params(dropout_p=0.3)
    factors = dropout_factors(params)
    assert factors is not None
    kept = (factors > 0).double().mean().item()
    assert abs(kept - 0.7) < 0.02
    assert torch.allclose(factors[factors > 0], torch.tensor(1 / 0.7, dtype=torch.float64), rtol=1e-4)
    everything = launch.forward(params._replace(dropout_p=1.0)).out
    assert torch.equal(everything, torch.zeros_like(everything))
