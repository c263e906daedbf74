"""Optimizer steps of mixtures and baselines; the training loop."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mgk.bench import timing
from mgk.bench.calls import unfused_attention
from mgk.bench.registry import TASK_LENGTHS, TrainSettings
from mgk.bench.runner import OnStep, Outcome, Row
from mgk.bench.timing import Steps, Work
from mgk.data.batches import StepBatches
from mgk.data.listops import Shape, generate_block
from mgk.models import MgkConfig, MgkForSequenceClassification
from mgk.nn import MixtureAttention
from mgk.training import train
from mgk.training.recipe import load_recipe
from mgk.training.tasks import make_model, open_data

UNFUSED = "unfused"
_VOCAB = {"listops": 17, "text": 257}
_LABELS = {"listops": 10, "text": 2}
_LISTOPS = Shape(min_length=500, max_length=2000, max_depth=10, max_args=10)
# Bytes of the 50,000 IMDb reviews: the shortest, then every 5% up to the longest.
_IMDB_QUANTILES = (
    *(32, 349, 502, 621, 662, 699, 739, 784, 838, 900, 971),
    *(1051, 1148, 1263, 1406, 1591, 1821, 2126, 2582, 3393, 13704),
)
_LEARNING_RATE = 1e-4
_LOOP_MODELS = {"softmax": 2, "mgk": 1}  # heads

Batch = dict[str, Tensor]


class UnfusedAttention(nn.Module):
    """A mixture attention by :func:`unfused_attention` instead of its backends."""

    def __init__(self, fused: MixtureAttention) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None, **unused: Any) -> Tensor:
        """(B, L, C) -> (B, L, C)."""
        query, keys, value = self.fused.project(x)
        log_prior = self.fused.prior(keys.shape[3])
        dropout = self.fused.dropout if self.training else 0.0
        heads = unfused_attention(query, keys, value, log_prior, key_mask, dropout)
        return self.fused.o_proj(heads.transpose(1, 2).flatten(2))


def run(settings: TrainSettings, on_step: OnStep) -> Outcome:
    """A row per task, heads and model; then per model in the training loop."""
    notes: list[str] = []
    count = settings.rounds + 1
    batches = {shape: make_batches(shape, settings, count) for shape in settings.shapes}
    plans = [
        (shape, heads, group)
        for shape in settings.shapes
        for heads in settings.heads
        for group in _groups(shape, heads, settings, batches[shape], notes)
    ]
    loop_models = _LOOP_MODELS if settings.loop_steps else {}
    steps = Steps(on_step, count * sum(len(group) for _, _, group in plans) + len(loop_models))
    rows: list[Row] = []
    for shape, heads, group in plans:
        works = {model.name: _work(shape, model, settings, batches[shape]) for model in group}
        times = timing.compare(works, group[0].name, rounds=settings.rounds, on_run=steps)
        masks = [batch["attention_mask"] for batch in batches[shape]]
        lengths = [float(mask.sum(1).float().mean()) for mask in masks]
        common = {"experiment": "step", "shape": shape, "group": heads, "mean_length": mean(lengths)}
        for model in group:
            timed = {"baseline": group[0].name, **asdict(times[model.name])}
            rows.append({**common, **asdict(model), **timed})
    for name, heads in loop_models.items():
        loop, bare = _loop_and_bare_milliseconds(name, heads, settings)
        common = {"experiment": "loop", "shape": "listops", "model": name, "heads": heads}
        rows.append({**common, "milliseconds": loop, "bare_milliseconds": bare, "ratio": loop / bare})
        steps()
    return Outcome(rows, notes)


def draw_lengths(shape: str, count: int) -> NDArray[np.int64]:
    """Lengths as in the task: generated, or drawn between IMDb's quantiles."""
    if shape == "text":
        places = np.random.Generator(np.random.PCG64(0)).random(count)
        grid = np.linspace(0, 1, len(_IMDB_QUANTILES))
        return np.interp(places, grid, _IMDB_QUANTILES).astype(np.int64)
    lengths = np.zeros(0, np.int64)
    number = 0
    while len(lengths) < count:
        lengths = np.concatenate([lengths, generate_block(0, _LISTOPS, number).lengths])
        number += 1
    return lengths[:count]


def make_batches(shape: str, settings: TrainSettings, count: int) -> list[Batch]:
    """Batches of random tokens, each padded to its longest example."""
    generator = torch.Generator().manual_seed(0)
    limit = settings.max_length or TASK_LENGTHS[shape]
    lengths = torch.from_numpy(draw_lengths(shape, count * settings.batch)).clamp_max(limit)
    batches = []
    for part in lengths.split(settings.batch):
        mask = torch.arange(int(part.max())) < part[:, None]
        ids = torch.randint(1, _VOCAB[shape], mask.shape, generator=generator) * mask
        labels = torch.randint(_LABELS[shape], (settings.batch,), generator=generator)
        batches.append({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})
    return batches


@dataclass(frozen=True)
class _Model:
    model: str
    heads: int
    attention: str

    @property
    def name(self) -> str:
        return f"{self.model}:{self.heads} {self.attention}"


def _groups(
    shape: str, heads: int, settings: TrainSettings, batches: list[Batch], notes: list[str]
) -> Iterator[list[_Model]]:
    """What is timed side by side, the baseline first."""
    group = [_Model("softmax", 2 * heads, "sdpa")]
    group += [_Model(name, heads, "auto") for name in ("mgk", "smgk")]
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    # Of both layers: three matrices for each component and three for their sum.
    matrices = 2 * (3 * settings.mixtures + 3) * settings.batch * heads
    needed = matrices * longest**2 * 4 / 1e9
    limit = settings.memory_limit_gb
    if needed <= limit:
        group.append(_Model("mgk", heads, UNFUSED))
    else:
        reason = f"it needs about {needed:.2g} GB, the limit is {limit:g} GB"
        notes.append(f"{shape}, mgk:{heads} {UNFUSED} was not measured: {reason}")
    yield group
    yield [_Model("linear", 2 * heads, "auto"), _Model("mlk", heads, "auto")]


def _work(shape: str, model: _Model, settings: TrainSettings, batches: list[Batch]) -> Work:
    """An optimizer step of LRA's model; in a round all get the same batch."""
    config = MgkConfig(
        attention=model.model,
        num_attention_heads=model.heads,
        num_mixtures=settings.mixtures,
        backend="auto" if model.attention == UNFUSED else model.attention,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        head_dim=32,
        vocab_size=_VOCAB[shape],
        num_labels=_LABELS[shape],
        max_position_embeddings=settings.max_length or TASK_LENGTHS[shape],
        attention_probs_dropout_prob=settings.attention_dropout,
    )
    torch.manual_seed(0)
    classifier = MgkForSequenceClassification(config).train()
    if model.attention == UNFUSED:
        for layer in classifier.model.layers:
            layer.attention = UnfusedAttention(layer.attention)
    step, rest = bare_step(classifier), iter(batches)
    return lambda: step(next(rest))


def bare_step(model: nn.Module) -> Callable[[Batch], float]:
    """Forward, backward, AdamW and schedule, nothing else; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def step(batch: Batch) -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _loop_and_bare_milliseconds(attention: str, heads: int, settings: TrainSettings) -> tuple[float, float]:
    """The median step of a run, and of a bare loop on the same batches."""
    steps, limit = settings.loop_steps, settings.max_length or TASK_LENGTHS["listops"]
    examples = {"train": 32 * settings.batch, "validation": settings.batch, "test": settings.batch}
    options = {"seed": 0, **examples, "min_length": min(500, limit // 4), "max_length": limit}
    overrides = {
        "model.attention": attention,
        "model.num_attention_heads": heads,
        "model.num_mixtures": settings.mixtures,
        "model.attention_probs_dropout_prob": settings.attention_dropout,
        "data.options": {**options, "max_depth": 10, "max_args": 10},
        "data.max_length": limit,
        "training.max_steps": steps,
        "training.batch_size": settings.batch,
        "training.warmup_steps": 0,
        "training.device": "cpu",
        "evaluation.every": steps,
        "evaluation.test": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe("listops", "paper", overrides={**overrides, "data.folder": folder})
        trained = train(recipe, Path(folder) / "run").seconds_per_step
        data = open_data(recipe.data)
        train_set = data.split("train")
        torch.manual_seed(recipe.seed)
        step, seconds = bare_step(make_model(recipe, data).train()), []
        for indices in StepBatches(32 * settings.batch, settings.batch, steps, seed=recipe.seed):
            start = time.perf_counter()
            step(data.collator([train_set[index] for index in indices]))
            seconds.append(time.perf_counter() - start)
    return trained * 1e3, median(seconds) * 1e3
