"""The configuration: checked when made, saved and loaded whole."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import LINEAR, VARIANTS, config

from mgk.models import (
    MgkConfig,
    MgkForCausalLM,
    MgkForImageClassification,
    MgkForSequenceClassification,
    MgkModel,
)


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"attention": "magic"}, ValueError, "attention must be one of 'softmax', .*, got 'magic'"),
        ({"hidden_dropout_prob": 2.0}, ValueError, "hidden_dropout_prob must be at least 0 and below 1, got 2.0"),
        ({"attention_probs_dropout_prob": -0.1}, ValueError, "attention_probs_dropout_prob must be at least 0"),
        ({"attention": "mlk", "attention_probs_dropout_prob": 1.5}, ValueError, "attention_probs_dropout_prob must"),
        ({"hidden_dropout_prob": "some"}, TypeError, "hidden_dropout_prob must be a number, got str"),
        ({"hidden_size": 0}, ValueError, "hidden_size must be at least 1, got 0"),
        ({"vocab_size": 2.5}, TypeError, "vocab_size must be a whole number, got float"),
        ({"num_hidden_layers": -1}, ValueError, "num_hidden_layers must be at least 1"),
        ({"num_mixtures": 0}, ValueError, "num_mixtures must be at least 1"),
        ({"num_labels": 0}, ValueError, "num_labels must be at least 1, got 0"),
        ({"num_labels": "two"}, TypeError, "num_labels must be a whole number"),
        ({"num_attention_heads": 3, "head_dim": None}, ValueError, "hidden_size must be a multiple of num_attention_h"),
        ({"head_dim": 0}, ValueError, "head_dim must be at least 1"),
        ({"e_step": "medium"}, ValueError, "e_step must be one of 'soft', 'hard', got 'medium'"),
        ({"prior": "posterior"}, ValueError, "prior must be one of"),
        ({"prior_momentum": 1.0}, ValueError, "prior_momentum must be at least 0 and below 1"),
        ({"variance": "large"}, ValueError, "variance must be one of"),
        ({"feature_map": "relu"}, ValueError, "feature_map must be one of 'elu', 'favor', 'dpfp'"),
        ({"position": "absolute"}, ValueError, "position must be one of"),
        ({"position": "rotary", "head_dim": 5}, ValueError, "even head_dim, got 5"),
        ({"position": "sinusoidal", "hidden_size": 15}, ValueError, "even hidden_size, got 15"),
        ({"pooling": "max"}, ValueError, "pooling must be one of 'mean', 'cls'"),
        ({"pooling": "cls", "is_decoder": True}, ValueError, "pooling='cls'"),
        ({"is_decoder": "yes"}, TypeError, "is_decoder must be True or False"),
        ({"hidden_act": "wave"}, ValueError, "hidden_act must be an activation"),
        ({"layer_norm_eps": 0.0}, ValueError, "layer_norm_eps must be a positive number"),
        ({"initializer_range": float("nan")}, ValueError, "initializer_range must be a positive number"),
        ({"backend": "gpu"}, ValueError, "backend must be one of"),
        ({"attention": "mlk", "backend": "sdpa"}, ValueError, "backend must be one of"),
        ({"attention": "mlk", "e_step": "hard"}, ValueError, "e_step does not exist for attention='mlk'"),
        ({"attention": "linear", "variance": "learned"}, ValueError, "variance does not exist for attention='linear'"),
        ({"attention": "softmax", "variance": "em"}, ValueError, "attention='softmax' has the fixed scale"),
        ({"e_step": "hard", "variance": "learned"}, ValueError, "e_step='hard' compares distances alone"),
        ({"patch_size": 5}, ValueError, "image_size must be a multiple of patch_size=5, got 32"),
        ({"patch_size": 2}, ValueError, "max_position_embeddings must be at least the 256 patches of an image, got 48"),
        ({"adaptive_cutoffs": [10, 5]}, ValueError, "adaptive_cutoffs must be increasing"),
        ({"adaptive_cutoffs": []}, ValueError, "adaptive_cutoffs must be increasing"),
        ({"adaptive_cutoffs": [0, 5]}, ValueError, "adaptive_cutoffs must be increasing"),
        ({"adaptive_cutoffs": 7}, ValueError, "adaptive_cutoffs must be increasing"),
        ({"adaptive_cutoffs": [10, 30]}, ValueError, "adaptive_cutoffs must be below vocab_size=30"),
        ({"adaptive_cutoffs": [5, 10, 20]}, ValueError, "adaptive_div_value=4.0 leaves no width to the last of 3"),
        ({"pad_token_id": 30}, ValueError, "pad_token_id must be from 0 to 29"),
        ({"eos_token_id": [1, -1]}, ValueError, "eos_token_id must be from 0 to 29"),
        ({"num_mixture": 3}, TypeError, "MgkConfig has no 'num_mixture': did you mean 'num_mixtures'?"),
        ({"num_layers": 3}, TypeError, "MgkConfig has no 'num_layers': did you mean 'num_hidden_layers'?"),
        ({"hidden_dropout": 0.1}, TypeError, "MgkConfig has no 'hidden_dropout': did you mean 'hidden_dropout_prob'?"),
        ({"variant": "mgk"}, TypeError, "MgkConfig has no 'variant': did you mean 'attention'?"),
        ({"window": 2}, TypeError, "MgkConfig has no 'window': did you mean 'sliding_window'?"),
        ({"num_head": 2}, TypeError, "MgkConfig has no 'num_head': did you mean 'num_attention_heads'?"),
        ({"num_classes": 2}, TypeError, "MgkConfig has no 'num_classes': did you mean 'num_labels'?"),
        ({"num_heads": 2}, TypeError, "MgkConfig has no 'num_heads': did you mean 'num_attention_heads'?"),
    ],
)  # fmt: skip
def test_every_value_is_checked_when_it_is_made(values, error, message):
    with pytest.raises(error, match=message) as caught:
        config(**values)
    assert "\n" not in str(caught.value)


def test_a_value_set_later_is_checked_when_a_model_is_made():
    changed = config()
    changed.hidden_dropout_prob = 2.0
    with pytest.raises(ValueError, match="hidden_dropout_prob"):
        MgkModel(changed)


@pytest.mark.parametrize("cls", [MgkForSequenceClassification, MgkForCausalLM])
def test_models_of_tokens_refuse_patches(cls):
    with pytest.raises(ValueError, match="patch_size must be None"):
        cls(config(patch_size=8))


def test_widths_left_open_are_derived():
    made = config(head_dim=None)
    assert (made.head_dim, made.classifier_hidden_size) == (8, 20)
    assert config(head_dim=7, classifier_hidden_size=9).head_dim == 7
    assert MgkForImageClassification(config(head_dim=7)).model.layers[0].attention.q_proj.out_features == 14


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_recipe_serves_all_variants(variant):
    made = config(variant, attention_probs_dropout_prob=0.3)
    is_linear = variant in LINEAR
    assert made.is_linear is is_linear
    assert MgkModel(made).layers[0].attention.dropout == (0.0 if is_linear else 0.3)


@settings(max_examples=25)
@given(
    attention=st.sampled_from(VARIANTS),
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 9) | st.none(),
    mixtures=st.integers(1, 4),
    prior=st.sampled_from(["learned", "em", "uniform"]),
    position=st.sampled_from(["learned", "sinusoidal", "rotary", "none"]),
    labels=st.integers(1, 5),
    cutoffs=st.none() | st.just([3, 20]) | st.just((3, 20)),
)
def test_json_round_trip(attention, heads, head_dim, mixtures, prior, position, labels, cutoffs):
    values = {
        "num_attention_heads": heads,
        "hidden_size": 12,
        "head_dim": head_dim if position != "rotary" or head_dim is None else 2 * head_dim,
        "num_mixtures": mixtures,
        "prior": prior,
        "num_labels": labels,
        "adaptive_cutoffs": cutoffs,
        "adaptive_div_value": 2.0,
        "prior_momentum": 0.5,
        "a_key_of_ones_own": {"kept": [1, 2]},
    }
    if position == "rotary" and head_dim is None:
        values["hidden_size"] = 24
    made = config(attention, position=position, **values)
    again = MgkConfig.from_dict(json.loads(made.to_json_string(use_diff=False)))
    assert again.to_dict() == made.to_dict()
    assert again.a_key_of_ones_own == {"kept": [1, 2]}
    assert again.num_labels == labels
    assert MgkConfig(**json.loads(made.to_json_string())).to_dict() == made.to_dict()


def test_saved_and_loaded_with_changes(tmp_path):
    config("smlk", unknown="kept").save_pretrained(tmp_path)
    again = MgkConfig.from_pretrained(tmp_path, num_labels=7, attention="linear")
    assert (again.attention, again.num_labels, again.unknown) == ("linear", 7, "kept")


def test_a_decoder_leaves_the_configuration_it_is_given_as_it_is():
    mine = config()
    assert MgkForCausalLM(mine).config.is_decoder
    assert not mine.is_decoder


@pytest.mark.parametrize(
    ("line", "message"),
    [("import mgk.models", "mgk.models needs"), ("from mgk.data import byte_tokenizer", "tokenizers need")],
)
def test_without_the_extra_the_import_says_what_to_install(line, message):
    program = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
try:
    {line}
except ImportError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == f"{message} Hugging Face transformers: pip install 'mgk[train]'\n"
