"""FlopCounterMode counts our operators by their formulas."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import mgk
from support.cases import BACKENDS

BATCH, HEADS, LENGTH, NUM_KEYS, DIM, WIDTH, MIXTURES = 2, 3, 90, 100, 8, 5, 2
PAIRS = 2 * BATCH * HEADS * LENGTH * NUM_KEYS


def counted(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def tensors(num_queries=LENGTH):
    query = torch.randn(BATCH, HEADS, num_queries, DIM, requires_grad=True)
    keys = torch.randn(BATCH, HEADS, MIXTURES, NUM_KEYS, DIM, requires_grad=True)
    return query, keys, torch.randn(BATCH, HEADS, NUM_KEYS, WIDTH, requires_grad=True)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("cpu", "blockwise", "triton")])
def test_forward_and_backward(backend):
    query, keys, value = tensors()
    forward = PAIRS * (MIXTURES * DIM + WIDTH)
    backward = PAIRS * (3 * MIXTURES * DIM + 2 * WIDTH)
    attend = lambda: mgk.mixture_attention(query, keys, value, backend=backend)  # noqa: E731
    assert counted(attend) == forward
    assert counted(lambda: attend().sum().backward()) == forward + backward
    shifts = torch.randn(HEADS, MIXTURES, DIM)
    shifted = counted(
        lambda: mgk.shifted_mixture_attention(query, keys[:, :, 0], shifts, value, backend=backend)
    )
    products_with_shifts = 2 * BATCH * HEADS * (LENGTH + NUM_KEYS) * MIXTURES * DIM
    assert shifted == PAIRS * (DIM + WIDTH) + products_with_shifts  # one product a pair


def test_every_backend_counts_no_less_than_the_products():
    query, keys, value = tensors()
    for backend in BACKENDS:
        flops = counted(lambda: mgk.mixture_attention(query, keys, value, backend=backend))  # noqa: B023
        assert flops >= PAIRS * (MIXTURES * DIM + WIDTH), backend


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels are not built")
def test_decoding_and_statistics():
    query, keys, value = tensors(1)
    with torch.no_grad():
        flops = counted(lambda: mgk.mixture_attention(query, keys, value, backend="cpu"))
    assert flops == PAIRS // LENGTH * (MIXTURES * DIM + WIDTH)
    long, many = torch.randn(1, 1, 400, DIM), torch.randn(1, 1, 2, 400, DIM)
    assert counted(lambda: mgk.m_step(long, many)) == 2 * 400 * 400 * 2 * 2 * DIM  # scores and first moments
