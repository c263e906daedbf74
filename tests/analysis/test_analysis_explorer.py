"""What the explorer collects, against the plain equations and against what the models return."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from mgk._util.errors import UsageError
from mgk.analysis.explorer import ModelInput, explore
from mgk.models import MgkConfig, MgkForCausalLM, MgkForSequenceClassification
from mgk.nn import MixtureAttention
from mgk.variants import VARIANTS

LENGTH, VOCAB = 9, 30
IDS = torch.randint(1, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(3))
EXAMPLE = ModelInput({"input_ids": IDS}, tuple(map(str, IDS.tolist())), lambda index: f"word {index}")
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 6,
}
BERT = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


def moved(model):
    """Priors and embeddings away from where they start."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 if name.endswith("logits") else 0.1))
    return model


def config(attention, **options):
    return MgkConfig(
        attention=attention, intermediate_size=16, num_mixtures=3, num_labels=4, **SIZES, **options
    )


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("kind", [MgkForSequenceClassification, MgkForCausalLM])
def test_every_variant(attention, kind):
    model = moved(kind(config(attention)))
    found = explore(model, EXAMPLE, name="a")
    expected = model.eval()(input_ids=IDS[None], output_attentions=True)
    components = 3 if VARIANTS[attention].is_mixture else 1
    assert found.about.startswith(f"{attention}: 2 layers, 2 heads, ")
    assert ("3 components a key" in found.about) == (components > 1)
    for layer, weights in zip(found.layers, expected.attentions, strict=True):
        np.testing.assert_allclose(layer.weights, weights[0].detach().numpy(), atol=1e-6)
        assert layer.num_components == components
        if components > 1:
            assert layer.responsibilities.shape == (2, 3, LENGTH, LENGTH)
            np.testing.assert_allclose(layer.responsibilities.sum(1), 1, atol=1e-5)
            np.testing.assert_allclose(layer.prior.sum(1), 1, atol=1e-5)
            assert np.ptp(layer.prior) > 0.01
    logits = expected.logits[0].detach()
    if kind is MgkForSequenceClassification:
        assert found.prediction.kind == "label"
        probabilities = logits.softmax(-1)
        best = int(probabilities.argmax())
        assert found.prediction.candidates[0][0] == (f"LABEL_{best}", pytest.approx(float(probabilities[best])))
    else:
        probabilities = logits.softmax(-1)
        assert found.prediction.kind == "next"
        assert len(found.prediction.candidates) == LENGTH
        assert found.prediction.actual == pytest.approx(
            [float(probabilities[i, IDS[i + 1]]) for i in range(LENGTH - 1)]
        )
        assert found.prediction.candidates[4][0][0] == f"word {int(probabilities[4].argmax())}"


@pytest.mark.parametrize("options", [{}, {"e_step": "hard"}, {"variance": "learned"}, {"position": "rotary"}])
@pytest.mark.parametrize("attention", ["mgk", "smgk"])
def test_responsibilities_are_those_of_the_equations(attention, options):
    """gamma_ijr = pi_r N(q_i; k_jr, sigma_r^2) / sum_s, term by term, in float64."""
    model = moved(MgkForCausalLM(config(attention, **options))).eval()
    calls = []
    module = model.model.layers[1].attention
    module.register_forward_pre_hook(lambda _, args, given: calls.append((args[0], given)), with_kwargs=True)
    layer = explore(model, EXAMPLE, name="a").layers[1]
    x, given = calls[0]
    query, keys, _ = (part[0].detach().double() for part in module.project(x, rotary=given.get("rotary")))
    if attention == "smgk":
        keys = keys + module.shifts.detach().double()[:, :, None]
    sigma2 = torch.as_tensor(module.variance()).detach().double().expand(1, 2, 3, 1)[0]
    is_hard = options.get("e_step") == "hard"
    prior = torch.full((2, 3), 1 / 3).double() if is_hard else module.prior.logits.detach().double().softmax(-1)
    np.testing.assert_allclose(layer.prior, prior, rtol=1e-5)
    for head in range(2):
        for i in range(LENGTH):
            for j in range(LENGTH):
                squares = [float((query[head, i] - keys[head, r, j]).square().sum()) for r in range(3)]
                log = [-squares[r] / (2 * float(sigma2[head, r])) for r in range(3)]
                if is_hard:
                    expected = [float(r == int(np.argmax(log))) for r in range(3)]
                else:
                    if options.get("variance") == "learned":
                        log = [log[r] - 3 * math.log(float(sigma2[head, r])) for r in range(3)]  # D / 2 = 3
                    likelihood = np.exp(np.array(log) - max(log)) * prior[head].numpy()
                    expected = likelihood / likelihood.sum()
                np.testing.assert_allclose(layer.responsibilities[head, :, i, j], expected, atol=2e-5)


def test_models_of_hugging_face():
    for kind, prediction in (
        (BertModel, None),
        (BertForMaskedLM, "token"),
        (BertForTokenClassification, "tag"),
    ):
        model = kind(BertConfig(**BERT, intermediate_size=16, attn_implementation="eager"))
        found = explore(model, EXAMPLE, name="b")
        assert [layer.weights.shape for layer in found.layers] == [(4, LENGTH, LENGTH)] * 2
        assert all(layer.responsibilities is None for layer in found.layers)
        assert (found.prediction and found.prediction.kind) == prediction
    settings = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCAB, "attn_implementation": "eager"}
    found = explore(GPT2LMHeadModel(GPT2Config(**settings)), EXAMPLE, name="g")
    assert (found.prediction.kind, found.about[:23]) == ("next", "gpt2: 1 layer, 2 heads,")
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB}
    found = explore(
        T5ForConditionalGeneration(T5Config(**sizes, attn_implementation="eager")), EXAMPLE, name="t"
    )
    assert found.prediction is None
    assert found.layers[0].weights.shape == (2, LENGTH, LENGTH)


def test_a_model_with_mixture_attention_put_in():
    """Its layers return no weights of their own: they are taken from the calls."""

    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = MixtureAttention(16, 4, variant="smgk")

        def forward(self, hidden_states, *args, **given):
            return self.attention(hidden_states), None

    model = BertModel(BertConfig(**BERT, intermediate_size=16, attn_implementation="eager"))
    for layer in model.encoder.layer:
        layer.attention.self = Swapped()
    found = explore(model, EXAMPLE, name="s")
    assert [layer.num_components for layer in found.layers] == [2, 2]
    x = model.eval().embeddings(IDS[None])
    _, weights = model.encoder.layer[0].attention.self.attention(x, need_weights=True)
    np.testing.assert_allclose(found.layers[0].weights, weights[0].detach(), atol=1e-6)


def test_training_mode_and_weights_are_left_alone():
    model = moved(MgkForCausalLM(config("mgk", prior="em"))).train()
    before = copy.deepcopy(model.state_dict())
    explore(model, EXAMPLE, name="a")
    assert model.training
    assert all((before[name] == value).all() for name, value in model.state_dict().items())


def test_a_model_without_attentions_is_refused():
    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = BertConfig(**BERT)
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, input_ids, output_attentions):
            return input_ids

    with pytest.raises(UsageError, match="x: Tensor has no attentions: this model does not return them"):
        explore(Silent(), EXAMPLE, name="x")
