"""need_weights: the position weights before dropout, the output is the same without them."""

import pytest
import torch
from recompute import GAUSSIAN, KEY_MASK, MASKS, VARIANTS, make, project, tokens


@pytest.mark.parametrize("masks", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_sum_to_one_over_the_keys_that_take_part_and_give_the_output(variant, masks):
    attn, x = make(variant), tokens(2, 7)
    out, weights = attn(x, need_weights=True, **masks)
    assert weights.shape == (2, attn.num_heads, 7, 7)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, attn.num_heads, 7, dtype=weights.dtype))
    excluded = torch.zeros(2, attn.num_heads, 7, 7, dtype=torch.bool)
    if "key_mask" in masks:
        excluded |= ~KEY_MASK[:, None, None]
    if "is_causal" in masks:
        excluded |= torch.ones(7, 7, dtype=torch.bool).triu(1)
    assert not weights[excluded].any()
    value = project(attn, x)[2]
    torch.testing.assert_close(out, attn.o_proj((weights @ value).movedim(1, 2).flatten(2)))


@pytest.mark.parametrize("backend", ["auto", "reference", "blockwise"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_asking_for_weights_leaves_the_output_bitwise(variant, backend):
    options = {"dropout": 0.3} if variant in ("softmax", *GAUSSIAN) else {}
    attn, x = make(variant, backend=backend, dtype=torch.float32, **options), tokens(2, 7, dtype=torch.float32)
    torch.manual_seed(1)
    plain = attn(x, is_causal=True)
    torch.manual_seed(1)
    asked, _ = attn(x, is_causal=True, need_weights=True)
    assert torch.equal(asked, plain)


@pytest.mark.parametrize("e_step", ["soft", "hard"])
@pytest.mark.parametrize("variant", GAUSSIAN)
def test_weights_are_those_before_dropout(variant, e_step):
    attn, x = make(variant, dropout=0.5, e_step=e_step), tokens(2, 7)
    dropped, weights = attn(x, need_weights=True)
    attn.eval()
    kept, same = attn(x, need_weights=True)
    assert not torch.equal(dropped, kept)
    assert torch.equal(weights, same)


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_of_cross_attention_and_of_a_query_without_keys(variant):
    attn, mask = make(variant), torch.tensor([[True] * 9, [False] * 9])
    _, weights = attn(tokens(2, 5), context=tokens(2, 9), key_mask=mask, need_weights=True)
    assert weights.shape == (2, attn.num_heads, 5, 9)
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(attn.num_heads, 5, dtype=weights.dtype))
    assert not weights[1].any()


@pytest.mark.parametrize("variant", ["softmax", *GAUSSIAN])
def test_weights_with_a_cache_span_all_tokens_so_far(variant):
    attn, x = make(variant), tokens(2, 7)
    _, whole = attn(x, is_causal=True, need_weights=True)
    cache = attn.new_cache()
    attn(x[:, :4], is_causal=True, cache=cache)
    _, weights = attn(x[:, 4:], is_causal=True, cache=cache, need_weights=True)
    torch.testing.assert_close(weights, whole[:, :, 4:])
