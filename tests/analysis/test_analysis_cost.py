"""Every formula of the cost model against a real model: its parameters, its matrix products, its caches, its graph."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mgk.analysis import cost_model
from mgk.analysis.cost_model import Sizes
from mgk.models import (
    MgkConfig,
    MgkForCausalLM,
    MgkForDocumentRetrieval,
    MgkForImageClassification,
    MgkForSequenceClassification,
    MgkModel,
)
from mgk.nn import MixtureAttention
from mgk.variants import VARIANTS

LRA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 17}
POINTWISE = "scale, shift, maximum, exp, sum"


def config(attention="mgk", heads=2, **options):
    return MgkConfig(
        attention=attention, num_attention_heads=heads, **{**LRA, "max_position_embeddings": 48, **options}
    )


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@settings(max_examples=60)
@given(
    attention=st.sampled_from(list(VARIANTS)),
    heads=st.integers(1, 5),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([4, 7]),
    mixtures=st.integers(1, 4),
    prior=st.sampled_from(["learned", "em", "uniform"]),
    e_step=st.sampled_from(["soft", "hard"]),
    variance=st.sampled_from(["constant", "learned"]),
)
def test_parameters_of_attention(attention, heads, group, head_dim, mixtures, prior, e_step, variance):
    if attention not in ("mgk", "smgk") or e_step == "hard":
        variance = "constant"
    if attention in ("linear", "mlk", "smlk"):
        e_step = "soft"
    options = {"prior": prior, "e_step": e_step, "variance": variance}
    sizes = {"variant": attention, "head_dim": head_dim, "num_mixtures": mixtures, "num_key_value_heads": heads}
    module = MixtureAttention(24, group * heads, **sizes, **options)
    sizes = Sizes(
        attention=attention,
        heads=group * heads,
        key_heads=None if group == 1 else heads,
        head_dim=head_dim,
        hidden=24,
        layers=1,
        intermediate=1,
        length=1,
        mixtures=mixtures,
        **options,
    )
    assert cost_model.attention_parameters(sizes).value == count(module)


def test_half_the_heads_are_five_units_against_eight():
    mgk = Sizes(attention="mgk", heads=4, head_dim=32, hidden=64, layers=2, intermediate=128, length=10)
    unit = 64 * 4 * 32
    weights = {name: projections(replace(mgk, attention=name)) for name in ("mgk", "smgk")}
    assert weights == {"mgk": 5 * unit, "smgk": 4 * unit}
    assert projections(mgk.baseline()) == 8 * unit
    assert mgk.baseline().heads == 8
    shifts = [
        term
        for term in cost_model.attention_parameters(replace(mgk, attention="smgk")).terms
        if term.name == "shifts"
    ]
    assert len(shifts) == 1


def projections(sizes):
    quantity = cost_model.attention_parameters(sizes)
    return quantity.term_value(quantity.terms[0])


@pytest.mark.parametrize("key_heads", [None, 1])
@pytest.mark.parametrize("attention", VARIANTS)
def test_parameters_of_models(attention, key_heads):
    with_labels = config(attention, num_labels=10, num_key_value_heads=key_heads)
    model = MgkForSequenceClassification(with_labels)
    sizes = Sizes.from_config(with_labels, length=48, head="classification")
    assert cost_model.layer_parameters(sizes).value == count(model.model.layers[0])
    assert cost_model.model_parameters(sizes).value == count(model)
    assert cost_model.model_parameters(replace(sizes, head="none")).value == count(MgkModel(with_labels))


@pytest.mark.parametrize("attention", VARIANTS)
def test_parameters_and_cache_of_grouped_heads(attention):
    grouped = config(attention, heads=4, num_key_value_heads=2, is_decoder=True)
    sizes = Sizes.from_config(grouped, length=16, head="language")
    model = MgkForCausalLM(grouped).eval()
    assert cost_model.model_parameters(sizes).value == count(model)
    attn = model.model.layers[0].attention
    cache = attn.new_cache()
    with torch.no_grad():
        attn(torch.randn(1, 16, 64), is_causal=True, cache=cache)
    assert cost_model.cache_bytes(sizes).value == 2 * cache.nbytes
    assert cost_model.cache_bytes(replace(sizes, key_heads=None)).value == 4 * cache.nbytes


@pytest.mark.parametrize(
    ("model", "head", "options"),
    [
        (MgkForDocumentRetrieval, "retrieval", {"classifier_hidden_size": 40}),
        (MgkForSequenceClassification, "classification", {"position": "rotary", "pooling": "cls"}),
        (MgkForImageClassification, "classification", {"patch_size": 8, "image_size": 32, "num_labels": 10}),
        (MgkForCausalLM, "language", {"is_decoder": True}),
        (MgkForCausalLM, "language", {"is_decoder": True, "tie_word_embeddings": False}),
        (
            MgkForCausalLM,
            "language",
            {"is_decoder": True, "vocab_size": 1000, "adaptive_cutoffs": [20, 90, 400]},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_parameters_of_every_head(model, head, options):
    chosen = config("smgk", **options)
    assert cost_model.model_parameters(Sizes.from_config(chosen, length=16, head=head)).value == count(
        model(chosen)
    )


def products(quantity):
    """The FLOPs of matrix products, which torch counts."""
    return sum(quantity.term_value(term) for term in quantity.terms if term.name != POINTWISE)


def measured(model, passes, **inputs):
    with FlopCounterMode(display=False) as counter:
        out = model(**inputs)
        if passes == "training":
            out.loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("passes", ["forward", "training"])
@pytest.mark.parametrize("e_step", ["soft", "hard"])
@pytest.mark.parametrize("attention", VARIANTS)
def test_products_of_a_classifier(attention, e_step, passes):
    is_linear = attention in ("linear", "mlk", "smlk")
    if is_linear and e_step == "hard":
        pytest.skip("linear attention has no hard E-step")
    chosen = config(attention, e_step=e_step, num_labels=10, backend="blockwise" if is_linear else "reference")
    chosen.attention_probs_dropout_prob = 0.0
    sizes = Sizes.from_config(chosen, length=33, batch=3, head="classification", fused=False)
    ids, labels = torch.randint(17, (3, 33)), torch.tensor([1, 2, 3])
    quantity = cost_model.forward_flops(sizes) if passes == "forward" else cost_model.training_flops(sizes)
    model = MgkForSequenceClassification(chosen).train()
    assert measured(model, passes, input_ids=ids, labels=labels) == products(quantity)


def test_products_of_a_pair_and_of_patches_and_of_random_features():
    pair = config("mgk", backend="reference", num_labels=2)
    ids = torch.randint(17, (3, 20))
    out = measured(MgkForDocumentRetrieval(pair).eval(), "forward", input_ids=ids, input_ids_2=ids)
    assert out == products(
        cost_model.forward_flops(Sizes.from_config(pair, length=20, batch=3, head="retrieval"))
    )

    patches = config("mgk", backend="reference", num_labels=10, patch_size=8, image_size=32, pooling="cls")
    sizes = Sizes.from_config(patches, length=16, batch=2, head="classification")
    pixels = torch.rand(2, 3, 32, 32)
    out = measured(MgkForImageClassification(patches).eval(), "forward", pixel_values=pixels)
    assert out == products(cost_model.forward_flops(sizes))

    favor = config("mlk", backend="blockwise", feature_map="favor", num_labels=10)
    out = measured(MgkForSequenceClassification(favor).eval(), "forward", input_ids=ids)
    assert out == products(
        cost_model.forward_flops(Sizes.from_config(favor, length=20, batch=3, head="classification"))
    )


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("key_heads", [None, 2])
@pytest.mark.parametrize("feature_map", ["elu", "dpfp"])
def test_bytes_of_the_cache(attention, feature_map, key_heads):
    options = {"head_dim": 16, "num_mixtures": 3, "feature_map": feature_map, "num_key_value_heads": key_heads}
    module = MixtureAttention(64, 4, variant=attention, **options)
    cache = module.new_cache()
    module(torch.randn(2, 21, 64), is_causal=True, cache=cache)
    shape = {"heads": 4, "key_heads": key_heads, "head_dim": 16, "hidden": 64, "layers": 1, "intermediate": 1}
    sizes = Sizes(attention=attention, **shape, length=21, batch=2, mixtures=3, feature_map=feature_map)
    assert cost_model.cache_bytes(sizes).value == cache.nbytes


@pytest.mark.parametrize("attention", VARIANTS)
def test_bytes_of_activations(attention):
    chosen = config(attention, num_labels=10, num_hidden_layers=3, max_position_embeddings=300)
    model = MgkForSequenceClassification(chosen).train()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(input_ids=torch.randint(17, (2, 300)), labels=torch.tensor([1, 2]))
    assert out.loss.requires_grad  # keeps the graph alive until here
    sizes = Sizes.from_config(chosen, length=300, batch=2, head="classification")
    assert cost_model.activation_bytes(sizes).value == pytest.approx(sum(kept.values()), rel=0.03)


def test_an_em_prior_costs_training_only_and_hard_costs_less_than_soft():
    sizes = Sizes(attention="mgk", heads=4, head_dim=32, hidden=64, layers=2, intermediate=128, length=100)
    em = replace(sizes, prior="em")
    assert cost_model.forward_flops(em).value == cost_model.forward_flops(sizes).value
    extra = cost_model.training_flops(em).value - cost_model.training_flops(sizes).value
    assert extra == 2 * 4 * 100**2 * (2 * 32 * 2 + 6 * 2)
    assert cost_model.training_flops(replace(em, variance="em")).value > cost_model.training_flops(em).value
    assert cost_model.forward_flops(replace(sizes, e_step="hard")).value < cost_model.forward_flops(sizes).value


def test_shared_products_cost_less_than_separate_ones_and_causal_ones_half():
    sizes = Sizes(attention="smgk", heads=4, head_dim=32, hidden=64, layers=2, intermediate=128, length=1000)
    assert (
        cost_model.attention_flops(sizes).value
        < 0.75 * cost_model.attention_flops(replace(sizes, fused=False)).value
    )
    softmax = sizes.baseline()
    assert cost_model.attention_flops(sizes).value < 0.6 * cost_model.attention_flops(softmax).value
    causal = cost_model.attention_flops(replace(softmax, causal=True)).value
    assert causal / cost_model.attention_flops(softmax).value == pytest.approx(0.5, abs=0.001)
    assert cost_model.cache_bytes(sizes).value * 2 == cost_model.cache_bytes(softmax).value


def test_a_quantity_explains_itself():
    sizes = Sizes(attention="mgk", heads=4, head_dim=32, hidden=64, layers=2, intermediate=128, length=100)
    text = cost_model.attention_parameters(sizes).explain()
    assert text.splitlines()[:2] == [
        "attention parameters = 41,544",
        "  projections: (3 + K) * C * H * D = (3 + 2) * 64 * 4 * 32 = 40,960",
    ]
    for quantity in (
        cost_model.training_flops(sizes),
        cost_model.model_parameters(sizes),
        cost_model.activation_bytes(sizes),
    ):
        assert sum(eval(quantity.with_numbers(term)) for term in quantity.terms) == quantity.value


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention": "softmin"}, "attention must be one of softmax, linear, .* got 'softmin'"),
        ({"heads": 0}, "heads must be a whole number, 1 or more, got 0"),
        ({"length": 2.5}, "length must be a whole number, 1 or more, got 2.5"),
        ({"e_step": "firm"}, "e_step must be one of soft, hard, got 'firm'"),
    ],
)
def test_bad_sizes(change, reason):
    sizes = Sizes(attention="mgk", heads=4, head_dim=32, hidden=64, layers=2, intermediate=128, length=100)
    with pytest.raises(ValueError, match=reason):
        replace(sizes, **change)


def test_a_baseline_has_no_baseline():
    sizes = Sizes(attention="linear", heads=4, head_dim=32, hidden=64, layers=2, intermediate=128, length=100)
    with pytest.raises(ValueError, match="is a baseline itself"):
        sizes.baseline()


def test_planning_needs_no_torch():
    code = "import sys, mgk.analysis.cost_model; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
