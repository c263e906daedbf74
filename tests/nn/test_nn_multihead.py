"""The drop-in for nn.MultiheadAttention: the same constructor, call, masks and returned pair."""

import inspect
import warnings

import pytest
import torch
from recompute import LINEAR, VARIANTS
from torch import nn

from mgk.nn import MixtureAttention, MultiheadMixtureAttention
from support.versions import needs_fullgraph

B, L, S, C, H = 3, 5, 7, 12, 3
KINDS = ["none", "padding", "float padding", "mask", "mask of heads", "float mask", "both"]


def pair(**options):
    """nn.MultiheadAttention and ours with variant="softmax" and the same weights, in float64."""
    theirs = nn.MultiheadAttention(C, H, **options).double()
    ours = MultiheadMixtureAttention(C, H, variant="softmax", **options).double()
    inner = ours.attention
    with torch.no_grad():
        if theirs.in_proj_weight is None:
            weights = [theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight]
        else:
            weights = theirs.in_proj_weight.chunk(3)
        for projection, weight in zip((inner.q_proj, inner.k_proj, inner.v_proj), weights, strict=True):
            projection.weight.copy_(weight)
        inner.o_proj.weight.copy_(theirs.out_proj.weight)
        if options.get("bias", True):
            theirs.in_proj_bias.normal_()
            theirs.out_proj.bias.normal_()
            for projection, bias in zip(
                (inner.q_proj, inner.k_proj, inner.v_proj), theirs.in_proj_bias.chunk(3), strict=True
            ):
                projection.bias.copy_(bias)
            inner.o_proj.bias.copy_(theirs.out_proj.bias)
        if options.get("add_bias_kv"):
            ours.bias_k.copy_(theirs.bias_k.view(H, 1, 1, C // H))
            ours.bias_v.copy_(theirs.bias_v.view(H, 1, C // H))
    return theirs, ours


def masks_of(kind):
    padding = torch.arange(S) >= torch.tensor([7, 4, 6])[:, None]
    mask = torch.rand(L, S, generator=torch.Generator().manual_seed(2)) < 0.3
    mask[:, 0] = False
    bias = torch.randn(B * H, L, S, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "float padding": {
            "key_padding_mask": torch.where(padding, -torch.inf, torch.arange(S) / 10.0).double()
        },
        "mask": {"attn_mask": mask},
        "mask of heads": {"attn_mask": mask.repeat(B * H, 1, 1) ^ (bias > 1)},
        "float mask": {"attn_mask": bias[0].masked_fill(mask, -torch.inf)},
        "both": {"key_padding_mask": padding, "attn_mask": mask},
    }[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True, "bias": False},
        {"kdim": 8, "vdim": 10},
        {"add_bias_kv": True, "add_zero_attn": True},
        {"batch_first": True, "add_zero_attn": True},
    ],
    ids=str,
)
def test_softmax_equals_torch(options, kind):
    theirs, ours = pair(**options)
    inputs = [
        torch.randn(B, n, w).double()
        for n, w in ((L, C), (S, options.get("kdim", C)), (S, options.get("vdim", C)))
    ]
    if not options.get("batch_first"):
        inputs = [x.transpose(0, 1) for x in inputs]
    for extra in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        expected = theirs(*inputs, **masks_of(kind), **extra)
        out = ours(*inputs, **masks_of(kind), **extra)
        torch.testing.assert_close(out[0], expected[0])
        if extra.get("need_weights", True):
            torch.testing.assert_close(out[1], expected[1])
        else:
            assert out[1] is expected[1] is None


def test_unbatched_input_and_gradients():
    theirs, ours = pair()
    x = torch.randn(L, C).double()
    padding = torch.tensor([False, False, True, False, True])
    expected, out = (m(x, x, x, key_padding_mask=padding) for m in (theirs, ours))
    torch.testing.assert_close(out, expected)
    expected, out = (
        torch.autograd.grad(m(x, x, x)[0].square().sum(), m.out_proj.weight)[0] for m in (theirs, ours)
    )
    torch.testing.assert_close(out, expected)


def test_the_constructor_and_the_call_have_the_same_arguments_in_the_same_order():
    for method in ("__init__", "forward"):
        theirs, ours = (
            list(inspect.signature(getattr(cls, method)).parameters.values())
            for cls in (nn.MultiheadAttention, MultiheadMixtureAttention)
        )
        shared = ours[: len(theirs)]
        assert [(p.name, p.default, p.kind) for p in shared] == [(p.name, p.default, p.kind) for p in theirs]
        assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in ours[len(theirs) :])
    module = MultiheadMixtureAttention(C, H, 0.25, device="cpu", dtype=torch.float64)
    assert module.attention.dropout == 0.25
    assert module.attention.q_proj.weight.dtype == torch.float64


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_mixture_attention_with_the_masks_turned_round(variant):
    module = MultiheadMixtureAttention(C, H, batch_first=True, variant=variant).double()
    x, key_mask = torch.randn(B, L, C).double(), torch.rand(B, L) < 0.7
    expected = module.attention(x, key_mask=key_mask, need_weights=True)
    out, weights = module(x, x, x, key_padding_mask=~key_mask, average_attn_weights=False)
    torch.testing.assert_close((out, weights), expected)
    context = torch.randn(B, S, C).double()
    torch.testing.assert_close(module(x, context, context)[0], module.attention(x, context=context))
    causal = torch.ones(L, L).triu(1) > 0
    expected = module.attention(x, is_causal=True)
    for extra in ({"attn_mask": causal}, {}):
        torch.testing.assert_close(module(x, x, x, is_causal=True, **extra)[0], expected)
    if variant not in LINEAR:
        torch.testing.assert_close(module(x, x, x, attn_mask=causal)[0], expected)


def encoder(variant, *, replaced, norm_first=False):
    """Two layers with our attention, put in before or after nn.TransformerEncoder looks at the layer."""
    layer = nn.TransformerEncoderLayer(C, 2, 20, dropout=0.0, batch_first=True, norm_first=norm_first)
    if replaced == "before":
        layer.self_attn = MultiheadMixtureAttention(C, 2, batch_first=True, variant=variant)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.TransformerEncoder(layer, 2)
    if replaced == "after":
        for layer in model.layers:
            layer.self_attn = MultiheadMixtureAttention(C, 2, batch_first=True, variant=variant)
    return model.double()


@pytest.mark.parametrize("replaced", ["before", "after"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_transformer_encoder_takes_it_in_training_and_in_evaluation(variant, replaced):
    """PyTorch's fused path would bypass it in evaluation, under no_grad, with or without padding."""
    model = encoder(variant, replaced=replaced)
    x = torch.randn(B, L, C).double()
    padding = torch.arange(L) >= torch.tensor([5, 2, 4])[:, None]
    causal = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    for extra in ({}, {"src_key_padding_mask": padding}, {"mask": causal}, {"mask": causal, "is_causal": True}):
        trained = model.train()(x, **extra)
        with torch.no_grad():
            evaluated = model.eval()(x, **extra)
        kept = ~padding if "src_key_padding_mask" in extra else torch.ones(B, L, dtype=torch.bool)
        torch.testing.assert_close(evaluated[kept], trained[kept])
        layer = model.layers[0]
        mask = {"key_mask": ~padding} if "src_key_padding_mask" in extra else {"is_causal": "mask" in extra}
        attended = layer.self_attn.attention(x, **mask)
        hidden = layer.norm1(x + attended)
        expected = layer.norm2(hidden + layer.linear2(layer.linear1(hidden).relu()))
        if variant in LINEAR and extra.keys() == {"mask"}:
            continue  # a layer alone does not look whether a mask is causal
        first = layer(x, **{f"src_{name}" if name == "mask" else name: value for name, value in extra.items()})
        torch.testing.assert_close(first[kept], expected[kept])


def test_a_transformer_decoder_layer_takes_it():
    layer = nn.TransformerDecoderLayer(C, H, 20, dropout=0.0, batch_first=True)
    layer.self_attn = MultiheadMixtureAttention(C, H, batch_first=True)
    layer.multihead_attn = MultiheadMixtureAttention(C, H, batch_first=True, variant="mlk")
    x, memory = torch.randn(B, L, C), torch.randn(B, S, C)
    causal = nn.Transformer.generate_square_subsequent_mask(L)
    out = layer(x, memory, tgt_mask=causal, tgt_is_causal=True)
    changed = x.clone()
    changed[:, 3:] += 1
    again = layer(changed, memory, tgt_mask=causal, tgt_is_causal=True)
    torch.testing.assert_close(again[:, :3], out[:, :3])
    assert not torch.allclose(again[:, 3:], out[:, 3:])


def test_padded_queries_are_not_counted_by_the_m_step():
    module = MultiheadMixtureAttention(C, H, batch_first=True, prior="em")
    x, key_mask = torch.randn(B, L, C), torch.arange(L) < torch.tensor([5, 2, 4])[:, None]
    module(x, x, x, key_padding_mask=~key_mask)
    counts = module.attention.prior.counts.clone()
    module.attention.prior.reset_parameters()
    module.attention(x, key_mask=key_mask)
    torch.testing.assert_close(module.attention.prior.counts, counts)


@pytest.mark.parametrize("variant", ["mgk", "smgk"])
def test_added_keys_are_seen_by_every_query(variant):
    module = MultiheadMixtureAttention(
        C, H, batch_first=True, variant=variant, add_bias_kv=True, add_zero_attn=True
    )
    x = torch.randn(B, L, C)
    out, weights = module(x, x, x, is_causal=True)
    assert weights.shape == (B, L, L + 2)
    assert (weights[:, :, L:] > 0).all()
    assert not weights[:, :, :L].triu(1).any()
    out.sum().backward()
    assert module.bias_k.grad.any()
    assert module.bias_v.grad.any()
    with pytest.raises(ValueError, match="is_causal cannot be used with added keys for variant='mlk'"):
        MultiheadMixtureAttention(C, H, batch_first=True, variant="mlk", add_zero_attn=True)(
            x, x, x, is_causal=True
        )


X = torch.zeros(B, L, C)
ERRORS = [
    ((X[..., :5], X, X), {}, r"query must have size 12 in dimension 2 \(embed_dim\), got shape \(3, 5, 5\)"),
    ((X, X, "value"), {}, r"value must be a tensor of shape \(B, L, C\), got str"),
    (
        (X, X, X),
        {"key_padding_mask": torch.zeros(B, S) > 0},
        r"key_padding_mask must .* = \(3, 5\), got \(3, 7\)",
    ),
    (
        (X, X, X),
        {"key_padding_mask": torch.zeros(B, L).long()},
        "key_padding_mask must be bool .True is left out.",
    ),
    (
        (X, X, X),
        {"attn_mask": torch.zeros(B, L, L) > 0},
        r"attn_mask must be .* = \(9, 5, 5\), got \(3, 5, 5\)",
    ),
    ((X, X[:, :2], X[:, :2]), {"is_causal": True}, "is_causal without attn_mask needs as many keys as queries"),
]


@pytest.mark.parametrize(("inputs", "options", "message"), ERRORS, ids=[e[2][:30] for e in ERRORS])
def test_errors(inputs, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MultiheadMixtureAttention(C, H, batch_first=True)(*inputs, **options)


def test_linear_variants_have_no_scores_to_add_to():
    module = MultiheadMixtureAttention(C, H, batch_first=True, variant="mlk")
    with pytest.raises(ValueError, match="key_padding_mask must be bool, or 0 and -inf, for variant='mlk'"):
        module(X, X, X, key_padding_mask=torch.full((B, L), 0.5))
    with pytest.raises(ValueError, match="attn_mask has no meaning for variant='mlk'"):
        module(X, X, X, attn_mask=torch.zeros(L, L) > 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a(X, X, X), "takes x by position, got 3 arguments: pass x alone, and context="),
        (lambda a: a(X, key_padding_mask=None), "'key_padding_mask': pass key_mask=~key_padding_mask, in which True"),
        (lambda a: a(X, average_attn_weights=False), "'average_attn_weights': need_weights=True returns the"),
        (lambda a: MixtureAttention(C, H, batch_first=True), r"'batch_first': x is \(B, L, embed_dim\) always"),
        (lambda a: MixtureAttention(C, H, 0.1), "takes embed_dim and num_heads by position, got 3 arguments"),
        (lambda a: MixtureAttention(C, H, kdim=3), "'kdim': a context has the width embed_dim"),
    ],
    ids=["x, x, x", "key_padding_mask", "average", "batch_first", "dropout", "kdim"],
)  # fmt: skip
def test_the_words_of_torch_are_answered_with_ours(call, message):
    with pytest.raises(TypeError, match=message) as error:
        call(MixtureAttention(C, H))
    assert "mgk.nn.MultiheadMixtureAttention" in str(error.value)
    assert "\n" not in str(error.value)


def test_two_additive_masks_are_added_in_float32_and_stay_finite():
    ours = MultiheadMixtureAttention(C, H, batch_first=True)
    x, lowest = torch.randn(B, S, C), torch.finfo(torch.float32).min
    masks = {"key_padding_mask": torch.full((B, S), lowest), "attn_mask": torch.full((S, S), lowest)}
    weights = ours(x, x, x, **masks)[1]
    torch.testing.assert_close(weights, torch.full((B, S, S), 1 / S))


def test_a_misspelt_argument_is_answered_with_the_closest():
    with pytest.raises(TypeError, match=r"unexpected argument 'ke_mask': did you mean 'key_mask'\?"):
        MixtureAttention(C, H)(X, ke_mask=None)
    with pytest.raises(TypeError, match=r"unexpected argument 'num_mixture': did you mean 'num_mixtures'\?"):
        MixtureAttention(C, H, num_mixture=3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_another_dtype_than_the_weights_is_named(variant):
    attn = MixtureAttention(C, H, variant=variant)
    message = "must have the dtype of the module's weights, float32, got float16"
    with pytest.raises(TypeError, match=f"x {message}"):
        attn(X.half())
    with pytest.raises(TypeError, match=f"context {message}"):
        attn(X, context=X.half())
    with pytest.raises(TypeError, match=f"value {message}"):
        MultiheadMixtureAttention(C, H, variant=variant)(X, X, X.half())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attn(X.bfloat16()).dtype == torch.bfloat16


@needs_fullgraph
@pytest.mark.parametrize("variant", ["mgk", "mlk"])
def test_compiled_without_breaks(variant):
    torch.compiler.reset()
    module = MultiheadMixtureAttention(C, H, batch_first=True, variant=variant)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    padding = torch.arange(L) >= torch.tensor([5, 2, 4])[:, None]
    for mask in (padding, torch.zeros(B, L).masked_fill(padding, -torch.inf)):
        torch.testing.assert_close(
            compiled(X + 1, X + 1, X + 1, key_padding_mask=mask),
            module(X + 1, X + 1, X + 1, key_padding_mask=mask),
        )


def test_an_option_of_grouped_heads_is_refused_by_name():
    with pytest.raises(TypeError, match="num_key_value_heads is no option of MultiheadMixtureAttention"):
        MultiheadMixtureAttention(C, H, num_key_value_heads=1)
