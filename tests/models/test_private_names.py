"""Private names of torch and transformers: all that are relied on are listed, are still there and still work."""

import ast
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

import mgk
import mgk.models
import mgk.nn
from mgk._util.private_names import LOAD_REPORT, PRIVATE_ATTRIBUTES, PRIVATE_NAMES
from mgk.models import MgkForCausalLM, MgkForSequenceClassification, MgkModel, MgkPreTrainedModel

OWNERS = {
    "torch.nn.Module": torch.nn.Module,
    "transformers.PreTrainedModel": transformers.PreTrainedModel,
    "transformers.GenerationMixin": transformers.GenerationMixin,
}
PACKAGE = Path(mgk.__file__).parent
# Of named tuples, of ctypes and of the standard library: documented.
PUBLIC = {"_asdict", "_exit", "_fields", "_fields_", "_make", "_replace"}


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


OBJECTS = {
    "torch._C": torch._C,
    "torch._C._functorch": torch._C._functorch,
    "torch.autograd.forward_ad": torch.autograd.forward_ad,
    "torch.nn.Module": torch.nn.Linear(1, 1),
    "torch.nn.MultiheadAttention": torch.nn.MultiheadAttention(4, 1),
    "torch.ops.aten": torch.ops.aten,
    "transformers.PreTrainedConfig": config(),
}


@pytest.mark.parametrize("name", PRIVATE_ATTRIBUTES)
def test_each_attribute_is_there(name):
    owner, _, attribute = name.rpartition(".")
    assert hasattr(OBJECTS[owner], attribute)


def test_no_other_private_name_is_used():
    """By every attribute and import of the package with a leading underscore that it does not define itself."""
    used, own = set(), set(PUBLIC)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    own.add(name)
                case ast.FunctionDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                    own.add(name)
                case ast.Attribute(attr=name):
                    used.add(name)
                case ast.ImportFrom(module=str(module), names=names) if not module.startswith("mgk"):
                    used |= {*module.split("."), *(alias.name for alias in names)}
    listed = {part for name in (*PRIVATE_NAMES, *PRIVATE_ATTRIBUTES) for part in name.split(".")}
    private = {name for name in used if re.match("_[A-Za-z]", name)}
    assert private - own - listed == set()
    assert {name.rpartition(".")[2] for name in PRIVATE_ATTRIBUTES} <= used | own  # none is left over
    assert "__class__" not in used


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
