"""Launches of the kernels of linear attention: sizes, buffers, sums around them."""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mgk.functional.linear import triton_kernels as kernels
from mgk.functional.linear.triton_kernels import LinearKernelInputs, LinearSpec, RowGradients, Walk
from mgk.functional.mixture.backends.triton_backend.launch import launch, strided, sum_to
from mgk.functional.mixture.backends.triton_backend.tiles import Tile

# Positions of a chunk, and columns at a time, by precision of products.
CHUNKS = {"tf32": 64, "ieee": 32}
WARPS = 4


class LinearParams(NamedTuple):
    """A call as the kernels take it."""

    query: Tensor  # (B, Hq, L, F)
    keys: Tensor  # (B, H, M, S, F)
    value: Tensor  # (B, H, S, E)
    log_prior: Tensor | None  # broadcastable to (B, H, M, S)
    numerator: Tensor | None  # of the initial state (B, H, F, E)
    normaliser: Tensor | None  # (B, H, F)
    key_mask: Tensor | None  # (B, S), bytes
    starts: Tensor | None  # (B, S), int32
    is_elu: bool
    is_causal: bool

    @property
    def pairs(self) -> tuple[int, ...]:
        """(B, H, M, S)."""
        return tuple(self.keys.shape[:4])


def _spec(params: LinearParams, chunk: int | None = None) -> LinearSpec:
    dtype = params.query.dtype
    # half-precision inputs lose nothing in TF32, which has float32's range
    is_exact = dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    precision = "ieee" if is_exact else "tf32"
    width, value_width = params.query.shape[-1], params.value.shape[-1]
    chunk = chunk or CHUNKS[precision]
    most = CHUNKS[precision]
    block, value_block = (min(most, max(16, triton.next_power_of_2(x))) for x in (width, value_width))
    return LinearSpec(
        mixtures=params.keys.shape[2],
        width=width,
        value_width=value_width,
        block=block,
        value_block=value_block,
        blocks=triton.cdiv(width, block),
        value_blocks=triton.cdiv(value_width, value_block),
        chunk=chunk,
        precision=precision,
        is_elu=params.is_elu,
        is_causal=params.is_causal,
        has_prior=params.log_prior is not None,
        has_mask=params.key_mask is not None,
        has_segments=params.starts is not None,
        has_state=params.numerator is not None,
    )


def _inputs(params: LinearParams, spec: LinearSpec) -> LinearKernelInputs:
    query, (batch, heads, _, num_keys) = params.query, params.pairs
    all_heads, num_queries = query.shape[1:3]
    offset = num_keys - num_queries if params.is_causal else 0
    return LinearKernelInputs(
        query=strided(query.unsqueeze(2), (batch, all_heads, 1, num_queries), query),
        keys=strided(params.keys, params.pairs, query),
        value=strided(params.value.unsqueeze(2), (batch, heads, 1, num_keys), query),
        log_prior=strided(params.log_prior, params.pairs, query),
        mask=query if params.key_mask is None else params.key_mask,
        starts=query if params.starts is None else params.starts,
        heads=heads,
        groups=all_heads // heads,
        num_queries=num_queries,
        num_keys=num_keys,
        offset=offset,
        first_chunk=offset // spec.chunk,
        num_chunks=triton.cdiv(num_keys, spec.chunk),
    )


def _launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], spec: LinearSpec) -> None:
    launch(kernel, grid, arguments, spec, Tile(spec.chunk, spec.chunk, WARPS, 1))


def _walk(params: LinearParams, count: int) -> Walk:
    batch, heads = params.pairs[:2]
    width, value_width = params.query.shape[-1], params.value.shape[-1]

    def new(*shape: int) -> Tensor:
        return params.query.new_empty((batch, heads, count, *shape), dtype=torch.float32)

    return Walk(new(width, value_width), new(width))


def _states(params: LinearParams, x: LinearKernelInputs, spec: LinearSpec) -> Walk:
    """The states before and after each chunk of keys."""
    walk = _walk(params, x.num_chunks + 1 if spec.is_causal else 1)
    first = Walk(walk.state, walk.normaliser)
    if params.numerator is not None and params.normaliser is not None:
        first = Walk(params.numerator.float(), params.normaliser.float())
    grid = (spec.blocks * spec.value_blocks, params.pairs[0] * x.heads)
    _launch(kernels.states, grid, (walk, first, x), spec)
    return walk


def _num_query_chunks(x: LinearKernelInputs, spec: LinearSpec) -> int:
    return triton.cdiv(x.offset + x.num_queries, spec.chunk) - x.first_chunk


def forward(params: LinearParams) -> tuple[Tensor, ...]:
    """h_i, d_i, and the last state."""
    spec = _spec(params)
    x = _inputs(params, spec)
    walk = _states(params, x, spec)
    batch, heads, num_queries, _ = params.query.shape
    out = params.value.new_empty(batch, heads, num_queries, spec.value_width)
    denominator = walk.normaliser.new_empty(batch, heads, num_queries)
    grid = (_num_query_chunks(x, spec), batch * heads, spec.value_blocks)
    _launch(kernels.outputs, grid, (out, denominator, walk, x), spec)
    return out, denominator, *(y[:, :, -1].clone() for y in walk)


def step(params: LinearParams) -> tuple[Tensor, ...]:
    """The output of one position, and the state with its key."""
    spec = _spec(params, 1)
    x = _inputs(params._replace(is_causal=False), spec)
    batch, heads, _, _ = params.query.shape
    out, walk = params.value.new_empty(batch, heads, 1, spec.value_width), _walk(params, 1)
    first = Walk(walk.state, walk.normaliser)
    if params.numerator is not None and params.normaliser is not None:
        first = Walk(params.numerator.float(), params.normaliser.float())
    _launch(kernels.step, (spec.value_blocks, batch * x.heads), (out, walk, first, x), spec)
    return out, *(y.squeeze(2) for y in walk)


def backward(given: tuple[Tensor, ...], params: LinearParams) -> tuple[Tensor | None, ...]:
    """The gradients of the first six tensors, given those of output and last state, h_i and d_i."""
    grad, d_numerator, d_normaliser, out, denominator = given
    spec = _spec(params)
    x = _inputs(params, spec)
    batch, heads = params.query.shape[:2]
    grad = grad.contiguous()
    rows = RowGradients(grad, torch.empty_like(denominator), torch.empty_like(denominator))
    arguments: tuple[Any, ...] = (rows.inverse, rows.denominator, out, grad, denominator, denominator.numel())
    _launch(kernels.row_gradients, (triton.cdiv(denominator.numel(), spec.chunk),), arguments, spec)

    d_walk = _walk(params, x.num_chunks + 1 if spec.is_causal else 1)
    last = Walk(d_numerator.float().contiguous(), d_normaliser.float().contiguous())
    grid: tuple[int, ...] = (spec.blocks * spec.value_blocks, batch * x.heads)
    _launch(kernels.state_gradients, grid, (d_walk, last, rows, x), spec)

    d_query = torch.empty_like(params.query, memory_format=torch.contiguous_format)
    grid = (_num_query_chunks(x, spec), batch * heads, spec.blocks)
    _launch(kernels.query_gradients, grid, (d_query, _states(params, x, spec), rows, x), spec)

    d_keys = torch.empty_like(params.keys, memory_format=torch.contiguous_format)
    d_value = torch.empty_like(params.value, memory_format=torch.contiguous_format)
    d_prior = denominator.new_empty(*params.pairs, spec.blocks)
    grid = (x.num_chunks, batch * x.heads, spec.value_blocks)
    _launch(kernels.value_gradients, grid, (d_value, d_walk, rows, x), spec)
    grid = (x.num_chunks, batch * x.heads, spec.blocks)
    _launch(kernels.key_gradients, grid, (d_keys, d_prior, d_walk, rows, x), spec)
    prior = None
    if params.log_prior is not None:
        prior = sum_to(d_prior.sum(-1), params.log_prior.shape)
    return d_query, d_keys, d_value, prior, d_walk.state[:, :, 0], d_walk.normaliser[:, :, 0]
