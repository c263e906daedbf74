"""torch.compile without graph breaks, and torch.export for a dynamic batch and length."""

import pytest
import torch
from tiny_models import VARIANTS, config, moved, tokens
from torch.export import Dim

from mgk import models
from support.versions import needs_fullgraph

pytestmark = needs_fullgraph


@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_forward_and_gradients(variant):
    model = moved(models.MgkForSequenceClassification(config(variant, position="rotary")))
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
    model, ids = moved(models.MgkForCausalLM(config(variant))), tokens(2, 7)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    options = {"labels": ids, "use_cache": False, "output_attentions": True, "output_hidden_states": True}
    expected, out = model(ids, **options), compiled(ids, **options)
    for name in ("loss", "logits", "hidden_states", "attentions"):
        torch.testing.assert_close(out[name], expected[name])


@pytest.mark.parametrize("variant", ["smgk", "mlk"])
@torch.no_grad()
def test_compiled_decoder_with_a_cache(variant):
    model, ids = moved(models.MgkForCausalLM(config(variant, num_hidden_layers=1))), tokens(2, 4)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    cache = compiled(ids[:, :3], use_cache=True).past_key_values
    out = compiled(ids[:, 3:], past_key_values=cache, use_cache=True)
    torch.testing.assert_close(out.logits, model(ids).logits[:, -1:])


HEADS = (
    *(
        models.MgkModel,
        models.MgkForSequenceClassification,
        models.MgkForTokenClassification,
        models.MgkForMaskedLM,
    ),
    *(models.MgkForQuestionAnswering, models.MgkForCausalLM),
)
LONG = 512  # beyond every length at which the backends change
DYNAMIC = {0: Dim("batch", max=64), 1: Dim("length", max=LONG)}
EXPORTS = [
    (cls, variant) for variant in VARIANTS for cls in HEADS if variant == "mgk" or cls in (HEADS[1], HEADS[-1])
]


def export_case(cls, variant):
    """A model without a cache, an example, and batches of other sizes."""
    model = moved(cls(config(variant, num_hidden_layers=1, max_position_embeddings=LONG, use_cache=False)))
    example = {"input_ids": tokens(2, 9), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    batches = []
    for rows, length in ((1, 5), (5, 33), (2, 300)):
        mask = (torch.arange(length) < length - torch.arange(rows)[:, None]).long()
        batches.append({"input_ids": tokens(rows, length), "attention_mask": mask})
    return model, example, batches


@pytest.mark.parametrize(("cls", "variant"), EXPORTS)
@torch.no_grad()
def test_exported_with_a_dynamic_batch_and_length(cls, variant, tmp_path):
    model, example, batches = export_case(cls, variant)
    program = torch.export.export(model, (), example, dynamic_shapes=dict.fromkeys(example, DYNAMIC))
    if variant == "mgk":
        torch.export.save(program, tmp_path / "model.pt2")
        program = torch.export.load(tmp_path / "model.pt2")
    for batch in batches:
        out, expected = program.module()(**batch), model(**batch)
        for name, value in expected.items():
            torch.testing.assert_close(out[name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("cls", "variant"), [(cls, v) for cls, v in EXPORTS if cls in (HEADS[1], HEADS[-1])])
@torch.no_grad()
def test_onnx_with_a_dynamic_batch_and_length(cls, variant, tmp_path):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    import onnxruntime

    model, example, batches = export_case(cls, variant)
    shapes = dict.fromkeys(example, DYNAMIC)
    program = torch.onnx.export(model, (), kwargs=example, dynamo=True, dynamic_shapes=shapes, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for batch in batches:
        (logits,) = session.run(None, {name: value.numpy() for name, value in batch.items()})
        torch.testing.assert_close(torch.as_tensor(logits), model(**batch).logits, atol=1e-4, rtol=1e-3)
