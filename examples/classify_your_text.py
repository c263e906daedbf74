"""Train a classifier on your own text file, one labelled example per line, and classify a new sentence.

    python examples/classify_your_text.py                                  # on a sample file, in seconds
    python examples/classify_your_text.py --file mine.tsv --out model --steps 2000 --text "I want my money back"

A line is ``label<TAB>text``; in a ``.csv`` file it is ``label,text``, quoted as by spreadsheets. Text is read as
bytes: any language works and there is no vocabulary to build.
"""

# %%
import argparse
import csv
import itertools
import random
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments, pipeline, set_seed
from transformers.utils import logging

from mgk.data import Collator, byte_tokenizer
from mgk.models import MgkConfig, MgkForSequenceClassification

parser = argparse.ArgumentParser(description="Train a classifier on your own text file.")
parser.add_argument("--file", type=Path, help="lines of label<TAB>text, or .csv; a sample if not given")
parser.add_argument("--out", type=Path, help="folder of the model; a temporary one if not given")
parser.add_argument("--text", default="could you wake me up at nine please", help="to classify at the end")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--length", type=int, default=512, help="bytes that the model reads of a text")
options = parser.parse_args()
set_seed(0)
logging.disable_progress_bar()
folder = options.out or Path(tempfile.mkdtemp(prefix="mgk-"))
folder.mkdir(parents=True, exist_ok=True)


# %% 1. The file; without one of yours, a sample of requests to a telephone.
def write_sample(path: Path) -> Path:
    """Write requests of three classes."""
    requests = {
        "alarm": ("wake me up", "set an alarm", "ring the bell"),
        "music": ("play some jazz", "put on a song", "turn the radio on"),
        "weather": ("will it rain", "is there snow", "how warm is it"),
    }
    starts = ("", "please ", "could you say: ", "hello, ", "now ")
    ends = ("", " today", " at nine", " tomorrow", " please", " for me", " in the city")
    frames = itertools.product(starts, ends)
    lines = (f"{kind}\t{a}{ask}{z}\n" for a, z in frames for kind, asks in requests.items() for ask in asks)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def read(path: Path) -> list[tuple[str, str]]:
    """Label and text of every line that is not empty."""
    found = []
    with path.open(encoding="utf-8", newline="") as file:
        dialect = {} if path.suffix == ".csv" else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
        rows = csv.reader(file, **dialect)  # type: ignore[arg-type]
        for row in filter(None, rows):
            if len(row) != 2 or not row[1]:
                sys.exit(f"{path}, line {rows.line_num}: expected a label and a text, got {row}")
            found.append((row[0], row[1]))
    return found


examples = read(options.file or write_sample(folder / "sample.tsv"))
random.shuffle(examples)
labels = sorted({label for label, _ in examples})
test, training = examples[: len(examples) // 5], examples[len(examples) // 5 :]
print(f"{len(training)} examples to train on, {len(test)} for the test: {', '.join(labels)}", flush=True)

# %% 2. The model: smgk with 2 heads where softmax would have 4. The names of the labels are saved with it.
tokenizer = byte_tokenizer(model_max_length=options.length)
config = MgkConfig(
    attention="smgk",
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=16,
    intermediate_size=128,
    max_position_embeddings=options.length,
    vocab_size=len(tokenizer),
    id2label=dict(enumerate(labels)),
    label2id={label: number for number, label in enumerate(labels)},
)
model = MgkForSequenceClassification(config)
print(
    f"{config.attention}, {config.num_attention_heads} heads: {model.num_parameters():,} parameters", flush=True
)


# %% 3. Training, by Hugging Face's Trainer.
def encode(label: str, text: str) -> dict[str, Tensor]:
    """One example as the model takes it; the collator pads a batch."""
    ids = tokenizer(text, truncation=True)["input_ids"]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels.index(label))}


arguments = TrainingArguments(
    str(folder / "trainer"),
    max_steps=options.steps,
    per_device_train_batch_size=16,
    learning_rate=2e-3,
    warmup_steps=0.1,  # of the steps
    logging_steps=max(1, options.steps // 5),
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    dataloader_pin_memory=torch.accelerator.is_available(),
)
data = [encode(*example) for example in training]
Trainer(model, arguments, train_dataset=data, data_collator=Collator(tokenizer.pad_token_id)).train()

# %% 4. The folder has all that is needed later: weights, label names, tokenizer and model card.
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
print(f"saved: {folder}")

classify = pipeline("text-classification", model=str(folder), truncation=True)
answers = classify([text for _, text in test])
right = sum(answer["label"] == label for answer, (label, _) in zip(answers, test, strict=True))
print(f"test accuracy: {right} of {len(test)}")
(answer,) = classify([options.text])
print(f"{options.text!r} is {answer['label']} (probability {answer['score']:.0%})")
