"""Random calls of every option against an oracle that shares no code with the package: outputs and all gradients.

MGK_FUZZ_EXAMPLES sets the number of examples (2,000 by default); with another number they are drawn anew each time.
"""

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mgk
from support import oracle

EXAMPLES = int(os.environ.get("MGK_FUZZ_EXAMPLES", "2000"))
BACKENDS = tuple(name for name, status in mgk.available_backends().items() if status == "ready")
LOWEST = float(np.finfo(np.float32).min)
# largest error relative to max(1, largest element), of inputs of size 1; float16 holds the fewest digits near 0
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}
fuzz = settings(
    deadline=None,
    derandomize=EXAMPLES == 2000,
    suppress_health_check=list(HealthCheck),
    database=None,
    print_blob=True,
)


@dataclass
class Options:
    """An example: sizes and choices; :func:`draw` is the place for further ones."""

    sizes: tuple[int, ...]  # B, H, L, S, D, E, M
    dtype: torch.dtype
    seed: int
    scale: float
    offset: float
    choices: dict[str, Any] = field(default_factory=dict)


@st.composite
def draw(draw: Any) -> Options:
    length = st.one_of(st.integers(0, 9), st.integers(0, 70))
    sizes = (
        draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(length), draw(length), draw(st.integers(1, 5)),
        draw(st.integers(1, 4)), draw(st.integers(1, 4)),
    )  # fmt: skip
    choices = {
        "function": draw(st.sampled_from(["mixture", "shifted"])),
        "backend": draw(st.sampled_from(["auto", *BACKENDS])),
        "kernel": draw(st.sampled_from(["gaussian", "gaussian", "dot"])),
        "e_step": draw(st.sampled_from(["soft", "soft", "hard"])),
        "prior": draw(st.sampled_from([None, "head", "component", "position", "with zeros"])),
        "variance": draw(st.sampled_from([None, 0.5, 4.0, "head", "component", "position"])),
        "mask": draw(
            st.sampled_from([None, None, "key", "pair", "float key", "float", "lowest", "lowest key"])
        ),
        "is_causal": draw(st.booleans()),
        "group": draw(st.sampled_from([1, 1, 2, 3])),
        "window": draw(st.none() | st.integers(0, 20) | st.tuples(*[st.none() | st.integers(0, 40)] * 2)),
        "segments": draw(st.booleans()) and sizes[2] <= sizes[3],
    }
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16]))
    is_half = dtype.itemsize < 4
    scale = draw(st.sampled_from([0.1, 1.0] if is_half else [0.1, 1.0, 3.0]))
    offset = draw(st.sampled_from([0.0] if is_half or choices["kernel"] == "dot" else [0.0, 0.0, 10.0, 100.0]))
    return Options(sizes, dtype, draw(st.integers(0, 2**20)), scale, offset, choices)


def mask_of(kind: str | None, generator: np.random.Generator, sizes: tuple[int, ...]) -> np.ndarray | None:
    batch, heads, num_queries, num_keys = sizes[:4]
    rows = 1 if kind is not None and kind.endswith("key") else num_queries
    shape = (batch, generator.choice([1, heads]), rows, num_keys)  # heads of queries
    if kind is None:
        return None
    kept = generator.random(shape) > generator.choice([0.3, 0.9])
    if kind in ("key", "pair"):
        return kept
    mask = generator.normal(size=shape)
    if kind.startswith("lowest"):
        mask = np.where(generator.random(shape) > 0.9, mask, LOWEST)
    return np.where(kept, mask, -np.inf)


def tensors_of(options: Options) -> dict[str, np.ndarray]:
    """The arguments by name, rounded to the dtype, in float64."""
    batch, heads, num_queries, num_keys, dim, width, mixtures = options.sizes
    generator = np.random.default_rng(options.seed)
    choices = options.choices
    normal = lambda *shape: generator.normal(size=shape)  # noqa: E731
    shapes = {
        "head": (1, heads, 1, 1),
        "component": (1, heads, mixtures, 1),
        "position": (batch, heads, mixtures, num_keys),
    }
    query_heads = heads * choices["group"]
    result = {
        "query": normal(batch, query_heads, num_queries, dim) * options.scale + options.offset,
        "value": normal(batch, heads, num_keys, width),
        "upstream": normal(batch, query_heads, num_queries, width),
    }
    if choices["function"] == "mixture":
        result["keys"] = normal(batch, heads, mixtures, num_keys, dim) * options.scale + options.offset
    else:
        result["key"] = normal(batch, heads, num_keys, dim) * options.scale + options.offset
        result["shifts"] = normal(heads, mixtures, dim) * options.scale
    if choices["prior"] is not None:
        shape = shapes.get(choices["prior"], shapes["position"])
        result["log_prior"] = normal(*shape)
        if choices["prior"] == "with zeros":
            result["log_prior"][generator.random(shape) > 0.7] = -np.inf
    if isinstance(choices["variance"], str):
        result["variance"] = np.exp(0.3 * normal(*shapes[choices["variance"]])) * dim**0.5
    mask = mask_of(choices["mask"], generator, (batch, query_heads, *options.sizes[2:]))
    if mask is not None:
        result["attn_mask"] = mask
    if choices["segments"]:
        result["segment_ids"] = np.cumsum(generator.random((batch, num_keys)) > 0.8, axis=1) % 3
    return {name: rounded(name, x, options.dtype) for name, x in result.items()}


def rounded(name: str, x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return x if x.dtype.kind in "bi" else torch.tensor(x).to(dtype_of(name, dtype)).double().numpy()


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Priors, variances and masks may be float32 beside half inputs, which have no room for the lowest number."""
    keeps = name in ("log_prior", "variance", "attn_mask") and dtype.itemsize < 4
    return torch.float32 if keeps else dtype


def expected_of(options: Options, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The oracle's output and gradients, by argument name."""
    batch, heads, _, num_keys, dim, _, mixtures = options.sizes
    choices, full, group = options.choices, (batch, heads, mixtures, num_keys), options.choices["group"]
    repeated = lambda x: np.repeat(x, group, 1)  # noqa: E731
    if choices["function"] == "mixture":
        keys = arrays["keys"]
    else:
        keys = arrays["key"][:, :, None] + arrays["shifts"][None, :, :, None]
    variance = arrays.get("variance", choices["variance"] or dim**0.5)
    prior = arrays.get("log_prior", np.zeros(full))
    out, grads = oracle.mixture(
        arrays["query"], repeated(keys), repeated(arrays["value"]), repeated(np.broadcast_to(prior, full)),
        repeated(np.broadcast_to(variance, full)), choices["kernel"], choices["e_step"], arrays.get("attn_mask"),
        choices["is_causal"], arrays["upstream"], window=window_of(choices), segment_ids=arrays.get("segment_ids"),
    )  # fmt: skip
    for name in ("keys", "value", "log_prior", "variance"):
        grads[name] = grads[name].reshape(batch, heads, group, *grads[name].shape[2:]).sum(2)
    if choices["function"] == "shifted":
        grads["shifts"], grads["key"] = grads["keys"].sum((0, 3)), grads["keys"].sum(2)
    result = {"output": out}
    for name, x in arrays.items():
        if name in grads and x.dtype.kind == "f":
            axes = tuple(axis for axis in range(x.ndim) if x.shape[axis] != grads[name].shape[axis])
            result[name] = grads[name].sum(axes, keepdims=True)
    return result


def window_of(choices: dict[str, Any]) -> Any:
    """An int and causality are (w, 0)."""
    window = choices["window"]
    return (window, 0) if isinstance(window, int) and choices["is_causal"] else window


@settings(fuzz, max_examples=EXAMPLES)
@given(draw())
def test_attention_agrees_with_the_oracle(options):
    choices, backend = options.choices, options.choices["backend"]
    arrays = tensors_of(options)
    is_shifted_dot = choices["function"] == "shifted" and choices["kernel"] == "dot"
    if is_shifted_dot and (options.sizes[6] == 1 or choices["variance"] not in ("component", "position")):
        return  # refused: the shifts would cancel
    has_mask_grad = backend not in ("sdpa", "cpu")
    tensors = {
        name: torch.tensor(x, dtype=None if x.dtype.kind in "bi" else dtype_of(name, options.dtype))
        for name, x in arrays.items()
    }
    upstream = tensors.pop("upstream")
    leaves = {
        name: x.requires_grad_()
        for name, x in tensors.items()
        if x.is_floating_point() and (name != "attn_mask" or has_mask_grad)
    }
    call = {name: choices[name] for name in ("kernel", "e_step", "is_causal", "window", "backend")}
    if not isinstance(choices["variance"], str):
        call["variance"] = choices["variance"]
    function = mgk.mixture_attention if choices["function"] == "mixture" else mgk.shifted_mixture_attention
    if backend == "sdpa" and choices["e_step"] == "hard" and options.sizes[6] > 1:
        with pytest.raises(ValueError, match="backend 'sdpa' cannot serve this call"):
            function(**tensors, **call)
        return
    out = function(**tensors, **call)
    assert out.dtype == options.dtype
    grads = torch.autograd.grad(out, list(leaves.values()), upstream)
    result = {"output": out} | dict(zip(leaves, grads, strict=True))
    expected = expected_of(options, arrays)
    # scores of large or offset inputs are rounded in proportion to their size; a hard E-step may then swap a near tie
    slack = 1 + options.scale**2 * (1 + options.offset / 10)
    for name, got in result.items():
        got, want = got.detach().double().numpy(), expected[name]
        assert got.shape == want.shape
        assert np.isfinite(got).all(), name
        if got.size:
            error = np.abs(got - want).max() / max(1.0, np.abs(want).max())
            assert error < TOLERANCE[options.dtype] * slack, (name, error)


@settings(fuzz, max_examples=EXAMPLES // 5)
@given(draw())
def test_statistics_agree_with_the_oracle(options):
    choices, (batch, heads, num_queries, num_keys, dim, _, mixtures) = options.choices, options.sizes
    choices |= {"function": "mixture", "group": 1, "segments": False}
    arrays = tensors_of(options)
    full = (batch, heads, mixtures, num_keys)
    variance = arrays.get("variance", choices["variance"] or dim**0.5)
    prior = np.broadcast_to(arrays.get("log_prior", np.zeros(full)), full)
    gamma = oracle.responsibilities(
        arrays["query"], arrays["keys"], prior, np.broadcast_to(variance, full), choices["kernel"],
        choices["e_step"], arrays.get("attn_mask"), choices["is_causal"],
    )  # fmt: skip
    if (
        choices["e_step"] == "hard" and mixtures > 1 and gamma.size
    ):  # rounding decides which of equal distances wins
        each = oracle.scores(
            arrays["query"], arrays["keys"], prior, np.broadcast_to(variance, full), choices["kernel"], "hard"
        )
        each.sort(2)
        if (each[:, :, -1] - each[:, :, -2]).min() < 1e-9 * (1 + options.offset):
            return
    query_mask = np.random.default_rng(options.seed).random((batch, num_queries)) > 0.3
    counts = (gamma * query_mask[:, None, None, :, None]).sum(3)
    tensors = {
        name: torch.tensor(arrays[name], dtype=dtype_of(name, torch.float64))
        if arrays[name].dtype != bool
        else torch.tensor(arrays[name])
        for name in ("query", "keys", "log_prior", "attn_mask")
        if name in arrays
    }
    call = {name: choices[name] for name in ("kernel", "e_step", "is_causal")}
    call["variance"] = torch.tensor(variance) if np.ndim(variance) else choices["variance"]
    step = mgk.m_step(**tensors, **call, query_mask=torch.tensor(query_mask))
    np.testing.assert_allclose(step.counts, counts, atol=1e-8 * (1 + options.offset))
    sums = step.prior.sum(2).numpy()
    assert (np.isclose(sums, 1) | np.isclose(sums, 0)).all()
    result = mgk.responsibilities(**tensors, **call).transpose(2, 3)
    np.testing.assert_allclose(result, gamma, atol=1e-8 * (1 + options.offset))


@settings(fuzz, max_examples=EXAMPLES // 5)
@given(draw())
def test_linear_attention_agrees_with_the_oracle(options):
    options.choices["function"] = "mixture"
    arrays = tensors_of(options)
    batch, heads, _, num_keys, _, _, mixtures = options.sizes
    full = (batch, heads, mixtures, num_keys)
    mask = None
    if options.choices["mask"] is not None:
        mask = np.random.default_rng(options.seed).random((batch, num_keys)) > 0.4
    prior = np.broadcast_to(arrays.get("log_prior", np.full(full, -np.log(mixtures))), full)
    ids = arrays.get("segment_ids")
    keys, value, prior = (
        np.repeat(x, options.choices["group"], 1) for x in (arrays["keys"], arrays["value"], prior)
    )
    expected = oracle.linear(arrays["query"], keys, value, prior, mask, options.choices["is_causal"], ids)
    tensors = {
        name: torch.tensor(arrays[name], dtype=dtype_of(name, options.dtype))
        for name in ("query", "keys", "value", "log_prior")
        if name in arrays
    }
    for backend in ("auto", "reference"):
        out = mgk.linear_mixture_attention(
            **tensors, key_mask=None if mask is None else torch.tensor(mask), backend=backend,
            is_causal=options.choices["is_causal"], segment_ids=None if ids is None else torch.tensor(ids),
        )  # fmt: skip
        assert out.dtype == options.dtype
        if out.numel():
            np.testing.assert_allclose(out.double(), expected, atol=TOLERANCE[options.dtype] * 2)
