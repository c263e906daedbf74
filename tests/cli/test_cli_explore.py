"""``mgk explore`` on runs and on folders of every kind of model."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPConfig,
    CLIPModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)
from typer.testing import CliRunner

from mgk.analysis.explorer_inputs import token_text
from mgk.cli.app import app
from mgk.data.tokenizers import byte_tokenizer
from mgk.models import MgkConfig, MgkForCausalLM, MgkForDocumentRetrieval, MgkForImageClassification
from mgk.training import train
from training.training_cases import tiny


def explore(*arguments):
    return CliRunner().invoke(app, ["explore", *map(str, arguments)])


def models_of(page):
    return json.loads(re.search(r'id="explorer-data">(.*?)</script>', page.read_text(), re.DOTALL)[1])["models"]


def config(**options):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return MgkConfig(**sizes, **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved models: a language model of bytes, one of pairs, and a BERT of words."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    MgkForCausalLM(config(attention="smgk", vocab_size=256)).save_pretrained(folder / "bytes")
    byte_tokenizer(shift=0).save_pretrained(folder / "bytes")
    MgkForDocumentRetrieval(config(attention="mgk", vocab_size=257)).save_pretrained(folder / "pairs")
    byte_tokenizer().save_pretrained(folder / "pairs")
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "three": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    BertForSequenceClassification(BertConfig(**sizes, vocab_size=4, num_labels=3)).save_pretrained(
        folder / "bert"
    )
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder / "bert")
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs of synthetic tasks."""
    folder = tmp_path_factory.mktemp("runs")
    patch = pytest.MonkeyPatch()
    patch.setenv("MGK_DATA", str(folder / "data"))
    for task in ("listops", "image", "wikitext-2", "retrieval"):
        train(tiny(task, training__max_steps=1, data__test_examples=5), folder / task)
    yield folder
    patch.undo()


def test_a_folder_and_another_on_the_same_text(folders, tmp_path):
    out = tmp_path / "page.html"
    done = explore(folders / "bytes", "--text", "Grüße", "--compare", folders / "bert", "--out", out)
    assert done.exit_code == 0, done.output
    first, second = models_of(out)
    assert first["tokens"] == ["G", "r", "\\xc3", "\\xbc", "\\xc3", "\\x9f", "e"]
    assert (first["prediction"]["kind"], first["layers"][0]["components"]) == ("next", 2)
    assert second["tokens"] == ["[UNK]"]
    assert second["prediction"]["candidates"][0][0][0].startswith("LABEL_")
    assert "bytes: smgk: 1 layer, 2 heads, 2 components a key" in done.output
    assert f"page: {out} (0." in done.output


def test_bytes_are_named_whatever_was_imported_before(monkeypatch):
    """transformers has a module and a function of one name."""
    monkeypatch.setattr(transformers, "convert_slow_tokenizer", lambda tokenizer: tokenizer)
    assert token_text(byte_tokenizer(shift=0), 0xC3) == "\\xc3"


def test_a_long_text_is_cut_and_says_so(folders, tmp_path):
    out = tmp_path / "page.html"
    assert explore(folders / "bytes", "--max-tokens", 20, "--out", out).exit_code == 0
    assert len(models_of(out)[0]["tokens"]) == 20
    assert "The first 20 of 98 tokens." in out.read_text()


def test_a_pair_takes_two_texts(folders, tmp_path):
    out = tmp_path / "page.html"
    done = explore(folders / "pairs", "--text", "one", "--text", "another", "--out", out)
    assert done.exit_code == 0, done.output
    assert models_of(out)[0]["tokens"] == ["o", "n", "e"]
    assert "the prediction is of both" in out.read_text()
    done = explore(folders / "pairs", "--text", "one", "--out", out)
    assert done.exit_code == 2
    assert "the model reads 2 texts, got 1: give --text ... --text ..." in done.output


@pytest.mark.parametrize(
    ("task", "kind"), [("listops", "label"), ("wikitext-2", "next"), ("retrieval", "label")]
)
def test_a_run_shows_an_example_of_its_test_split(runs, tmp_path, task, kind):
    out = tmp_path / "page.html"
    done = explore(runs / task, "--example", 2, "--out", out)
    assert done.exit_code == 0, done.output
    (model,) = models_of(out)
    assert model["prediction"]["kind"] == kind
    assert 1 < len(model["tokens"]) <= 256
    if task == "listops":
        assert model["tokens"][0].startswith("[")
    assert explore(runs / task, "--out", out).exit_code == 0


def test_an_image_is_shown_in_pixels(runs, tmp_path):
    out = tmp_path / "page.html"
    done = explore(runs / "image", "--out", out, "--compare", runs / "image")
    assert done.exit_code == 0, done.output
    model, _ = models_of(out)
    assert model["image"]["width"] == 32
    assert len(model["image"]["colours"]) == len(model["tokens"])


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """Red on the left, dark on the right, twice as wide as high."""
    path = tmp_path_factory.mktemp("picture") / "picture.png"
    values = np.zeros((8, 16, 3), dtype=np.uint8)
    values[:, :8, 0] = 255
    Image.fromarray(values).save(path)
    return path


def test_a_picture_for_a_vision_transformer(picture, tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    config = ViTConfig(**sizes, image_size=8, patch_size=2, num_labels=3)
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path / "vit")
    done = explore(tmp_path / "vit", "--image", picture, "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    (model,) = models_of(tmp_path / "page.html")
    assert (model["tokens"][:2], model["tokens"][-1]) == (["[cls]", "1,1"], "4,4")
    assert model["image"]["width"] == 4
    assert (model["image"]["colours"][0], model["image"]["colours"][3]) == ("#ff0000", "#000000")
    assert model["prediction"]["kind"] == "label"
    done = explore(tmp_path / "vit", "--out", tmp_path / "other.html")
    assert done.exit_code == 2
    assert "the model reads images, got text: give --image FILE" in done.output


@pytest.mark.parametrize("options", [{}, {"patch_size": 2}, {"patch_size": 2, "num_channels": 1}])
def test_a_picture_for_an_image_model_of_ours(picture, tmp_path, options):
    own = config(attention="mgk", vocab_size=256, image_size=8, max_position_embeddings=64, **options)
    MgkForImageClassification(own).save_pretrained(tmp_path / "ours")
    done = explore(tmp_path / "ours", "--image", picture, "--out", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    (model,) = models_of(tmp_path / "page.html")
    is_grey = options != {"patch_size": 2}
    assert model["image"]["colours"][0] == ("#4c4c4c" if is_grey else "#ff0000")  # the luminance of red
    assert model["image"]["width"] == (4 if options else 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{empty}"], "there is neither a run (recipe.yaml) nor a saved model (config.json)"),
        (["{runs}/listops", "--example", "6"], "--example must be from 1 to 5, got 6"),
        (["{runs}/listops", "--text", "what is this"], "the tokenizer does not know this text"),
        (["{folders}/bytes", "--example", "1"], "--example is one of a run's test split"),
        (["{folders}/bytes", "--text", ""], "the text has no token: give another --text"),
        (["{runs}/image", "--compare", "{folders}/pairs"], "pairs: the model reads text, got an image"),
        (["{runs}/image", "--text", "a"], "image: the model reads images, got text"),
        (["{folders}/bert", "--image", __file__], "the picture cannot be read: cannot identify image file"),
        (["{folders}/bert", "--image", __file__, "--text", "a"], "--image stands alone"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_sentence(runs, folders, tmp_path, arguments, message):
    places = {"runs": runs, "folders": folders, "empty": tmp_path}
    done = explore(*(argument.format(**places) for argument in arguments), "--out", tmp_path / "page.html")
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert not (tmp_path / "page.html").exists()


def test_a_model_that_needs_more_than_a_text_is_refused(tmp_path):
    part = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sizes = CLIPConfig(text_config={**part, "vocab_size": 257}, vision_config=part, projection_dim=8)
    CLIPModel(sizes).save_pretrained(tmp_path / "clip")
    byte_tokenizer().save_pretrained(tmp_path / "clip")
    done = explore(tmp_path / "clip", "--text", "a", "--out", tmp_path / "page.html")
    assert done.exit_code == 2, done.output
    assert "clip: the model cannot read this: " in done.output


def test_pickled_weights_are_not_read(folders, tmp_path):
    shutil.copytree(folders / "bert", tmp_path / "bert")
    weights = tmp_path / "bert" / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "bert" / "pytorch_model.bin")
    weights.unlink()
    done = explore(tmp_path / "bert", "--text", "one", "--out", tmp_path / "page.html")
    assert done.exit_code == 2, done.output
    assert "the model cannot be loaded" in done.output
    assert "model.safetensors" in done.output


def test_a_model_without_a_tokenizer_or_class_is_named(folders, tmp_path):
    MgkForCausalLM(config(attention="mlk", vocab_size=256)).save_pretrained(tmp_path / "bare")
    done = explore(tmp_path / "bare", "--out", tmp_path / "page.html")
    assert done.exit_code == 2
    assert "bare: the tokenizer cannot be loaded" in done.output
    path = tmp_path / "bare" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["NoSuchModel"]}))
    done = explore(tmp_path / "bare", "--out", tmp_path / "page.html")
    assert "neither mgk nor transformers has a class NoSuchModel" in done.output
