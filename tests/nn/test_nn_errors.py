"""Every bad argument of a constructor or of forward: an error that names it, what came and what is wanted."""

import pytest
import torch
from recompute import GAUSSIAN, LINEAR, VARIANTS, make

from mgk.nn import (
    ConstantVariance,
    EMPrior,
    EMVariance,
    LearnedPrior,
    LearnedVariance,
    MixtureAttention,
    rotary_tables,
)

ERRORS = (TypeError, ValueError)
X = torch.zeros(2, 5, 12)
TABLES = rotary_tables(torch.arange(5), 4)

OPTIONS = [
    ({"embed_dim": 0}, "embed_dim must be at least 1, got 0"),
    ({"embed_dim": 12.0}, "embed_dim must be a whole number, got float"),
    ({"embed_dim": 13}, "embed_dim must be a multiple of num_heads=3 unless head_dim is given, got 13"),
    ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
    ({"num_heads": True}, "num_heads must be a whole number, got bool"),
    ({"variant": "gaussian"}, "variant must be one of 'softmax', 'linear', .* got 'gaussian'"),
    ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
    ({"head_dim": "4"}, "head_dim must be a whole number, got str"),
    ({"num_mixtures": 0}, "num_mixtures must be at least 1, got 0"),
    ({"num_mixtures": 1.5}, "num_mixtures must be a whole number, got float"),
    ({"e_step": "firm"}, "e_step must be one of 'soft', 'hard', got 'firm'"),
    ({"prior": "flat"}, "prior must be one of 'learned', 'em', 'uniform', got 'flat'"),
    ({"prior": "flat", "variant": "softmax"}, "prior must be one of 'learned', 'em', 'uniform', got 'flat'"),
    ({"variance": "free"}, "variance must be one of 'constant', 'learned', 'em', 'unequal', got 'free'"),
    ({"feature_map": "relu"}, "feature_map must be one of 'elu', 'favor', 'dpfp' or a callable, got 'relu'"),
    ({"feature_map": 3, "variant": "mlk"}, "feature_map must be one of .* got 3"),
    ({"dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
    ({"dropout": -0.1}, "dropout must be at least 0 and below 1, got -0.1"),
    ({"dropout": "0.1"}, "dropout must be a number, got str"),
    ({"bias": 1}, "bias must be True or False, got 1"),
    ({"kernel": "cosine"}, "kernel must be one of 'gaussian', 'dot', got 'cosine'"),
    ({"kernel": "dot", "variant": "mlk"}, "kernel does not exist for variant='mlk'"),
    ({"kernel": "dot", "variant": "smgk"}, "kernel='dot' cancels the shifts of variant='smgk' unless"),
    ({"init": "wide"}, "init must be one of 'paper', 'narrow', got 'wide'"),
    ({"init": 0.0}, "init must be 'paper', 'narrow' or a positive number, got 0.0"),
    ({"init": True}, "init must be 'paper', 'narrow' or a positive number, got True"),
    ({"backend": "cuda"}, "backend must be one of 'auto', 'reference', .* got 'cuda'"),
    (
        {"backend": "sdpa", "variant": "mlk"},
        "backend must be one of 'auto', 'reference', 'blockwise', 'triton', got 'sdpa'",
    ),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=lambda value: str(value)[:40])
def test_bad_options(options, message):
    with pytest.raises(ERRORS, match=message):
        MixtureAttention(**{"embed_dim": 12, "num_heads": 3} | options)


@pytest.mark.parametrize(
    "variance", ["learned", "em", LearnedVariance(3, 2, 4)], ids=["learned", "em", "module"]
)
@pytest.mark.parametrize("variant", GAUSSIAN)
def test_a_hard_e_step_needs_the_constant_variance(variant, variance):
    with pytest.raises(
        ValueError, match="e_step='hard' compares distances alone: it needs variance='constant'"
    ):
        MixtureAttention(12, 3, variant=variant, e_step="hard", variance=variance)


@pytest.mark.parametrize("variance", ["learned", "em"])
def test_softmax_has_a_fixed_scale(variance):
    with pytest.raises(ValueError, match=r"variant='softmax' has the fixed scale .* needs variance='constant'"):
        MixtureAttention(12, 3, variant="softmax", variance=variance)


@pytest.mark.parametrize(
    "options", [{"e_step": "hard"}, {"variance": "learned"}, {"variance": "em"}, {"dropout": 0.1}], ids=str
)
@pytest.mark.parametrize("variant", LINEAR)
def test_linear_variants_refuse_what_they_do_not_have(variant, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} does not exist for variant='{variant}'"):
        MixtureAttention(12, 3, variant=variant, **options)


PARTS = [
    (lambda: LearnedPrior(0, 2), "num_heads must be at least 1, got 0"),
    (lambda: LearnedPrior(3, 0), "num_mixtures must be at least 1, got 0"),
    (lambda: EMPrior(3.0, 2), "num_heads must be a whole number, got float"),
    (lambda: EMPrior(3, 0), "num_mixtures must be at least 1, got 0"),
    (lambda: EMPrior(3, 2, momentum=1.0), "momentum must be at least 0 and below 1, got 1.0"),
    (lambda: EMPrior(3, 2, momentum="0.9"), "momentum must be a number, got str"),
    (lambda: EMPrior(3, 2, max_positions=0), "max_positions must be at least 1, got 0"),
    (lambda: ConstantVariance(0), "head_dim must be at least 1, got 0"),
    (lambda: LearnedVariance(3, 2, 0), "head_dim must be at least 1, got 0"),
    (lambda: EMVariance(0, 2, 4), "num_heads must be at least 1, got 0"),
    (lambda: EMVariance(3, -1, 4), "num_mixtures must be at least 1, got -1"),
    (lambda: EMVariance(3, 2, 4, momentum=-0.5), "momentum must be at least 0 and below 1, got -0.5"),
    (lambda: rotary_tables(5, 4), "positions must be a tensor of shape .* got int"),
    (lambda: rotary_tables(torch.arange(5), 3), "head_dim must be even for rotary positions, got 3"),
    (lambda: rotary_tables(torch.arange(5), 0), "head_dim must be at least 1, got 0"),
]


@pytest.mark.parametrize(("build", "message"), PARTS, ids=[message for _, message in PARTS])
def test_bad_arguments_of_the_parts(build, message):
    with pytest.raises(ERRORS, match=message):
        build()


CALLS = [
    ({"x": [[1.0]]}, r"x must be a tensor of shape \(B, L, C\), got list"),
    ({"x": X[0]}, r"x must have shape \(B, L, C\), got \(5, 12\)"),
    ({"x": X.long()}, "x must have one of the dtypes float64, .* got int64"),
    ({"x": X[..., :8]}, r"x must have size 12 in dimension 2 \(embed_dim\), got shape \(2, 5, 8\)"),
    ({"context": "memory"}, r"context must be a tensor of shape \(B, S, C\), got str"),
    ({"context": X[..., 1:]}, r"context must have size 12 in dimension 2 \(embed_dim\)"),
    ({"context": X[:1]}, r"context must have size 2 in dimension 0 \(the batch of x\)"),
    ({"context": X, "rotary": TABLES}, "rotary has the positions of x: it cannot be used with context"),
    ({"key_mask": torch.ones(2, 5)}, "key_mask must have one of the dtypes bool, got float32"),
    ({"key_mask": torch.ones(2, 4) > 0}, r"key_mask must have shape \(B, S\) = \(2, 5\), got \(2, 4\)"),
    ({"key_mask": torch.ones(5) > 0}, r"key_mask must have shape \(B, S\), got \(5,\)"),
    ({"key_mask": [True]}, r"key_mask must be a tensor of shape \(B, S\), got list"),
    ({"is_causal": None}, "is_causal must be True or False, got None"),
    ({"need_weights": "yes"}, "need_weights must be True or False, got 'yes'"),
    ({"rotary": TABLES[0]}, r"rotary must be the tensors \(cos, sin\), got Tensor"),
    ({"rotary": (TABLES[0], None)}, r"rotary must be the tensors \(cos, sin\), got tuple"),
    (
        {"rotary": rotary_tables(torch.arange(4), 4)},
        r"rotary must have tables of shape .*\(5, 4\).* got \(4, 4\)",
    ),
    (
        {"rotary": rotary_tables(torch.arange(5), 8)},
        r"rotary must have tables of shape .*\(5, 4\).* got \(5, 8\)",
    ),
    ({"cache": {}}, r"cache must be what new_cache\(\) of this variant gives, got dict"),
]


@pytest.mark.parametrize(("arguments", "message"), CALLS, ids=[message[:40] for _, message in CALLS])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bad_arguments_of_forward(variant, arguments, message):
    with pytest.raises(ERRORS, match=message):
        make(variant, dtype=torch.float32)(**{"x": X} | arguments)


MASKS = [
    (torch.ones(2, 4) > 0, r"attn_mask must be broadcastable to \(B, H, L, S\) = \(2, 3, 5, 5\), got shape"),
    (torch.ones(5, 5).long(), "attn_mask must be bool .* or an additive float, got torch.int64"),
    ("causal", "attn_mask must be a tensor, got str"),
]


@pytest.mark.parametrize(("mask", "message"), MASKS, ids=["shape", "dtype", "type"])
@pytest.mark.parametrize("variant", ["softmax", *GAUSSIAN])
def test_bad_masks(variant, mask, message):
    with pytest.raises(ERRORS, match=message):
        make(variant, dtype=torch.float32)(X, attn_mask=mask)


@pytest.mark.parametrize("variant", LINEAR)
def test_linear_variants_have_no_attn_mask_and_no_weights_of_a_state(variant):
    attn = make(variant, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"attn_mask has no meaning for variant='{variant}': use key_mask"):
        attn(X, attn_mask=torch.ones(5, 5, dtype=torch.bool))
    cache = attn.new_cache()
    attn(X, is_causal=True, cache=cache)
    with pytest.raises(ValueError, match="need_weights cannot be computed from a linear state"):
        attn(X, is_causal=True, cache=cache, need_weights=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cache_cannot_be_used_with_a_context(variant):
    attn = make(variant, dtype=torch.float32)
    with pytest.raises(ValueError, match="cache holds the tokens of x: it cannot be used with context"):
        attn(X, context=X, cache=attn.new_cache())


def test_rotary_needs_an_even_head_dim():
    table = torch.ones(5, 3)
    with pytest.raises(ValueError, match="rotary needs an even head_dim, got 3"):
        MixtureAttention(12, 4)(X, rotary=(table, table))


@pytest.mark.parametrize("options", [{"e_step": "hard"}, {"dropout": 0.1}], ids=str)
def test_a_named_backend_that_cannot_serve_says_why(options):
    with pytest.raises(ValueError, match=r"backend 'sdpa' cannot serve this call: .*; use backend='auto'"):
        MixtureAttention(12, 3, backend="sdpa", **options)(X)
