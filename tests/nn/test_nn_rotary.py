"""Rotary positions turn queries and keys, before a shift is added."""

import pytest
import torch
from recompute import VARIANTS, make, project, tokens

import mgk
from mgk.nn import rotary_tables, rotate

LENGTH = 7


def attend(attn, x, positions):
    return attn(x, is_causal=True, rotary=rotary_tables(positions, attn.head_dim))


def turn(x, positions):
    """Each pair of features (m, m + D/2) as a complex number, times exp(i position 10000^(-2m/D))."""
    left, right = x.chunk(2, -1)
    rates = 10000.0 ** (-torch.arange(left.shape[-1]) / left.shape[-1])
    turned = torch.complex(left, right) * torch.exp(1j * positions[..., None] * rates).to(torch.complex128)
    return torch.cat([turned.real, turned.imag], -1)


def test_tables_turn_pairs_of_features():
    x, positions = torch.randn(2, 3, LENGTH, 8, dtype=torch.float64), torch.arange(LENGTH)
    turned = rotate(x, rotary_tables(positions, 8))
    torch.testing.assert_close(turned, turn(x, positions), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-6, rtol=1e-6)


def test_the_base_sets_the_rates():
    cos, sin = rotary_tables(torch.tensor([1]), 4, base=100.0)
    angles = torch.tensor([[1.0, 0.1, 1.0, 0.1]])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def test_keys_are_turned_before_the_shift():
    attn, x, positions = make("smgk"), tokens(2, LENGTH), torch.arange(LENGTH)
    query, keys, value = project(attn, x)
    expected = mgk.mixture_attention(
        turn(query, positions),
        turn(keys, positions) + attn.shifts[:, :, None],
        value,
        attn.prior.logits.log_softmax(-1)[None, :, :, None],
        is_causal=True,
    )
    expected = attn.o_proj(expected.movedim(1, 2).flatten(2))
    torch.testing.assert_close(attend(attn, x, positions), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("variant", ["softmax", "mgk"])
def test_only_relative_positions_matter(variant):
    attn, x = make(variant), tokens(2, LENGTH)
    here, there = (attend(attn, x, torch.arange(LENGTH) + start) for start in (0, 50))
    torch.testing.assert_close(there, here, atol=1e-4, rtol=1e-4)
    stretched = attend(attn, x, 3 * torch.arange(LENGTH))
    assert (stretched - here).abs().max() > 1e-2


@pytest.mark.parametrize("variant", VARIANTS)
def test_position_zero_turns_nothing_and_other_positions_matter(variant):
    attn, x = make(variant), tokens(2, LENGTH)
    torch.testing.assert_close(attend(attn, x, torch.zeros(LENGTH)), attn(x, is_causal=True))
    assert (attend(attn, x, torch.arange(LENGTH)) - attn(x, is_causal=True)).abs().max() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_sequence_may_have_its_own_positions(variant):
    attn, x = make(variant), tokens(2, LENGTH)
    positions = torch.stack([torch.arange(LENGTH), 2 * torch.arange(LENGTH)])
    both = attend(attn, x, positions)
    for row in range(2):
        torch.testing.assert_close(both[row : row + 1], attend(attn, x[row : row + 1], positions[row]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_row_of_positions_serves_the_whole_batch(variant):
    attn, x, positions = make(variant), tokens(3, LENGTH), torch.arange(LENGTH)
    torch.testing.assert_close(attend(attn, x, positions[None]), attend(attn, x, positions))
