"""Launches of the kernels: specialisation, grids, sums around them."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mgk.functional.mixture.backends.triton_backend import backward as backward_kernels
from mgk.functional.mixture.backends.triton_backend import counts as counting_kernels
from mgk.functional.mixture.backends.triton_backend import decode as decoding_kernels
from mgk.functional.mixture.backends.triton_backend import feature_kernels, tiles
from mgk.functional.mixture.backends.triton_backend import forward as forward_kernels
from mgk.functional.mixture.backends.triton_backend.backend import is_interpreted
from mgk.functional.mixture.backends.triton_backend.spec import (
    Dropout,
    Features,
    Inputs,
    KernelInputs,
    Rows,
    Sizes,
    Spec,
    Strided,
)

LOG2E = 1 / math.log(2)
# The least rank-M factor that keeps float32's precision; float16 has 2^-24 to lose.
MAX_SPREAD = {torch.float32: 60.0, torch.bfloat16: 60.0, torch.float16: 8.0}
# The fewest keys of a decoding program, and the most chunks that are joined.
DECODE_CHUNK, MOST_CHUNKS = 256, 128


class AttentionParams(NamedTuple):
    """A call as the kernels take it, before features are made."""

    query: Tensor  # (B, Hq, L, D)
    keys: Tensor  # (B, H, M, S, D), or (B, H, 1, S, D) with shifts
    shifts: Tensor | None  # (H, M, D)
    value: Tensor  # (B, H, S, E)
    log_prior: Tensor | None  # broadcastable to (B, H, M, S)
    variance: Tensor  # broadcastable to (B, H, M, S)
    mask: Tensor | None  # bool or float, broadcastable to (B, Hq, L, S)
    segments: Tensor | None  # first and last + 1 position of each position's segment (B, 2, S), int32
    seed: Tensor | None  # (1,), int64
    is_dot: bool
    is_hard: bool
    left: int | None
    right: int | None
    dropout_p: float

    @property
    def mixtures(self) -> int:
        """M."""
        return self.keys.shape[2] if self.shifts is None else self.shifts.shape[1]

    @property
    def is_shifted(self) -> bool:
        """Whether all components share the product of query and key."""
        return self.shifts is not None and not self.is_varying and not self.is_dot

    @property
    def bias_rows(self) -> int:
        """Rows of the key bias: components, and those of the rank-M factor."""
        return 2 * self.mixtures + 2 if self.is_shifted else self.mixtures

    @property
    def is_varying(self) -> bool:
        """Whether sigma^2 differs between the keys that a query sees."""
        return self.variance.shape[2:] != (1, 1)

    @property
    def is_partial(self) -> bool:
        """Whether a query may see some positions only."""
        return self.left is not None or self.right is not None or self.segments is not None

    @property
    def has_dead_keys(self) -> bool:
        """Whether the prior may remove positions."""
        return self.log_prior is not None and self.log_prior.shape[3] > 1

    @property
    def checks_values(self) -> bool:
        """Whether there may be values that a query does not see."""
        return self.is_partial or self.has_dead_keys


class Result(NamedTuple):
    """The output, and what the backward kernels need."""

    out: Tensor  # (B, Hq, L, E)
    lse: Tensor  # (B, Hq, L), float32, without the 1 / M of a uniform prior
    row_max: Tensor
    row_sum: Tensor
    features: Features
    value: Tensor  # zeros at dead keys


class Gradients(NamedTuple):
    """The gradients of the parameters' tensors."""

    query: Tensor
    keys: Tensor
    shifts: Tensor | None
    value: Tensor
    log_prior: Tensor | None
    variance: Tensor | None
    mask: Tensor | None


def padded(width: int) -> int:
    """The least power of two of at least 16 that holds the width."""
    return max(16, triton.next_power_of_2(width))


def _run(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], spec: Any, tile: tiles.Tile) -> None:
    constant = spec if is_interpreted() else compile_time(spec)
    kernel[grid](*arguments, constant, num_warps=tile.warps, num_stages=tile.stages)


_launcher: Callable[..., None] = _run
_target: str | None = None
_own_tile: tiles.Tile | None = None


def launch(*arguments: Any) -> None:
    """Launch a kernel: grid, arguments, specification and tile follow."""
    _launcher(*arguments)


@contextmanager
def launching_with(
    launcher: Callable[..., None], target: str, tile: tiles.Tile | None = None
) -> Iterator[None]:
    """Pass every launch for a target, with its own tile or another, to another function."""
    global _launcher, _target, _own_tile
    before = _launcher, _target, _own_tile
    _launcher, _target, _own_tile = launcher, target, tile
    try:
        yield
    finally:
        _launcher, _target, _own_tile = before


def compile_time(spec: Any) -> Any:
    """The specification with its numbers as compile-time constants."""
    return type(spec)(**{field.name: tl.constexpr(getattr(spec, field.name)) for field in fields(spec)})


def target_of(device: torch.device) -> str:
    """The device as "sm_80", "sm_90", "sm_100" or "gfx942"."""
    if _target is not None or device.type != "cuda":
        return _target or "sm_80"
    if torch.version.hip is not None:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    return {9: "sm_90"}.get(major, "sm_80" if major < 9 else "sm_100")


def _precision(params: AttentionParams) -> str:
    """Of products of float32 tensors: PyTorch's own switch."""
    is_tf32 = params.query.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if is_tf32 else "ieee"


def _tile(params: AttentionParams, kernel: str) -> tiles.Tile:
    if _own_tile is not None:
        return _own_tile
    width = max(padded(params.query.shape[-1]), padded(params.value.shape[-1]))
    least = 1 if params.is_dot else 2  # a Gaussian's bias takes the registers that the tile of softmax fills
    mixtures = max(params.mixtures, least)
    precision = _precision(params) if params.query.dtype == torch.float32 else "half"
    if _target is None and params.query.device.type != "cuda":
        return tiles.SMALL
    target = target_of(params.query.device)
    return tiles.tile(target, kernel, width, mixtures, precision, is_shifted=params.is_shifted)


def _spec(params: AttentionParams, tile: tiles.Tile, **changes: Any) -> Spec:
    width, value_width = params.query.shape[-1], params.value.shape[-1]
    mask = params.mask
    spec = Spec(
        mixtures=params.mixtures,
        key_mixtures=1 if params.is_shifted else params.mixtures,
        width=width,
        value_width=value_width,
        padded_width=padded(width),
        padded_value_width=padded(value_width),
        query_tile=tile.queries,
        key_tile=tile.keys,
        splits_columns=tile.splits_columns,
        mixes_exp2=tile.mixes_exp2,
        is_shifted=params.is_shifted,
        is_hard=params.is_hard and params.mixtures > 1,
        is_varying=params.is_varying,
        is_dot=params.is_dot,
        mask="none" if mask is None else "bool" if mask.dtype == torch.bool else "float",
        has_left=params.left is not None,
        has_right=params.right is not None,
        has_segments=params.segments is not None,
        has_dead_keys=params.has_dead_keys,
        has_dropout=params.seed is not None,
        has_shifts=params.shifts is not None,
        has_prior=params.log_prior is not None,
        has_bias=not params.is_dot or params.log_prior is not None or params.is_varying or params.checks_values,
        bias_rows=params.bias_rows,
        centre="first" if params.is_partial else "mean",
        keeps_small=params.is_partial or params.query.dtype != torch.float32,
        checks_values=params.checks_values,
        precision=_precision(params),
        max_spread=MAX_SPREAD[params.query.dtype],
    )
    return replace(spec, **changes)


def strided(x: Tensor | None, shape: tuple[int, ...], missing: Tensor) -> Strided:
    """``x`` broadcast to four dimensions, with features behind if it has five."""
    if x is None:
        return Strided(missing, 0, 0, 0, 0)
    if x.ndim == 5:
        x = x if x.stride(4) == 1 else x.contiguous()
        shape = (*shape, x.shape[4])
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)
    expanded = x.expand(shape)
    return Strided(expanded, *expanded.stride()[:4])


def _sizes(params: AttentionParams) -> Sizes:
    heads, num_queries, num_keys = params.keys.shape[1], params.query.shape[2], params.keys.shape[3]
    segments = params.query if params.segments is None else params.segments
    left, right = params.left or 0, params.right or 0
    groups = params.query.shape[1] // heads
    return Sizes(heads, groups, num_queries, num_keys, num_keys - num_queries, left, right, segments)


def _inputs(params: AttentionParams) -> Inputs:
    batch, heads, num_queries, _ = params.query.shape
    pairs = (batch, params.keys.shape[1], params.mixtures, params.keys.shape[3])
    shifts = params.query if params.shifts is None else params.shifts.contiguous()
    return Inputs(
        query=strided(params.query.unsqueeze(2), (batch, heads, 1, num_queries), params.query),
        keys=strided(params.keys, pairs, params.query),
        value=strided(params.value.unsqueeze(2), (*pairs[:2], 1, pairs[3]), params.query),
        log_prior=strided(params.log_prior, pairs, params.query),
        variance=strided(params.variance, pairs, params.query),
        shifts=shifts,
        least=_least(params),
        sizes=_sizes(params),
    )


def _least(params: AttentionParams) -> Tensor:
    """The least 1 / sigma_jr^2 of each head (B, H); 0 where positions have their own."""
    shape = params.keys.shape[:2]
    if params.variance.shape[3] > 1:
        return params.query.new_zeros(shape, dtype=torch.float32)
    return params.variance.float().amax((2, 3)).reciprocal().expand(shape).contiguous()


def make_features(params: AttentionParams) -> tuple[Features, Tensor]:
    """The features of a call, and its values with zeros at dead keys."""
    batch, heads, num_queries, width = params.query.shape
    key_heads, num_keys, value_width = params.keys.shape[1], params.keys.shape[3], params.value.shape[-1]
    key_mixtures = 1 if params.is_shifted else params.mixtures
    inputs = _inputs(params)
    new = params.query.new_empty

    def numbers(*shape: int) -> Tensor:
        return new(shape, dtype=torch.float32)

    features = Features(
        query=new((batch, heads, num_queries, width)),
        keys=new((batch, key_heads, key_mixtures, num_keys, width)),
        key_bias=numbers(batch, key_heads, params.bias_rows, num_keys),
        query_norm=numbers(batch, heads, num_queries),
        least=inputs.least,
        query_bias=numbers(
            *((batch, heads, 2 * params.mixtures + 1, num_queries) if params.is_shifted else (0,))
        ),
        excess=numbers(*((batch, key_heads, params.mixtures, num_keys) if params.is_varying else (0,))),
    )
    value = params.value
    if params.has_dead_keys:
        value = new((batch, key_heads, num_keys, value_width))
    tile = _tile(params, "features")
    spec = _spec(params, tile)
    centre = numbers(batch, key_heads, spec.padded_width)
    if not params.is_dot:
        launch(feature_kernels.centres, (batch * key_heads,), (centre, inputs), spec, tile)
    grid = (triton.cdiv(num_queries, tile.queries), batch * heads)
    launch(feature_kernels.query_features, grid, (features, centre, inputs), spec, tile)
    grid = (triton.cdiv(num_keys, tile.keys), batch * key_heads)
    launch(feature_kernels.key_features, grid, (features, value, centre, inputs), spec, tile)
    return features, value


def _kernel_inputs(params: AttentionParams, features: Features, value: Tensor) -> KernelInputs:
    batch, heads, num_queries, _ = params.query.shape
    num_keys = params.keys.shape[3]
    kept = 1 - params.dropout_p
    return KernelInputs(
        features=features,
        value=strided(value.unsqueeze(2), (batch, params.keys.shape[1], 1, num_keys), value),
        mask=strided(params.mask, (batch, heads, num_queries, num_keys), params.query),
        sizes=_sizes(params),
        dropout=Dropout(
            params.query if params.seed is None else params.seed,
            round(params.dropout_p * 2**32),
            1 / kept if kept > 0 else 0.0,
        ),
    )


def forward(params: AttentionParams) -> Result:
    """h_i = sum_j A_ij v_j (Eq. 10) and lse_i."""
    batch, heads, num_queries, _ = params.query.shape
    features, value = make_features(params)
    out = params.query.new_empty(batch, heads, num_queries, params.value.shape[-1])
    lse, row_max, row_sum = (torch.empty_like(features.query_norm) for _ in range(3))
    tile = _tile(params, "forward")
    grid = (triton.cdiv(num_queries, tile.queries), batch * heads)
    arguments = (out, lse, row_max, row_sum, _kernel_inputs(params, features, value))
    launch(forward_kernels.forward, grid, arguments, _spec(params, tile), tile)
    if params.checks_values:  # what is not finite has shown in the output; the backward leaves it out
        features.key_bias.masked_fill_(features.key_bias.isnan(), -torch.inf)
    return Result(out, lse, row_max, row_sum, features, value)


def backward(
    grad: Tensor,
    lse_grad: Tensor | None,
    params: AttentionParams,
    result: Result,
    needs: tuple[bool, bool] = (False, False),
) -> Gradients:
    """The gradients; ``needs`` asks for those of the variance and the mask."""
    batch, heads, num_queries, width = params.query.shape
    features, value, num_keys = result.features, result.value, params.keys.shape[3]
    key_heads = params.keys.shape[1]
    grad = grad.contiguous()
    lse_grad = torch.zeros_like(result.lse) if lse_grad is None else lse_grad.float().contiguous()
    delta, inverse_sum = torch.empty_like(result.lse), torch.empty_like(result.lse)
    tile = _tile(params, "features")
    grid: tuple[int, ...] = (triton.cdiv(delta.numel(), tile.queries),)
    arguments: tuple[Any, ...] = (delta, inverse_sum, result.row_sum, result.out, grad, lse_grad, delta.numel())
    launch(backward_kernels.deltas, grid, arguments, _spec(params, tile), tile)
    rows, call = Rows(result.row_max, inverse_sum, delta), _kernel_inputs(params, features, value)

    exact = torch.float32 if params.shifts is not None else None
    d_keys = torch.empty_like(features.keys, dtype=exact)
    d_value = value.new_empty(value.shape)
    d_bias = features.key_bias.new_empty(batch, key_heads, params.mixtures, num_keys)
    d_scale = features.key_bias.new_empty(features.keys.shape[:4])
    tile = _tile(params, "keys")
    keys_first = params.is_shifted or not tile.queries_first
    spec = _spec(params, tile, owns_keys=True, keys_first=keys_first, needs_variance_grad=needs[0])
    grid = (triton.cdiv(num_keys, tile.keys), batch * key_heads)
    arguments = (d_keys, d_value, d_bias, d_scale, grad, rows, call)
    launch(backward_kernels.keys_backward, grid, arguments, spec, tile)

    d_query = torch.empty_like(features.query, dtype=exact)
    d_query_bias = d_bias.new_empty(batch, heads, params.mixtures if params.is_shifted else 0, num_queries)
    d_mask = None
    if needs[1]:
        d_mask = d_bias.new_zeros(batch, heads, num_queries, num_keys)
    tile = _tile(params, "queries")
    spec = _spec(params, tile, needs_mask_grad=needs[1])
    grid = (triton.cdiv(num_queries, tile.queries), batch * heads)
    arguments = (d_query, d_query_bias, d_bias if d_mask is None else d_mask, grad, lse_grad, rows, call)
    launch(backward_kernels.queries_backward, grid, arguments, spec, tile)
    return _input_gradients(
        params, features, d_query, d_keys, d_value, d_query_bias, d_bias, d_scale, d_mask, needs[0]
    )


def _input_gradients(
    params: AttentionParams,
    features: Features,
    d_query: Tensor,
    d_keys: Tensor,
    d_value: Tensor,
    d_query_bias: Tensor,
    d_bias: Tensor,
    d_scale: Tensor,
    d_mask: Tensor | None,
    needs_variance: bool,
) -> Gradients:
    """The gradients of the inputs from those of the features."""
    d_shifts = None
    if params.is_shifted:
        assert params.shifts is not None
        least = features.least[:, :, None, None]
        shifts = params.shifts.float()
        shifts = shifts - shifts.mean(1, keepdim=True)
        groups = d_query.shape[1] // d_keys.shape[1]
        scale = features.least.repeat_interleave(groups, 1)[:, :, None, None]
        d_query = d_query + scale * (d_query_bias.mT @ shifts.repeat_interleave(groups, 0))
        d_keys = d_keys - (least * (d_bias.mT @ shifts)).unsqueeze(2)
        # sum_ij g (q - k - b_r) / sigma^2
        from_queries = (d_query_bias @ features.query.float()).unflatten(1, (-1, groups)).sum(2)
        from_keys = d_bias @ features.keys.squeeze(2).float() + d_bias.sum(-1, keepdim=True) * shifts
        d_shifts = (least * (from_queries - from_keys)).sum(0)
    elif params.shifts is not None:
        d_shifts = d_keys.sum((0, 3))
        d_keys = d_keys.sum(2, keepdim=True)
    d_prior = None
    if params.log_prior is not None:
        d_prior = sum_to(d_bias, params.log_prior.shape)
    d_variance = None
    if needs_variance:
        d_variance = _variance_gradient(params, features, d_query_bias, d_bias, d_scale)
    if params.mask is not None and d_mask is not None:
        d_mask = sum_to(d_mask, params.mask.shape)
    return Gradients(d_query, d_keys, d_shifts, d_value, d_prior, d_variance, d_mask)


def _variance_gradient(
    params: AttentionParams, features: Features, d_query_bias: Tensor, d_bias: Tensor, d_scale: Tensor
) -> Tensor:
    """-sum_i g_ijr x_ijr / sigma_jr^2, x being the score without its prior."""
    total = d_scale.double() / LOG2E
    finite_bias = features.key_bias[:, :, : params.mixtures].clamp_min(-1e30).double() / LOG2E
    if params.is_shifted:
        # the kernel's sum lacks both biases
        groups = d_query_bias.shape[1] // d_bias.shape[1]
        from_queries = (
            d_query_bias.double() * features.query_bias[:, :, : params.mixtures].double() / LOG2E
        ).sum((2, 3))
        from_queries = from_queries.unflatten(1, (-1, groups)).sum(2)[:, :, None, None]
        total = total + (d_bias.double() * finite_bias).sum(2, keepdim=True)
        total = total.sum((2, 3), keepdim=True) + from_queries
    total = sum_to(total, params.variance.shape)
    if params.log_prior is not None:
        prior = d_bias.double() * params.log_prior.double().clamp_min(-1e30)
        total = total - sum_to(prior, params.variance.shape)
    return -total / params.variance.double()


def sum_to(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``x`` summed to a shape, in float64: thousands of terms nearly cancel."""
    dims = [d for d in range(x.ndim) if shape[d] == 1 and x.shape[d] > 1]
    return x.sum(dims, keepdim=True, dtype=torch.float64) if dims else x


def counts(params: AttentionParams, query_mask: Tensor | None) -> Tensor:
    """N_jr = sum_i gamma_ijr (B, H, M, S)."""
    features, value = make_features(params)
    result = features.key_bias.new_empty(*features.key_bias.shape[:2], params.mixtures, params.keys.shape[3])
    tile = _tile(params, "counts")
    spec = _spec(params, tile, owns_keys=True, keys_first=True, has_query_mask=query_mask is not None)
    mask = result if query_mask is None else query_mask.contiguous().view(torch.uint8)
    grid = (triton.cdiv(params.keys.shape[3], tile.keys), params.keys.shape[0] * params.keys.shape[1])
    launch(counting_kernels.counts, grid, (result, mask, _kernel_inputs(params, features, value)), spec, tile)
    return result


def decode(params: AttentionParams) -> tuple[Tensor, Tensor]:
    """The output (B, Hq, 1, E) and lse (B, Hq, 1) of one query."""
    batch, heads, _, _ = params.query.shape
    num_keys, value_width = params.keys.shape[3], params.value.shape[-1]
    per_chunk = max(DECODE_CHUNK, triton.next_power_of_2(triton.cdiv(num_keys, MOST_CHUNKS)))
    num_chunks = triton.cdiv(num_keys, per_chunk)
    tile = _tile(params, "decode")
    spec = _spec(params, tile, key_mixtures=params.keys.shape[2], query_tile=1)
    new = params.query.new_empty
    partial = new((batch, heads, num_chunks, spec.padded_value_width), dtype=torch.float32)
    partial_max, partial_sum = (new((batch, heads, num_chunks), dtype=torch.float32) for _ in range(2))
    out, lse = new((batch, heads, 1, value_width)), new((batch, heads, 1), dtype=torch.float32)
    mask = strided(params.mask, (batch, heads, 1, num_keys), params.query)
    arguments: tuple[Any, ...] = (partial, partial_max, partial_sum, mask, _inputs(params), per_chunk)
    launch(decoding_kernels.decode, (num_chunks, batch * heads), arguments, spec, tile)
    arguments = (out, lse, partial, partial_max, partial_sum, num_chunks, triton.next_power_of_2(num_chunks))
    launch(decoding_kernels.join_chunks, (batch * heads,), arguments, spec, tile)
    return out, lse
