"""torch.compile without graph breaks, and torch.export for a dynamic batch and length."""

import pytest
import torch
from tiny_models import LINEAR, VARIANTS, config, moved, tokens
from torch.export import Dim

from mgk.models import MgkForCausalLM, MgkForSequenceClassification


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_forward_and_gradients(variant):
    model = moved(MgkForSequenceClassification(config(variant, position="rotary")))
    ids, mask = tokens(2, 7), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    labels = torch.tensor([0, 2])
    expected = model(ids, attention_mask=mask, labels=labels)
    gradients = torch.autograd.grad(expected.loss, [p for p in model.parameters() if p.requires_grad])
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = compiled(ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(out.logits, expected.logits)
    again = torch.autograd.grad(out.loss, [p for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(again, gradients)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_compiled_decoder(variant):
    model, ids = moved(MgkForCausalLM(config(variant))), tokens(2, 7)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    options = {"labels": ids, "use_cache": False, "output_attentions": True, "output_hidden_states": True}
    expected, out = model(ids, **options), compiled(ids, **options)
    for name in ("loss", "logits", "hidden_states", "attentions"):
        torch.testing.assert_close(out[name], expected[name])


@pytest.mark.parametrize("variant", ["smgk", "mlk"])
@torch.no_grad()
def test_compiled_decoder_with_a_cache(variant):
    model, ids = moved(MgkForCausalLM(config(variant, num_hidden_layers=1))), tokens(2, 4)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    cache = compiled(ids[:, :3], use_cache=True).past_key_values
    out = compiled(ids[:, 3:], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(out.logits, model(ids).logits[:, -1:])


@pytest.mark.parametrize("variant", VARIANTS)
def test_exported_classifier(variant, tmp_path):
    backend = "auto" if variant in LINEAR else "sdpa"
    model = moved(MgkForSequenceClassification(config(variant, backend=backend)))
    batch, length = Dim("batch", max=64), Dim("length", max=48)
    program = torch.export.export(
        model,
        (),
        {"input_ids": tokens(2, 9), "attention_mask": torch.ones(2, 9, dtype=torch.long)},
        dynamic_shapes={name: {0: batch, 1: length} for name in ("input_ids", "attention_mask")},
    )
    torch.export.save(program, tmp_path / "classifier.pt2")
    loaded = torch.export.load(tmp_path / "classifier.pt2").module()
    for shape in ((1, 5), (5, 33)):
        ids = tokens(*shape)
        mask = (torch.arange(shape[1]) < shape[1] - torch.arange(shape[0])[:, None]).long()
        out = loaded(input_ids=ids, attention_mask=mask)
        expected = model(input_ids=ids, attention_mask=mask).logits
        torch.testing.assert_close(out["logits"], expected)
