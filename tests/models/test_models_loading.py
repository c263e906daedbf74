"""Saving and loading: what is missing, left over or corrupt raises, and nothing is filled in silently."""

import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny_models import LINEAR, VARIANTS, config, moved, tokens
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from mgk import models
from mgk.models.configuration import MgkConfig
from mgk.nn import MixtureAttention

WEIGHTS = "model.safetensors"
CLASSES = (
    models.MgkModel,
    models.MgkForSequenceClassification,
    models.MgkForDocumentRetrieval,
    models.MgkForCausalLM,
    models.MgkForImageClassification,
    models.MgkForTokenClassification,
    models.MgkForMaskedLM,
    models.MgkForQuestionAnswering,
)


def change_weights(folder: Path, change) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    moved(models.MgkForSequenceClassification(config("smgk"))).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_class_comes_back_with_every_weight(variant, tmp_path):
    options = {"feature_map": "favor"} if variant in LINEAR else {}
    if variant in ("mgk", "smgk"):
        options = {"prior": "em", "variance": "em"}
    for cls in CLASSES:
        model = moved(cls(config(variant, **options)))
        folder = tmp_path / cls.__name__
        model.save_pretrained(folder)
        again = cls.from_pretrained(folder)
        assert again.state_dict().keys() == model.state_dict().keys()
        for name, weight in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], weight), name
        assert not again.training


@pytest.mark.parametrize(
    ("auto", "cls"),
    [
        (AutoModel, models.MgkModel),
        (AutoModelForSequenceClassification, models.MgkForSequenceClassification),
        (AutoModelForCausalLM, models.MgkForCausalLM),
        (AutoModelForImageClassification, models.MgkForImageClassification),
        (AutoModelForTokenClassification, models.MgkForTokenClassification),
        (AutoModelForMaskedLM, models.MgkForMaskedLM),
        (AutoModelForQuestionAnswering, models.MgkForQuestionAnswering),
    ],
)
def test_auto_classes(auto, cls, tmp_path):
    model = moved(cls(config("mlk")))
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), MgkConfig)
    again = auto.from_pretrained(tmp_path)
    assert type(again) is cls
    ids = tokens(2, 7)
    assert torch.equal(again(ids)[0], model(ids)[0])
    assert type(auto.from_config(config())) is cls


def test_shards(tmp_path):
    model = moved(models.MgkForCausalLM(config("mgk")))
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    again = models.MgkForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens(2, 7)).logits, model(tokens(2, 7)).logits)
    shards[1].unlink()
    with pytest.raises(OSError, match=shards[1].name):
        models.MgkForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_meta_device_initialisation_has_the_right_distribution(variant, tmp_path):
    """A checkpoint of the transformer alone, made into a classifier: what is new is drawn, what is there is kept."""
    options = {"feature_map": "favor"} if variant in LINEAR else {}
    base = moved(models.MgkModel(config(variant, **options, pooling="cls")))
    base.save_pretrained(tmp_path)
    torch.manual_seed(3)
    model = models.MgkForSequenceClassification.from_pretrained(tmp_path)
    for name, weight in base.state_dict().items():
        assert torch.equal(model.model.state_dict()[name], weight)
    bound = (6 / (16 + 20)) ** 0.5
    for weight, limit in (
        (model.classifier.dense.weight, bound),
        (model.classifier.out.weight, (6 / 23) ** 0.5),
    ):
        assert limit / 2 < weight.abs().max() <= limit
    assert not model.classifier.dense.bias.any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_starts_as_the_module_alone_does(variant):
    options = {"num_mixtures": 3, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
    if variant in ("mgk", "smgk"):
        options["variance"] = "learned"
    model = models.MgkModel(config(variant, **options))
    module = MixtureAttention(
        64, 4, head_dim=32, variant=variant, num_mixtures=3, variance=options.get("variance", "constant")
    )
    for layer in model.layers:
        for name, fresh in module.state_dict().items():
            mine = layer.attention.state_dict()[name]
            assert mine.shape == fresh.shape
            spread, expected = (x.std(correction=0).item() for x in (mine, fresh))
            assert spread == pytest.approx(expected, rel=0.1), name
            assert mine.mean().item() == pytest.approx(fresh.mean().item(), abs=0.15), name


def test_missing_weights_of_every_kind_are_drawn_as_at_the_start(tmp_path, monkeypatch):
    """Loading raises for them; below that check, transformers must have called our initialisation for each."""
    monkeypatch.setattr("mgk.models.modeling.check_weights", lambda *args: set())
    options = {"prior": "em", "variance": "em", "pooling": "cls"}
    variants = [("smgk", options), ("mgk", {"variance": "learned"}), ("mlk", {"feature_map": "favor"})]
    for number, (variant, changes) in enumerate(variants):
        folder = tmp_path / str(number)
        model = moved(models.MgkModel(config(variant, **changes)))
        model.save_pretrained(folder)
        change_weights(
            folder, lambda weights: [weights.pop(name) for name in list(weights) if "layers.0" in name]
        )
        change_weights(folder, lambda weights: weights.pop("embeddings.cls", None))
        again = models.MgkModel.from_pretrained(folder)
        fresh = models.MgkModel(config(variant, **changes)).state_dict()
        for name, weight in again.state_dict().items():
            if "layers.0" in name or name.endswith("cls"):
                assert weight.isfinite().all(), name
                assert weight.abs().max() <= 4 * fresh[name].abs().max().clamp_min(1e-30), name
                if fresh[name].unique().numel() == 1 and weight.numel() > 1:
                    assert torch.equal(weight, fresh[name]), name
            else:
                assert torch.equal(weight, model.state_dict()[name]), name
        if variant == "mlk":
            gram = again.layers[0].attention.feature_map.projection[:6]
            assert (gram @ gram.T - torch.diag((gram * gram).sum(1))).abs().max() < 1e-4
            assert not torch.equal(*(again.layers[i].attention.feature_map.projection for i in (0, 1)))


def test_half_precision_keeps_the_statistics_in_float32(tmp_path):
    model = moved(models.MgkModel(config("mgk", prior="em", variance="em")))
    model.save_pretrained(tmp_path)
    for half in (
        models.MgkModel.from_pretrained(tmp_path, dtype=torch.bfloat16),
        models.MgkModel.from_pretrained(tmp_path, dtype="float16"),
        models.MgkModel.from_pretrained(tmp_path).to(torch.bfloat16),
    ):
        assert half.norm.weight.dtype in (torch.bfloat16, torch.float16)
        attention = half.layers[0].attention
        assert attention.prior.pi.dtype == attention.variance.sigma2.dtype == torch.float32
        assert torch.equal(attention.prior.pi, model.layers[0].attention.prior.pi)
        out = half(tokens(2, 9)).last_hidden_state
        torch.testing.assert_close(out.float(), model(tokens(2, 9)).last_hidden_state, atol=0.1, rtol=0.1)


@pytest.mark.parametrize(
    "name", ["model.layers.1.attention.shifts", "model.embeddings.tokens.weight", "classifier.out.bias"]
)
def test_missing_weights_raise(saved, name):
    change_weights(saved, lambda weights: weights.pop(name))
    with pytest.raises(ValueError, match=rf"do not fit MgkForSequenceClassification .* missing are {name}"):
        models.MgkForSequenceClassification.from_pretrained(saved)


def test_weights_that_the_model_does_not_know_raise(saved):
    change_weights(saved, lambda weights: weights.update(surprise=torch.zeros(2)))
    with pytest.raises(ValueError, match="unexpected are surprise"):
        models.MgkForSequenceClassification.from_pretrained(saved)


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(VARIANTS, 2)))
def test_a_checkpoint_of_another_variant_raises(one, other, tmp_path):
    """Also where every weight has the same name and shape, as those of mlk and mgk, smlk and smgk have."""
    base = models.MgkModel(config(one, prior="uniform"))
    base.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "attention": other}))
    for load in (models.MgkForSequenceClassification, models.MgkModel, models.MgkForCausalLM):
        message = f"do not fit {load.__name__} with attention='{other}': they are of attention='{one}'"
        with pytest.raises(ValueError, match=message):
            load.from_pretrained(tmp_path)
    for load in (models.MgkModel, models.MgkForSequenceClassification):
        same = load(config(one, prior="uniform"))
        model = load(config(other, prior="uniform"))
        with pytest.raises(ValueError, match=f"do not fit attention='{other}': they are of attention='{one}'"):
            model.load_state_dict(same.state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_saved_without_a_mark_of_their_variant_load(variant, tmp_path):
    model = moved(models.MgkForSequenceClassification(config(variant)))
    model.save_pretrained(tmp_path)
    change_weights(tmp_path, lambda weights: weights.pop("model.attention_name"))
    for again in (
        models.MgkForSequenceClassification.from_pretrained(tmp_path),
        models.MgkForSequenceClassification.from_pretrained(tmp_path, dtype=torch.bfloat16),
        models.MgkForSequenceClassification(config(variant)),
    ):
        again.load_state_dict(load_file(tmp_path / WEIGHTS))
        assert torch.equal(again.model.attention_name, model.model.attention_name)
    again.save_pretrained(tmp_path)
    assert torch.equal(load_file(tmp_path / WEIGHTS)["model.attention_name"], model.model.attention_name)


def test_another_head_starts_anew_and_a_broken_one_raises(saved):
    for cls in (models.MgkModel, models.MgkForCausalLM):
        model = cls.from_pretrained(saved)
        assert torch.equal(
            model.base_model.layers[0].attention.shifts,
            load_file(saved / WEIGHTS)["model.layers.0.attention.shifts"],
        )
    # its head has the name, not the size
    with pytest.raises(
        RuntimeError, match=r"do not fit MgkForDocumentRetrieval .*ignore_mismatched_sizes=True"
    ):
        models.MgkForDocumentRetrieval.from_pretrained(saved)
    assert models.MgkForDocumentRetrieval.from_pretrained(saved, ignore_mismatched_sizes=True).num_labels == 3
    change_weights(saved, lambda weights: weights.pop("classifier.out.bias"))
    with pytest.raises(ValueError, match=r"missing are classifier\.out\.bias"):
        models.MgkForImageClassification.from_pretrained(saved)


def test_another_number_of_labels_raises_as_transformers_does(saved):
    message = (
        r"of another shape are classifier\.out\.bias \(3,\).*ignore_mismatched_sizes=True initialises them"
    )
    with pytest.raises(RuntimeError, match=message):
        models.MgkForSequenceClassification.from_pretrained(saved, num_labels=5)
    again = models.MgkForSequenceClassification.from_pretrained(
        saved, num_labels=5, ignore_mismatched_sizes=True
    )
    assert again(tokens(1, 4)).logits.shape == (1, 5)
    with pytest.raises(RuntimeError, match=r"of another shape are classifier\.dense") as error:
        models.MgkForSequenceClassification.from_pretrained(saved, hidden_size=32)
    assert "ignore_mismatched_sizes" not in str(error.value)  # it would start the transformer anew


def test_the_path_may_be_given_by_name(saved):
    for cls in (models.MgkForSequenceClassification, AutoModelForSequenceClassification):
        assert cls.from_pretrained(pretrained_model_name_or_path=saved).num_labels == 3


def test_corrupt_and_missing_files(saved, tmp_path):
    weights = saved / WEIGHTS
    whole = weights.read_bytes()
    for broken in (whole[:100], whole[:-50], b"", b"not weights at all" * 9):
        weights.write_bytes(broken)
        with pytest.raises(ValueError, match=r"the weights of .* are corrupt"):
            models.MgkForSequenceClassification.from_pretrained(saved)
    weights.unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        models.MgkForSequenceClassification.from_pretrained(saved)
    weights.write_bytes(whole)
    (saved / "config.json").write_text("{")
    with pytest.raises(OSError, match=r"config\.json.* is not a valid JSON file"):
        models.MgkForSequenceClassification.from_pretrained(saved)
    (saved / "config.json").unlink()
    for load in (models.MgkForSequenceClassification, MgkConfig):
        with pytest.raises(OSError, match=r"has no config\.json"):
            load.from_pretrained(saved)


def test_nothing_is_unpickled(saved):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was run",))

    (saved / WEIGHTS).unlink()
    (saved / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(OSError, match=r"model\.safetensors"):
        models.MgkForSequenceClassification.from_pretrained(saved)
    with pytest.raises(ValueError, match="use_safetensors must be True"):
        models.MgkForSequenceClassification.from_pretrained(saved, use_safetensors=False)


def test_loading_info_is_given_on_request(saved):
    model, info = models.MgkForSequenceClassification.from_pretrained(saved, output_loading_info=True)
    assert isinstance(model, models.MgkForSequenceClassification)
    assert not info["missing_keys"]


def test_the_card_says_what_is_known(tmp_path):
    model = models.MgkForCausalLM(config("smgk"))
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front == {
        "library_name": "mgk",
        "tags": ["mgk", "smgk", "transformers"],
        "pipeline_tag": "text-generation",
    }
    assert "Nothing is recorded: the weights may be untrained." in card
    assert "`AutoModelForCausalLM.from_pretrained(..., trust_remote_code=True)`" in card
    model.config.training = {"steps": 500_000, "task": "wikitext-103", "metrics": {"test perplexity": 33.2}}
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "| task | wikitext-103 |" in card
    assert "| steps | 500000 |" in card
    assert "| test perplexity | 33.2 |" in card
    assert "untrained" not in card
    again = models.MgkForCausalLM.from_pretrained(tmp_path)  # what is known goes along with the configuration
    assert again.config.training == model.config.training
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "README.md").read_text() == card


def test_tags_are_on_the_card_once(tmp_path):
    model = models.MgkModel(config("mgk"))
    model.add_model_tags(["mine", "transformers", "mine"])
    model.save_pretrained(tmp_path)
    front = yaml.safe_load((tmp_path / "README.md").read_text().split("---")[1])
    assert front["tags"] == ["mgk", "transformers", "mine"]


def test_what_cannot_be_loaded_is_not_saved(tmp_path):
    model = models.MgkForCausalLM(config())
    for name in ("eos_token_id", "pad_token_id"):
        setattr(model.config, name, 30)
        with pytest.raises(ValueError, match=f"{name} must be from 0 to 29"):
            model.save_pretrained(tmp_path)
        assert not list(tmp_path.iterdir())
        setattr(model.config, name, None)
    model.generation_config.eos_token_id = 29
    model.save_pretrained(tmp_path)
    assert models.MgkForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id == 29


PROGRAM = """
import sys, torch, transformers

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mgk":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

assert "mgk" not in sys.modules
sys.meta_path.insert(0, Blocker())
load = transformers.AutoModelForSequenceClassification.from_pretrained
try:
    load(sys.argv[1], trust_remote_code=True)
except ImportError as error:
    print(error)
sys.meta_path.pop(0)
model = load(sys.argv[1], trust_remote_code=True)
assert type(model).__module__ == "mgk.models.heads", type(model)
model.save_pretrained(sys.argv[2])
print(model(torch.tensor([[1, 2, 3]])).logits.tolist())
"""


def test_a_saved_folder_loads_where_mgk_models_was_not_imported(saved, tmp_path):
    again = tmp_path / "again"
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", PROGRAM, str(saved), str(again)]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    without, logits = out.stdout.splitlines()
    assert "pip install mgk" in without
    expected = models.MgkForSequenceClassification.from_pretrained(saved)(
        torch.tensor([[1, 2, 3]])
    ).logits.tolist()
    assert json.loads(logits) == expected
    # the folder holds imports, not copies of the source
    assert {path.name for path in again.iterdir()} == {path.name for path in saved.iterdir() if path.is_file()}
    code = (saved / "modeling_mgk.py").read_text()
    assert set(re.findall(r"^(?:import|from) (\S+)", code, re.MULTILINE)) == {"mgk.models"}


@pytest.mark.parametrize("asked", ["sdpa", "flash_attention_2", "flex_attention"])
def test_a_refused_attention_implementation_leaves_no_trace(saved, asked):
    for load in (
        lambda settings: AutoModel.from_config(settings, attn_implementation=asked),
        lambda settings: models.MgkModel.from_pretrained(saved, config=settings, attn_implementation=asked),
        lambda settings: AutoModelForCausalLM.from_config(settings, attn_implementation=asked),
    ):
        settings = config("smgk")
        with pytest.raises(ValueError, match=f"attn_implementation must be 'eager' or left out, got '{asked}'"):
            load(settings)
        assert models.MgkModel(settings)(tokens(1, 4)).last_hidden_state.shape == (1, 4, 16)
    assert models.MgkModel.from_pretrained(saved, attn_implementation="eager").config.attention == "smgk"


def test_a_card_of_ones_own_stays(tmp_path):
    (tmp_path / "README.md").write_text("# mine\n")
    models.MgkModel(config()).save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# mine\n"
    assert models.write_card(tmp_path, config(), {"task": "text"}) is None
    assert models.write_card(tmp_path / "..", config()) == tmp_path / ".." / "README.md"
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
