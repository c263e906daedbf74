"""Measures a model: accuracy with its interval and confusion, or perplexity by segments and by a sliding window."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from mgk.analysis.confidence_intervals import Interval, wilson_interval
from mgk.data.datasets import load_tokens
from mgk.data.language import Tokens, sliding_window_loss
from mgk.data.task_registry import Task
from mgk.models import MgkForCausalLM
from mgk.training import distributed
from mgk.training.errors import RecipeError, TrainingError
from mgk.training.recipe import Recipe, read_recipe
from mgk.training.run_dir import MODEL, RECIPE
from mgk.training.tasks import Batch, TaskData, count, lengths, model_class, open_data

OnStep = Callable[[int, int], None]

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """exp of the mean loss of a text's tokens, and how it was measured.

    Attributes:
        window: tokens that a prediction sees at most.
        stride: tokens between two windows; equal to the window, the text is cut into segments. The last ``stride``
            positions of a window count, of the first one all.
        tokens: that were predicted.
        text_tokens: of the split; more than ``tokens`` + 1 where only its beginning was used.
        loss: the mean, in nats.
        value: the perplexity.
    """

    window: int
    stride: int
    tokens: int
    text_tokens: int
    loss: float
    value: float

    @property
    def is_whole(self) -> bool:
        """Whether all of the split was used."""
        return self.tokens + 1 == self.text_tokens

    @property
    def how(self) -> str:
        """Window, stride, and how much of the text."""
        part = "" if self.is_whole else f", the first {self.tokens + 1:,} of {self.text_tokens:,} tokens only"
        return f"window {self.window}, stride {self.stride}{part}"

    def __str__(self) -> str:
        return f"perplexity {self.value:.2f} ({self.how})"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How good a model is on a split.

    Attributes:
        data: the name of the data set.
        split: of it.
        metric: "accuracy" or "perplexity", by segments.
        value: of the metric.
        loss: the mean over examples or tokens.
        examples: how many; of running text, tokens.
        interval: of the accuracy.
        correct: whether each example was right, in the order of the data.
        confusion: how many of each class (row) were taken for each (column).
        perplexity: by segments.
        sliding: by the sliding window, where it was asked for.
    """

    data: str
    split: str
    metric: str
    value: float
    loss: float
    examples: int
    interval: Interval | None = None
    correct: list[bool] | None = None
    confusion: list[list[int]] | None = None
    perplexity: Perplexity | None = None
    sliding: Perplexity | None = None

    def is_better_than(self, value: float) -> bool:
        """Whether this is better than another value of the metric."""
        return self.value > value if self.metric == "accuracy" else self.value < value

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


def evaluate(
    run: Path,
    *,
    split: str = "test",
    batch_size: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    on_step: OnStep | None = None,
) -> Evaluation:
    """Measure the model that a finished run has kept; under ``torchrun`` the processes share out the work.

    Args:
        run: its folder.
        split: "train", "validation" or "test".
        batch_size: examples at a time; results do not depend on it.
        window: of the sliding window; the recipe's if not given.
        stride: of it: 1 is the paper's; the recipe's if not given. With neither, there is no sliding window.
        max_tokens: how much of the text it slides over; the recipe's if not given, 0 for all.
        on_step: called with how many steps of how many are done.

    Returns:
        The figures.
    """
    recipe = read_recipe(run / RECIPE)
    data = open_data(recipe.data)
    chosen = recipe.evaluation
    if not data.is_language and (window, stride, max_tokens) != (None, None, None):
        raise RecipeError(f"window, stride and max_tokens are for language models, not for {recipe.task}")
    device = choose_device(recipe)
    distributed.meet(device)
    model = load_model(run, data).to(device)
    limit = chosen.max_tokens if max_tokens is None else max_tokens or None
    return evaluate_model(
        model,
        data,
        split,
        batch_size=batch_size or chosen.batch_size or min(32, recipe.training.batch_size),
        device=device,
        window=window or chosen.window,
        stride=stride or chosen.stride,
        max_tokens=limit,
        on_step=on_step,
    )


def choose_device(recipe: Recipe) -> torch.device:
    """Where a recipe's model runs."""
    found = torch.accelerator.current_accelerator() if recipe.training.device == "auto" else None
    return _CPU if found is None else found


def load_model(run: Path, data: TaskData) -> PreTrainedModel:
    """The model that a finished run has kept."""
    return read_model(run, data.task)


def read_model(run: Path, task: Task) -> PreTrainedModel:
    """The model of a finished run of this task, for which the data need not be there."""
    folder = run / MODEL
    if not folder.is_dir():
        raise TrainingError(f"{run}: this run is not finished: go on with mgk train --resume --out {run}")
    try:
        return model_class(task).from_pretrained(folder)
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainingError(f"{folder}: the model cannot be loaded ({error})") from None


def evaluate_model(
    model: PreTrainedModel,
    data: TaskData,
    split: str,
    *,
    batch_size: int,
    device: torch.device,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    on_step: OnStep | None = None,
) -> Evaluation:
    """Measure a model on a split, shared out over the ranks; every example counts once. See :func:`evaluate`."""
    show = on_step or (lambda done, total: None)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            if not data.is_language:
                return _classification(model, data, split, batch_size, device, show)
            return _language(cast("MgkForCausalLM", model), data, split, batch_size, window, stride, max_tokens, show)
    finally:
        model.train(was_training)


def _classification(
    model: PreTrainedModel, data: TaskData, split: str, batch_size: int, device: torch.device, on_step: OnStep
) -> Evaluation:
    examples = data.split(split)
    total, classes = count(examples), model.config.num_labels
    found = torch.zeros(total, 2, dtype=torch.int64)  # label, prediction
    losses = torch.zeros(total, dtype=torch.float64)
    done = 0
    for rows in _batches_of_one_rank(examples, batch_size):
        batch = {name: value.to(device) for name, value in data.collator([examples[row] for row in rows]).items()}
        labels = batch.pop("labels")
        logits = model(**batch).logits.float()
        losses[rows] = F.cross_entropy(logits, labels, reduction="none").double().cpu()
        found[rows] = torch.stack([labels, logits.argmax(-1)], -1).cpu()
        done += len(rows)
        on_step(min(done * distributed.world_size(), total), total)
    labels, predictions = _total(found, device).unbind(-1)
    right = labels == predictions
    confusion = torch.bincount(labels * classes + predictions, minlength=classes**2).reshape(classes, classes)
    return Evaluation(
        data=data.task.name,
        split=split,
        metric="accuracy",
        value=float(right.double().mean()),
        loss=float(_total(losses, device).mean()),
        examples=total,
        interval=wilson_interval(int(right.sum()), total),
        correct=right.tolist(),
        confusion=confusion.tolist(),
    )


def _batches_of_one_rank(examples: Dataset[Batch], batch_size: int) -> Iterator[list[int]]:
    """Rows of similar length together: less padding, and nobody sees the order."""
    sizes = lengths(examples)
    order = np.arange(count(examples)) if sizes is None else np.argsort(sizes, kind="stable")
    mine = order[distributed.rank() :: distributed.world_size()]
    for start in range(0, len(mine), batch_size):
        yield mine[start : start + batch_size].tolist()


def _language(
    model: MgkForCausalLM,
    data: TaskData,
    split: str,
    batch_size: int,
    window: int | None,
    stride: int | None,
    max_tokens: int | None,
    on_step: OnStep,
) -> Evaluation:
    tokens = load_tokens(data.task.name, split, folder=data.folder)
    limit = getattr(data.section, f"{split}_examples")
    length = data.max_length
    shown = tokens if limit is None else tokens[: limit * length + 1]
    segments = perplexity(
        model.token_losses, shown, window=length, stride=length, batch_size=batch_size, device=model.device
    )
    sliding = None
    if stride is not None:
        text = tokens if max_tokens is None else tokens[:max_tokens]
        sliding = perplexity(
            model.token_losses,
            text,
            window=window or length,
            stride=stride,
            batch_size=batch_size,
            device=model.device,
            on_step=on_step,
        )
    whole = {"text_tokens": len(tokens)}
    return Evaluation(
        data=data.task.name,
        split=split,
        metric="perplexity",
        value=segments.value,
        loss=segments.loss,
        examples=segments.tokens,
        perplexity=Perplexity(**{**asdict(segments), **whole}),
        sliding=None if sliding is None else Perplexity(**{**asdict(sliding), **whole}),
    )


def perplexity(
    token_losses: Callable[[Tensor, Tensor], Tensor],
    tokens: Tokens,
    *,
    window: int,
    stride: int,
    batch_size: int,
    device: torch.device = _CPU,
    on_step: OnStep | None = None,
) -> Perplexity:
    """exp(mean of -log p(token | up to ``window`` tokens before it)), over all tokens but the first.

    Args:
        token_losses: takes inputs and targets (B, W) and returns -log p of every target, anything where it is -100.
        tokens: of the text.
        window: W.
        stride: tokens between two windows, from 1 to W; see :func:`mgk.data.sliding_window_loss`.
        batch_size: windows at a time; the result does not depend on it beyond rounding.
        device: that several ranks talk on.
        on_step: called with how many windows of how many are done.

    Returns:
        The perplexity; with several ranks, of them all together.
    """
    sum_, number = sliding_window_loss(
        token_losses,
        tokens,
        window=window,
        stride=stride,
        batch_size=batch_size,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        on_step=on_step or (lambda done, total: None),
    )
    totals = _total(torch.tensor([sum_, number], dtype=torch.float64), device)
    loss, predicted = float(totals[0] / totals[1]), int(totals[1])
    return Perplexity(
        window=window,
        stride=stride,
        tokens=predicted,
        text_tokens=len(tokens),
        loss=loss,
        value=math.exp(min(loss, 700.0)),  # beyond which a float has no name for it
    )


def _total(values: Tensor, device: torch.device) -> Tensor:
    """The sum over ranks, on the device that they talk on."""
    if not distributed.is_several():
        return values
    return distributed.total(values.to(device)).cpu()
