"""Linear attention with grouped heads and segments: against repeated keys and separate calls, in both backends."""

import itertools

import pytest
import torch

import mgk
from support.versions import needs_fullgraph

BACKENDS = ("blockwise", "reference")


def tensors(length, group=1, num_queries=None, batch=2, heads=2, mixtures=2, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    prior = normal(1, heads, mixtures, 1).detach().log_softmax(2).requires_grad_()
    query = normal(batch, heads * group, num_queries or length, 3)
    return query, normal(batch, heads, mixtures, length, 3), normal(batch, heads, length, 4), prior


def segment_ids(batch, length, longest, seed=0):
    """Rows of segments of random lengths; the second row has other cuts than the first."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (batch, length), generator=generator)
    ids = [torch.arange(length).repeat_interleave(row)[:length] for row in lengths]
    return torch.stack(ids) % 2  # ids come back: a segment is a run


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", [(5, 5), (200, 200), (7, 130), (130, 7)], ids=str)
def test_grouped_heads_equal_repeated_keys(sizes, is_causal):
    query, keys, value, prior = tensors(sizes[1], group=3, num_queries=sizes[0])
    repeated = [x.repeat_interleave(3, 1) for x in (keys, value, prior)]
    options = {"is_causal": is_causal, "return_state": True}
    for backend in BACKENDS:
        out, state = mgk.linear_mixture_attention(query, keys, value, prior, backend=backend, **options)
        truth, full = mgk.linear_mixture_attention(query, *repeated, backend="reference", **options)
        torch.testing.assert_close(out, truth)
        torch.testing.assert_close(state.numerator, full.numerator[:, ::3])
        assert state.normaliser.shape == (2, 2, 3)
        upstream = torch.randn_like(out)
        inputs = (query, keys, value, prior)
        grads = (torch.autograd.grad(x, inputs, upstream, retain_graph=True) for x in (out, truth))
        torch.testing.assert_close(*grads)
    weights = mgk.linear_mixture_weights(query, keys, prior, is_causal=is_causal)
    torch.testing.assert_close(weights @ repeated[1], truth)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("longest", [1, 20, 150, 400])
@pytest.mark.parametrize("backend", BACKENDS)
def test_segments_equal_separate_calls(backend, longest, group, is_causal):
    length = 333
    query, keys, value, prior = tensors(length, group)
    ids = segment_ids(2, length, longest)
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) > 0.2
    first = mgk.linear_mixture_attention(
        query[:, :, :9], keys[:, :, :, :9], value[:, :, :9], return_state=True
    )[1]
    options = {"is_causal": is_causal, "return_state": True}
    out, state = mgk.linear_mixture_attention(
        query,
        keys,
        value,
        prior,
        key_mask=mask,
        segment_ids=ids,
        initial_state=first,
        backend=backend,
        **options,
    )
    expected, last = torch.empty_like(out), []
    for b in range(2):
        cuts = [0, *((ids[b, 1:] != ids[b, :-1]).nonzero().flatten() + 1).tolist(), length]
        for start, stop in itertools.pairwise(cuts):
            part, row = slice(start, stop), slice(b, b + 1)
            initial = tuple(x[row] for x in first) if start == 0 else None
            expected[row, :, part], final = mgk.linear_mixture_attention(
                query[row, :, part],
                keys[row, :, :, part],
                value[row, :, part],
                prior,
                key_mask=mask[row, part],
                initial_state=initial,
                backend="reference",
                **options,
            )
        last.append(final)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(tuple(state), tuple(torch.cat(parts) for parts in zip(*last, strict=True)))
    inputs = (query, keys, value, prior)
    upstream = torch.randn_like(out)
    grads = (torch.autograd.grad(x, inputs, upstream, retain_graph=True) for x in (out, expected))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_queries", [1, 70, 200])
def test_the_queries_are_the_last_positions(num_queries, is_causal):
    query, keys, value, prior = tensors(200)
    options = {"is_causal": is_causal, "segment_ids": segment_ids(2, 200, 90)}
    whole = mgk.linear_mixture_attention(query, keys, value, prior, **options)
    for backend in BACKENDS:
        part = mgk.linear_mixture_attention(
            query[:, :, -num_queries:], keys, value, prior, backend=backend, **options
        )
        torch.testing.assert_close(part, whole[:, :, -num_queries:])
    weights = mgk.linear_mixture_weights(query[:, :, -num_queries:], keys, prior, **options)
    torch.testing.assert_close(weights @ value, part)


@pytest.mark.parametrize("is_causal", [False, True])
def test_counts_take_the_same_pairs(is_causal):
    from mgk.functional.linear import api
    from mgk.functional.linear.inputs import validate_inputs

    query, keys, _, prior = tensors(100, group=2)
    ids = segment_ids(2, 100, 30)
    inputs = validate_inputs(query, keys, log_prior=prior, is_causal=is_causal, segment_ids=ids)
    counts = [api.counts(inputs, backend=backend) for backend in BACKENDS]
    assert counts[0].shape == keys.shape[:4]
    torch.testing.assert_close(*counts)


@needs_fullgraph
def test_compiled_calls_equal_eager_ones():
    query, keys, value, prior = (x.detach() for x in tensors(100, group=2))
    ids = segment_ids(2, 100, 30)

    def call(*inputs):
        return mgk.linear_mixture_attention(*inputs, segment_ids=ids, is_causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, keys, value, prior), call(query, keys, value, prior))


def test_bad_arguments_raise_by_name():
    query, keys, value, _ = (x.detach() for x in tensors(6, group=2))
    with pytest.raises(ValueError, match="window must be None for linear attention"):
        mgk.linear_mixture_attention(query, keys, value, window=3)
    with pytest.raises(TypeError, match="segment_ids must have one of the dtypes"):
        mgk.linear_mixture_attention(query, keys, value, segment_ids=torch.zeros(2, 6))
    with pytest.raises(ValueError, match="query must have a multiple of the 2 heads"):
        mgk.linear_mixture_attention(query[:, :3], keys, value)
    empty = mgk.linear_mixture_attention(
        query[:, :, :0], keys[:, :, :, :0], value[:, :, :0], segment_ids=torch.zeros(2, 0, dtype=torch.int64)
    )
    assert empty.shape == (2, 4, 0, 4)
