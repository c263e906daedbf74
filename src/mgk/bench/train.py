"""The time of an optimizer step: mixtures with h heads against softmax by SDPA with 2h, and what ``Trainer`` adds."""

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mgk._util import machine
from mgk._util.machine import Machine
from mgk.bench import timing
from mgk.bench.conditions import measuring
from mgk.bench.train_settings import LENGTHS, TrainSettings
from mgk.data.batches import StepBatches
from mgk.data.listops import Shape, generate_block
from mgk.models import MgkConfig, MgkForSequenceClassification
from mgk.nn import MixtureAttention

WRITTEN_OUT = "as usually written"
_VOCAB = {"listops": 17, "text": 257}
_LABELS = {"listops": 10, "text": 2}
_LISTOPS = Shape(min_length=500, max_length=2000, max_depth=10, max_args=10)
# Bytes of the 50,000 IMDb reviews: the shortest, then every 5% up to the longest.
_IMDB_QUANTILES = (
    *(32, 349, 502, 621, 662, 699, 739, 784, 838, 900, 971),
    *(1051, 1148, 1263, 1406, 1591, 1821, 2126, 2582, 3393, 13704),
)
_LEARNING_RATE = 1e-4

OnStep = Callable[[int, int], None]
Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One model on one shape."""

    shape: str
    group: int  # h: what shares a yardstick
    model: str
    heads: int
    attention: str  # the backend, or WRITTEN_OUT
    yardstick: str  # the model that the ratio is to
    milliseconds: float  # of a step, the median over rounds
    ratio: float  # to the yardstick in the same round, the median over rounds
    ratio_min: float
    ratio_max: float


@dataclass(frozen=True, kw_only=True)
class TrainerTime:
    """The same step in ``Trainer`` and in a bare loop."""

    shape: str
    model: str
    heads: int
    trainer_milliseconds: float  # the median over steps, from one step's end to the next one's
    bare_milliseconds: float
    ratio: float


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """Every row, with what is needed to measure it again."""

    settings: TrainSettings
    machine: Machine
    steps: tuple[StepTime, ...]
    trainer: tuple[TrainerTime, ...]
    mean_lengths: dict[str, float]  # real tokens of an example, by shape
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The report in the types of JSON."""
        data = asdict(self)
        settings = {name: list(x) if isinstance(x, tuple) else x for name, x in data["settings"].items()}
        lists = {name: list(data[name]) for name in ("steps", "trainer", "notes")}
        return {"benchmark": "train", **data, "settings": settings, **lists}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TrainReport":
        """The report that ``to_json`` made this of."""
        settings: dict[str, Any] = {
            name: tuple(x) if isinstance(x, list) else x for name, x in data["settings"].items()
        }
        return cls(
            settings=TrainSettings(**settings),
            machine=Machine(**data["machine"]),
            steps=tuple(StepTime(**row) for row in data["steps"]),
            trainer=tuple(TrainerTime(**row) for row in data["trainer"]),
            mean_lengths=data["mean_lengths"],
            notes=tuple(data["notes"]),
        )


class WrittenOutAttention(MixtureAttention):
    """Eq. 9 as it is usually written: M matrices of exponentials of distances, mixed and normalised."""

    def _mixture(
        self,
        query: Tensor,
        keys: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        *unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        prior = self.prior(keys.shape[3])
        mass = torch.zeros(())
        for r in range(keys.shape[2]):
            distance = torch.cdist(query, keys[:, :, r]).square()
            mass = mass + prior[:, :, r, :, None].exp() * torch.exp(-distance / (2 * math.sqrt(self.head_dim)))
        if key_mask is not None:
            mass = mass.masked_fill(~key_mask[:, None, None], 0.0)
        weights = nn.functional.dropout(mass / mass.sum(-1, keepdim=True), self.dropout, self.training)
        return weights @ value, None


def run(settings: TrainSettings, on_step: OnStep = lambda done, total: None) -> TrainReport:
    """Measure what the settings ask for.

    Args:
        settings: shapes and options.
        on_step: told after each step how many of how many are done.

    Returns:
        The times, in the order of shapes and heads.

    Raises:
        BenchError: when the memory does not suffice.
    """
    with measuring(settings.threads, smaller="batch"):
        return _run(settings, on_step)


def draw_lengths(shape: str, count: int) -> NDArray[np.int64]:
    """Lengths as the task has them: those of generated expressions, or drawn between the quantiles of IMDb."""
    if shape == "text":
        places = np.random.Generator(np.random.PCG64(0)).random(count)
        grid = np.linspace(0, 1, len(_IMDB_QUANTILES))
        return np.interp(places, grid, _IMDB_QUANTILES).astype(np.int64)
    found = np.zeros(0, np.int64)
    number = 0
    while len(found) < count:
        found = np.concatenate([found, generate_block(0, _LISTOPS, number).lengths])
        number += 1
    return found[:count]


def make_batches(shape: str, settings: TrainSettings, count: int) -> list[Batch]:
    """Batches of random tokens, each padded to its own longest example."""
    generator = torch.Generator().manual_seed(0)
    limit = settings.max_length or LENGTHS[shape]
    lengths = torch.from_numpy(draw_lengths(shape, count * settings.batch)).clamp_max(limit)
    batches = []
    for part in lengths.split(settings.batch):
        mask = torch.arange(int(part.max())) < part[:, None]
        ids = torch.randint(1, _VOCAB[shape], mask.shape, generator=generator) * mask
        labels = torch.randint(_LABELS[shape], (settings.batch,), generator=generator)
        batches.append({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})
    return batches


def make_config(shape: str, attention: str, heads: int, settings: TrainSettings, backend: str) -> MgkConfig:
    """The model of the Long Range Arena."""
    return MgkConfig(
        attention=attention,
        num_attention_heads=heads,
        num_mixtures=settings.mixtures,
        backend=backend,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        head_dim=32,
        vocab_size=_VOCAB[shape],
        num_labels=_LABELS[shape],
        max_position_embeddings=settings.max_length or LENGTHS[shape],
        attention_probs_dropout_prob=settings.attention_dropout,
    )


@dataclass(frozen=True)
class _Alternative:
    model: str
    heads: int
    attention: str

    @property
    def name(self) -> str:
        return f"{self.model}:{self.heads} {self.attention}"


def _run(settings: TrainSettings, on_step: OnStep) -> TrainReport:
    notes: list[str] = []
    batches = {shape: make_batches(shape, settings, settings.rounds + 1) for shape in settings.shapes}
    plans = [
        (shape, heads, group)
        for shape in settings.shapes
        for heads in settings.heads
        for group in _groups(shape, heads, settings, batches[shape], notes)
    ]
    total = (settings.rounds + 1) * sum(len(group) for _, _, group in plans)
    trainer_models = ("softmax", "mgk") if settings.trainer_steps else ()
    total += len(trainer_models)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        on_step(done, total)

    steps = [
        row for shape, heads, group in plans for row in _measure(shape, heads, group, settings, batches[shape], step)
    ]
    trainer = []
    for model in trainer_models:
        trainer.append(_trainer_time(model, 2 if model == "softmax" else 1, settings))
        step()
    means = {
        shape: float(np.mean([float(batch["attention_mask"].sum(1).float().mean()) for batch in batches[shape]]))
        for shape in settings.shapes
    }
    return TrainReport(
        settings=settings,
        machine=machine.describe(torch.device("cpu")),
        steps=tuple(steps),
        trainer=tuple(trainer),
        mean_lengths=means,
        notes=tuple(notes),
    )


def _groups(
    shape: str, heads: int, settings: TrainSettings, batches: list[Batch], notes: list[str]
) -> Iterator[list[_Alternative]]:
    """What is timed side by side, its yardstick first."""
    softmax = [
        _Alternative("softmax", 2 * heads, "sdpa"),
        _Alternative("mgk", heads, "auto"),
        _Alternative("smgk", heads, "auto"),
    ]
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    # The matrices of both layers that the backward needs, for each component three and three for their sum.
    needed = 2 * (3 * settings.mixtures + 3) * settings.batch * heads * longest**2 * 4 / 1e9
    if needed <= settings.memory_limit_gb:
        softmax.append(_Alternative("mgk", heads, WRITTEN_OUT))
    else:
        limit = f"the limit is {settings.memory_limit_gb:g} GB"
        notes.append(f"{shape}, mgk:{heads} {WRITTEN_OUT} was not measured: about {needed:.2g} GB, {limit}")
    yield softmax
    yield [_Alternative("linear", 2 * heads, "auto"), _Alternative("mlk", heads, "auto")]


def _measure(
    shape: str,
    heads: int,
    group: list[_Alternative],
    settings: TrainSettings,
    batches: list[Batch],
    step: Callable[[], None],
) -> list[StepTime]:
    works = {alternative.name: _work(shape, alternative, settings, batches) for alternative in group}
    device = torch.device("cpu")
    times = timing.compare(works, group[0].name, rounds=settings.rounds, device=device, on_run=step)
    return [
        StepTime(
            shape=shape,
            group=heads,
            model=alternative.model,
            heads=alternative.heads,
            attention=alternative.attention,
            yardstick=group[0].name,
            **asdict(times[alternative.name]),
        )
        for alternative in group
    ]


def _work(shape: str, alternative: _Alternative, settings: TrainSettings, batches: list[Batch]) -> Callable[[], object]:
    """One optimizer step; in a round every alternative gets the same batch."""
    is_written_out = alternative.attention == WRITTEN_OUT
    backend = "auto" if is_written_out else alternative.attention
    config = make_config(shape, alternative.model, alternative.heads, settings, backend)
    torch.manual_seed(0)
    model = MgkForSequenceClassification(config).train()
    if is_written_out:
        for layer in model.model.layers:
            layer.attention.__class__ = WrittenOutAttention
    take_step = bare_step(model)
    rest = iter(batches)
    return lambda: take_step(next(rest))


def bare_step(model: nn.Module) -> Callable[[Batch], float]:
    """An optimizer step without anything around it: forward, backward, AdamW, schedule, and the loss as a number."""
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


def _trainer_time(attention: str, heads: int, settings: TrainSettings) -> TrainerTime:
    """Train by a recipe on generated expressions, then the same steps in a bare loop; twice, and the second counts.

    Both draw their batches from the data set and pad them on the way.
    """
    with tempfile.TemporaryDirectory() as folder:
        for place in ("warm-up", "timed"):
            trained, bare = _both_loops(attention, heads, settings, Path(folder), place)
    return TrainerTime(
        shape="listops",
        model=attention,
        heads=heads,
        trainer_milliseconds=trained,
        bare_milliseconds=bare,
        ratio=trained / bare,
    )


def _both_loops(attention: str, heads: int, settings: TrainSettings, folder: Path, place: str) -> tuple[float, float]:
    # Imported here: training stands above this package and imports from it.
    from mgk.training import train
    from mgk.training.recipe import load_recipe
    from mgk.training.tasks import make_model, open_data

    steps = settings.trainer_steps + 1
    limit = settings.max_length or LENGTHS["listops"]
    examples = {"train": 32 * settings.batch, "validation": settings.batch, "test": settings.batch}
    options = {"seed": 0, **examples, "min_length": min(500, limit // 4), "max_length": limit}
    overrides = {
        "model.attention": attention,
        "model.num_attention_heads": heads,
        "model.num_mixtures": settings.mixtures,
        "model.attention_probs_dropout_prob": settings.attention_dropout,
        "data.folder": str(folder / "data"),
        "data.options": {**options, "max_depth": 10, "max_args": 10},
        "data.max_length": limit,
        "training.max_steps": steps,
        "training.batch_size": settings.batch,
        "training.warmup_steps": 0,
        "training.save_every": steps,
        "training.device": "cpu",
        "evaluation.every": steps,
        "evaluation.test": False,
    }
    recipe = load_recipe("listops", "paper", overrides=overrides)
    ends: list[float] = []
    train(recipe, folder / place, on_step=lambda done, total: ends.append(time.perf_counter()))
    trained = median(np.diff(ends[1:]).tolist())

    data = open_data(recipe.data)
    examples_of = data.split("train")
    torch.manual_seed(recipe.seed)
    take_step = bare_step(make_model(recipe, data).train())
    seconds = []
    start = time.perf_counter()
    for places in StepBatches(len(examples_of), settings.batch, steps, seed=recipe.seed):  # type: ignore[arg-type]
        take_step(data.collator([examples_of[place] for place in places]))
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    return trained * 1e3, median(seconds[1:]) * 1e3
