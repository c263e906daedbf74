"""Libraries that people put around a model: each test runs where its library is installed, and says so where not."""

import copy
import math
from pathlib import Path

import pytest
import torch
from tiny_models import GROWING, VARIANTS, config, moved, tokens

from mgk.data import byte_tokenizer
from mgk.models import MgkForCausalLM, MgkForSequenceClassification, MgkModel

SIZES = {"max_position_embeddings": 128, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def saved_language_model(folder: Path, variant: str) -> str:
    moved(MgkForCausalLM(config(variant, vocab_size=256, **SIZES))).save_pretrained(folder)
    byte_tokenizer(shift=0).save_pretrained(folder)
    return str(folder)


def trainer_options(folder: Path) -> dict:
    return {
        "output_dir": str(folder / "out"),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "max_length": 32,
        "disable_tqdm": True,
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_trl_fine_tunes_a_folder(variant, tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    model = saved_language_model(tmp_path / "model", variant)
    data = datasets.Dataset.from_dict({"text": ["hello world"] * 8})
    trainer = trl.SFTTrainer(model=model, args=trl.SFTConfig(**trainer_options(tmp_path)), train_dataset=data)
    assert isinstance(trainer.model, MgkForCausalLM)
    assert math.isfinite(trainer.train().training_loss)


@pytest.mark.parametrize("variant", VARIANTS)
def test_trl_optimises_preferences(variant, tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    model = saved_language_model(tmp_path / "model", variant)
    data = datasets.Dataset.from_dict({"prompt": ["hi "] * 8, "chosen": ["good"] * 8, "rejected": ["bad"] * 8})
    trainer = trl.DPOTrainer(model=model, args=trl.DPOConfig(**trainer_options(tmp_path)), train_dataset=data)
    # an untrained pair of equal models prefers neither
    assert trainer.train().training_loss == pytest.approx(math.log(2), abs=0.1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["lora", "prompt", "prefix"])
def test_peft(variant, kind):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    if kind == "prefix" and variant not in GROWING:
        pytest.skip("a prefix of keys and values has no place in a linear state")
    sizes = {"num_layers": 2, "num_attention_heads": 2, "token_dim": 12}
    settings = {
        "lora": lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]),
        "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, **sizes),
    }[kind]()
    base = moved(MgkForCausalLM(config(variant)))
    model, ids = peft.get_peft_model(copy.deepcopy(base), settings), tokens(2, 6)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.eval()
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    assert model.generate(input_ids=ids, **options).shape == (2, 10)


def test_peft_classifier():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    settings = peft.LoraConfig(
        task_type="SEQ_CLS", target_modules=["q_proj", "k_proj"], modules_to_save=["classifier"]
    )
    model = peft.get_peft_model(MgkForSequenceClassification(config()), settings)
    model(input_ids=tokens(2, 6), labels=torch.tensor([0, 1])).loss.backward()


def test_sentence_transformers(tmp_path):
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    base = moved(MgkModel(config("smgk", vocab_size=257, **SIZES)))
    base.save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    model = library.SentenceTransformer(str(tmp_path), trust_remote_code=True, device="cpu")
    texts = ["a film to remember", "dull"]
    found = torch.as_tensor(model.encode(texts))
    for text, vector in zip(texts, found, strict=True):
        expected = base(**tokenizer(text, return_tensors="pt")).last_hidden_state.mean(1)[0]
        torch.testing.assert_close(vector, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_lm_eval(variant, tmp_path):
    library = pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    assert library
    model = HFLM(
        pretrained=saved_language_model(tmp_path, variant), trust_remote_code=True, device="cpu", batch_size=2
    )
    kind = "loglikelihood"
    asked = [("", "world"), ("hello", " world")]
    found = model.loglikelihood([Instance(kind, {}, pair, number) for number, pair in enumerate(asked)])
    language = MgkForCausalLM.from_pretrained(tmp_path)
    for (context, text), (value, _) in zip(asked, found, strict=True):
        ids = torch.tensor([[*(context.encode() or b"\0"), *text.encode()]])
        start = len(context.encode() or b"\0") - 1
        logits = language(ids).logits.log_softmax(-1)[0, start:-1]
        expected = logits.gather(-1, ids[0, start + 1 :, None]).sum().item()
        assert value == pytest.approx(expected, rel=1e-3)
    until = Instance("generate_until", {}, ("hello", {"until": ["\n"], "max_gen_toks": 5}), 0)
    assert isinstance(model.generate_until([until])[0], str)
