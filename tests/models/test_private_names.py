"""Private names of torch and transformers: all that are relied on are listed, are still there and still work."""

import importlib
import inspect
import logging
import pkgutil
import re
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import config

import mgk.models
import mgk.nn
from mgk.models import MgkForCausalLM, MgkForSequenceClassification, MgkModel, MgkPreTrainedModel, private_names
from mgk.models.private_names import LOAD_REPORT, PRIVATE_ATTRIBUTES, PRIVATE_NAMES

OWNERS = {
    "torch.nn.Module": torch.nn.Module,
    "transformers.PreTrainedModel": transformers.PreTrainedModel,
    "transformers.GenerationMixin": transformers.GenerationMixin,
}
PRIVATE = re.compile(r"(torch|transformers)(\.\w+)*\._[a-z]\w*|from (torch|transformers)[\w.]*\._\w+|__class__")


def our_modules():
    for package in (mgk.nn, mgk.models):
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(info.name)


def test_every_private_name_that_is_overridden_is_listed():
    found = set()
    for module in our_modules():
        for _, cls in inspect.getmembers(module, inspect.isclass):
            for name in vars(cls) if cls.__module__ == module.__name__ else ():
                if name == "is_custom_code" or re.match("_[a-z]", name):
                    bases = (
                        owner for owner, base in OWNERS.items() if issubclass(cls, base) and hasattr(base, name)
                    )
                    found |= {f"{owner}.{name}" for owner in bases}
    # every model is an nn.Module too
    assert found == set(PRIVATE_NAMES)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_each_is_where_it_was(name):
    owner, _, attribute = name.rpartition(".")
    assert hasattr(OWNERS[owner], attribute)


def test_each_attribute_is_there():
    owners = {
        "torch.nn.MultiheadAttention": torch.nn.MultiheadAttention(4, 1),
        "transformers.PreTrainedConfig": config(),
    }
    for name in PRIVATE_ATTRIBUTES:
        owner, _, attribute = name.rpartition(".")
        assert hasattr(owners[owner], attribute)


def test_no_other_private_name_is_used():
    for module in our_modules():
        if module is not private_names:
            assert not PRIVATE.search(Path(module.__file__).read_text()), module.__name__


def test_accelerate_reads_which_modules_stay_whole_and_which_arguments_stay_where_they_are():
    source = inspect.getsource(importlib.import_module("transformers.integrations.accelerate"))
    model = MgkForCausalLM(config())
    for name, value in (("_no_split_modules", "MgkLayer"), ("_skip_keys_device_placement", "past_key_values")):
        assert f"model.{name}" in source
        assert set(getattr(model, name)) == {value}


def test_the_report_of_missing_weights_is_hidden_and_replaced(tmp_path, monkeypatch, caplog):
    MgkModel(config()).save_pretrained(tmp_path)
    for name in ("transformers", LOAD_REPORT[0]):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    MgkForSequenceClassification.from_pretrained(tmp_path)
    assert "classifier.dense.bias" in caplog.text
    assert "train them before use" in caplog.text
    assert LOAD_REPORT[1] not in caplog.text
    monkeypatch.setattr("mgk.models.modeling.LOAD_REPORT", (LOAD_REPORT[0], "no such text"))
    MgkForSequenceClassification.from_pretrained(tmp_path)
    assert LOAD_REPORT[1] in caplog.text


def test_as_custom_code_the_keys_would_start_smaller_than_the_queries(monkeypatch):
    def ratio():
        attention = MgkModel(config("mgk", hidden_size=64, num_mixtures=8)).layers[0].attention
        return (attention.k_proj.weight.std() / attention.q_proj.weight.std()).item()

    assert ratio() == pytest.approx(1, rel=0.05)
    monkeypatch.delattr(MgkPreTrainedModel, "is_custom_code")
    assert ratio() < 0.9
