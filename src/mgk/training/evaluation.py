"""Accuracy and confusion, or perplexity and bits per byte."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from mgk.data.datasets import load_tokens
from mgk.data.language import Tokens, block_losses
from mgk.models import MgkForCausalLM
from mgk.training import distributed
from mgk.training.errors import RecipeError
from mgk.training.recipe import EvaluationSection
from mgk.training.run_dir import Interval, finished_recipe, student_interval, wilson_interval
from mgk.training.tasks import Batch, TaskData, count, lengths, load_model, open_data

OnStep = Callable[[int, int], None]

# Parts of a text for intervals: nearly independent, yet many.
BLOCKS = 32


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """exp of the mean loss of a text's tokens, and how it was measured.

    Attributes:
        window: tokens that a prediction sees at most.
        stride: tokens between two windows; the window's length for segments. The last
            ``stride`` positions of a window count, of the first one all.
        text_tokens: of the split, of which a beginning may be used.
        loss: the mean, in nats.
        block_losses: of successive parts of the text, at most ``BLOCKS``.
    """

    window: int
    stride: int
    tokens: int
    text_tokens: int
    loss: float
    value: float
    block_losses: tuple[float, ...] = ()

    def interval(self, of_loss: Callable[[float], float] | None = None) -> Interval:
        """exp, or ``of_loss``, of the mean loss and its interval."""
        blocks = student_interval(self.block_losses)
        losses = self.loss, blocks.low, blocks.high
        return Interval(*map(of_loss or _exp, losses))

    @property
    def is_whole(self) -> bool:
        """Whether all of the split was used."""
        return self.tokens + 1 == self.text_tokens

    @property
    def how(self) -> str:
        """Window, stride, and how much of the text."""
        how = f"window {self.window}, stride {self.stride}"
        part = f"the first {self.tokens + 1:,} of {self.text_tokens:,} tokens only"
        return how if self.is_whole else f"{how}, {part}"

    def __str__(self) -> str:
        return f"perplexity {self.value:.2f} ({self.how})"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics of a model on a split.

    Attributes:
        metric: "accuracy", or by segments "perplexity" or "bits_per_byte".
        loss: the mean over examples or tokens.
        examples: how many; of running text, tokens.
        interval: Wilson's; of running text, Student's over blocks.
        correct: whether each example was right, in the order of the data.
        confusion: counts by class (row) and predicted class (column).
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


def evaluate(
    run: Path,
    *,
    split: str = "test",
    batch_size: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    on_step: OnStep = lambda done, total: None,
) -> Evaluation:
    """Evaluate the model of a finished run; ranks share the work.

    Options that are None are the recipe's.

    Args:
        window: of the sliding window, in tokens.
        stride: tokens between two windows; 1 is the paper's.
        max_tokens: how much of the text it slides over; 0 for all.
    """
    recipe = finished_recipe(run)
    data = open_data(recipe.data)
    sliding = {"window": window, "stride": stride, "max_tokens": max_tokens}
    given = {name: value or None for name, value in sliding.items() if value is not None}
    if given and not data.is_language:
        names = "window, stride and max_tokens"
        raise RecipeError(f"{names} are for language models, not for {recipe.task}")
    if batch_size is not None:
        given["batch_size"] = batch_size
    device = distributed.choose_device(recipe.training.device)
    distributed.init(device)
    model = load_model(run, data.task).to(device)
    return evaluate_model(model, data, split, recipe.evaluation_options(**given), on_step)


def evaluate_model(
    model: PreTrainedModel,
    data: TaskData,
    split: str,
    options: EvaluationSection,
    on_step: OnStep = lambda done, total: None,
) -> Evaluation:
    """Evaluate a model on a split, shared between the ranks."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            if data.is_language:
                return _language(cast("MgkForCausalLM", model), data, split, options, on_step)
            return _classification(model, data, split, options.batch_size or 1, on_step)
    finally:
        model.train(was_training)


def _classification(
    model: PreTrainedModel, data: TaskData, split: str, batch_size: int, on_step: OnStep
) -> Evaluation:
    examples = data.split(split)
    total, classes = count(examples), model.config.num_labels
    found = torch.zeros(total, 2, dtype=torch.int64)  # label, prediction
    losses = torch.zeros(total, dtype=torch.float64)
    done = 0
    for rows in _batches_of_rank(examples, batch_size):
        batch = {
            name: value.to(model.device)
            for name, value in data.collator([examples[row] for row in rows]).items()
        }
        labels = batch.pop("labels")
        logits = model(**batch).logits.float()
        losses[rows] = F.cross_entropy(logits, labels, reduction="none").double().cpu()
        found[rows] = torch.stack([labels, logits.argmax(-1)], -1).cpu()
        done += len(rows)
        on_step(min(done * distributed.world_size(), total), total)
    labels, predictions = distributed.all_reduce_sum(found).unbind(-1)
    right = labels == predictions
    confusion = torch.bincount(labels * classes + predictions, minlength=classes**2)
    return Evaluation(
        data=data.task.name,
        split=split,
        metric="accuracy",
        value=float(right.double().mean()),
        loss=float(distributed.all_reduce_sum(losses).mean()),
        examples=total,
        interval=wilson_interval(int(right.sum()), total),
        correct=right.tolist(),
        confusion=confusion.reshape(classes, classes).tolist(),
    )


def _batches_of_rank(examples: Dataset[Batch], batch_size: int) -> Iterator[list[int]]:
    """Rows of similar length together, for less padding."""
    sizes = lengths(examples)
    order = np.arange(count(examples)) if sizes is None else np.argsort(sizes, kind="stable")
    mine = order[distributed.rank() :: distributed.world_size()]
    for start in range(0, len(mine), batch_size):
        yield mine[start : start + batch_size].tolist()


def _language(
    model: MgkForCausalLM, data: TaskData, split: str, options: EvaluationSection, on_step: OnStep
) -> Evaluation:
    tokens = load_tokens(data.task.name, split, folder=data.folder)
    limit, length = getattr(data.section, f"{split}_examples"), data.max_length

    def measure(text: Tokens, window: int, stride: int, on_step: OnStep) -> Perplexity:
        sizes = {"window": window, "stride": stride, "batch_size": options.batch_size or 1}
        found = perplexity(model.token_losses, text, **sizes, on_step=on_step)
        return replace(found, text_tokens=len(tokens))

    start = tokens if limit is None else tokens[: limit * length + 1]
    segments = measure(start, length, length, lambda done, total: None)
    sliding = None
    if options.stride is not None:
        sliding = measure(tokens[: options.max_tokens], options.window or length, options.stride, on_step)
    interval = segments.interval(_bits if data.metric == "bits_per_byte" else _exp)
    return Evaluation(
        data=data.task.name,
        split=split,
        metric=data.metric,
        value=interval.estimate,
        loss=segments.loss,
        examples=segments.tokens,
        interval=interval,
        perplexity=segments,
        sliding=sliding,
    )


def perplexity(
    token_losses: Callable[[Tensor, Tensor], Tensor],
    tokens: Tokens,
    *,
    window: int,
    stride: int,
    batch_size: int,
    on_step: OnStep = lambda done, total: None,
) -> Perplexity:
    """exp(mean of -log p(token | up to ``window`` tokens before it)).

    Args:
        token_losses: -log p (B, W), from inputs and targets (B, W).
        stride: tokens between two windows; see :func:`mgk.data.sliding_window_loss`.
    """
    found = block_losses(
        token_losses,
        tokens,
        blocks=BLOCKS,
        window=window,
        stride=stride,
        batch_size=batch_size,
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        on_step=on_step,
    )
    found = distributed.all_reduce_sum(found)
    total, predicted = found.sum(0).tolist()
    loss = total / predicted
    filled = found[found[:, 1] > 0]
    return Perplexity(
        window=window,
        stride=stride,
        tokens=int(predicted),
        text_tokens=len(tokens),
        loss=loss,
        value=_exp(loss),
        block_losses=tuple((filled[:, 0] / filled[:, 1]).tolist()),
    )


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # exp overflows beyond


def _bits(loss: float) -> float:
    return loss / math.log(2)
