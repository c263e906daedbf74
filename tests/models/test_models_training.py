"""transformers' own ``Trainer`` and pipelines with every head and variant."""

import math

import pytest
import torch
from tiny_models import VARIANTS, config, moved, tokens
from torch.func import functional_call, grad, vmap
from transformers import Trainer, TrainingArguments, pipeline

from mgk.data import Collator, SegmentDataset, byte_tokenizer
from mgk.models import (
    MgkForCausalLM,
    MgkForDocumentRetrieval,
    MgkForImageClassification,
    MgkForSequenceClassification,
    MStepCallback,
)

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def examples(cls):
    """Eight examples: the label is whether the first token is large, matched by the second document's."""
    if cls is MgkForCausalLM:
        return SegmentDataset((torch.arange(65) % 5 + 1).numpy(), 8)
    data = []
    for number in range(8):
        label = number % 2
        ids = tokens(5 + number % 3, seed=number) % 5 + (20 if label else 1)
        example = {"input_ids": ids, "labels": torch.tensor(label)}
        if cls is MgkForDocumentRetrieval:
            example["input_ids_2"] = tokens(6, seed=number) % 5 + 1
        if cls is MgkForImageClassification:
            generator = torch.Generator().manual_seed(number)
            example = {
                "pixel_values": torch.rand(3, 8, 8, generator=generator) + label,
                "labels": example["labels"],
            }
        data.append(example)
    return data


def train(model, data, folder, callbacks=None, **arguments):
    settings = {
        "output_dir": str(folder),
        "max_steps": 16,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.02,
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_steps": 1,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }
    trainer = Trainer(
        model,
        TrainingArguments(**{**settings, **arguments}),
        train_dataset=data,
        eval_dataset=data,
        data_collator=Collator(pad_id=None if isinstance(model, MgkForCausalLM) else 0),
        callbacks=callbacks,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "cls", [MgkForSequenceClassification, MgkForDocumentRetrieval, MgkForImageClassification, MgkForCausalLM]
)
def test_trainer_fits_a_tiny_data_set(variant, cls, tmp_path):
    options = {"image_size": 8, "patch_size": 4} if cls is MgkForImageClassification else {}
    model = cls(config(variant, num_labels=2, **options, **NO_DROPOUT))
    data = examples(cls)
    trainer = train(model, data, tmp_path)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.evaluate()["eval_loss"] < losses[0] / 2


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (MgkForSequenceClassification, {}),
        (MgkForCausalLM, {}),
        (MgkForCausalLM, {"adaptive_cutoffs": [6, 15], "adaptive_div_value": 2.0}),
    ],
)
def test_gradient_accumulation_is_one_larger_batch(cls, options, tmp_path):
    found = []
    for batch, steps in ((6, 1), (2, 3)):
        torch.manual_seed(0)
        model = cls(config("smgk", num_labels=2, **options, **NO_DROPOUT))
        trainer = train(
            model,
            examples(cls),
            tmp_path,
            max_steps=3,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            optim="sgd",
            learning_rate=0.1,
        )
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((losses, model.state_dict()))
    (losses, state), (losses_again, state_again) = found
    assert losses == pytest.approx(losses_again, rel=1e-4)
    for name, weight in state.items():
        torch.testing.assert_close(state_again[name], weight, atol=1e-5, rtol=1e-4, msg=name)


def test_plain_labels_with_the_default_arguments(tmp_path):
    """A data set of transformers' kind, which knows no shift_labels, has an evaluation loss."""
    model = MgkForCausalLM(config("mlk", **NO_DROPOUT))
    data = [{"input_ids": row, "labels": row, "other": torch.tensor(1)} for row in tokens(8, 6)]
    trainer = train(model, data, tmp_path, remove_unused_columns=True, max_steps=1)
    assert math.isfinite(trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize("variant", VARIANTS)
def test_pipelines(variant, tmp_path):
    tokenizer = byte_tokenizer(model_max_length=48)
    sizes = {"vocab_size": 257, "pad_token_id": 0}
    for cls in (MgkForSequenceClassification, MgkForCausalLM):
        folder = tmp_path / cls.__name__
        moved(cls(config(variant, **sizes))).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    texts = ["a film to remember", "dull"]
    classify = pipeline(
        "text-classification", model=str(tmp_path / "MgkForSequenceClassification"), device="cpu"
    )
    model = MgkForSequenceClassification.from_pretrained(tmp_path / "MgkForSequenceClassification")
    for text, found, batched in zip(texts, classify(texts), classify(texts, batch_size=2), strict=True):
        scores = model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0]
        assert found["label"] == batched["label"] == f"LABEL_{scores.argmax()}"
        assert (
            found["score"]
            == pytest.approx(batched["score"], rel=1e-4)
            == pytest.approx(scores.max().item(), rel=1e-4)
        )
    generate = pipeline("text-generation", model=str(tmp_path / "MgkForCausalLM"), device="cpu")
    out = generate(texts, max_new_tokens=4, do_sample=False)
    assert all(found[0]["generated_text"].startswith(text) for text, found in zip(texts, out, strict=True))


@pytest.mark.parametrize("steps", [1, 2])
def test_the_callback_runs_the_m_step_once_per_optimizer_step(steps, tmp_path):
    data = examples(MgkForSequenceClassification)
    model = MgkForSequenceClassification(config("mgk", prior="em", variance="em", num_labels=2, **NO_DROPOUT))
    calls = []
    original = type(model.model.layers[0].attention.prior).m_step
    model.model.layers[0].attention.prior.m_step = lambda: (
        calls.append(1),
        original(model.model.layers[0].attention.prior),
    )
    train(model, data, tmp_path, max_steps=3, gradient_accumulation_steps=steps, callbacks=[MStepCallback()])
    assert len(calls) == 3
    assert (model.model.layers[0].attention.prior.pi != 0.5).any()
    assert not model.model.layers[0].attention.prior.counts.any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cls", [MgkForCausalLM, MgkForSequenceClassification])
def test_gradients_of_every_example_by_torch_func(cls, variant):
    """vmap(grad) of the loss, with labels, masks and positions that are mapped over."""
    model, ids = moved(cls(config(variant))), tokens(3, 9)
    labels = ids if cls is MgkForCausalLM else ids[:, 0] % 3
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    parameters = {name: x.detach() for name, x in model.named_parameters()}

    def loss(parameters, ids, labels, **options):
        options = {name: x[None] for name, x in options.items()}
        return functional_call(model, parameters, (ids[None],), {"labels": labels[None], **options}).loss

    for name, x in {"attention_mask": mask, "position_ids": torch.arange(9).repeat(3, 1)}.items():
        if name == "position_ids" and cls is MgkForSequenceClassification:
            continue  # the number of packed sequences depends on values
        each = vmap(lambda i, t, x, name=name: grad(loss)(parameters, i, t, **{name: x}))(ids, labels, x)
        for row in range(3):
            expected = grad(loss)(parameters, ids[row], labels[row], **{name: x[row]})
            for key, gradient in expected.items():
                torch.testing.assert_close(each[key][row], gradient, atol=1e-5, rtol=1e-4, msg=key)
