"""From a recipe to its data and its model."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mgk.data.batches import Collator
from mgk.data.datasets import SequenceDataset, load
from mgk.data.errors import UsageError
from mgk.data.manifest import Manifest, data_folder
from mgk.data.preparation import OnStep, prepare, prepared
from mgk.data.task_registry import Task, find_task
from mgk.data.tokenizers import tokenizer_for
from mgk.models import (
    MgkConfig,
    MgkForCausalLM,
    MgkForDocumentRetrieval,
    MgkForImageClassification,
    MgkForSequenceClassification,
)
from mgk.training.errors import RecipeError
from mgk.training.recipe import DataSection, Recipe

if TYPE_CHECKING:
    from collections.abc import Sized

Batch = dict[str, Tensor]

_MODELS: dict[str, type[PreTrainedModel]] = {
    "sequence": MgkForSequenceClassification,
    "pair": MgkForDocumentRetrieval,
    "image": MgkForImageClassification,
    "language": MgkForCausalLM,
}
_NO_STEPS: OnStep = lambda done, total: None  # noqa: E731


@dataclass(frozen=True)
class TaskData:
    """The data of a recipe.

    Attributes:
        section: of the recipe.
        task: of the data set.
        folder: that holds the set's folder.
        manifest: of the set.
    """

    section: DataSection
    task: Task
    folder: Path
    manifest: Manifest

    @property
    def is_language(self) -> bool:
        """Whether it is running text."""
        return self.task.kind == "language"

    @property
    def max_length(self) -> int:
        """Tokens that an example keeps."""
        return self.section.max_length or self.task.max_length

    @property
    def collator(self) -> Collator:
        """Makes batches of examples."""
        return Collator(self.manifest.facts["pad_id"])

    def split(self, name: str) -> Dataset[Batch]:
        """The examples of a split, as many as the recipe says.

        Fewer than all are drawn at random, always the same ones: sets often come class by class, or with classes
        taking turns. Of running text, the first.
        """
        data = load(self.task.name, name, folder=self.folder, max_length=self.max_length, colour=self.section.colour)
        limit = getattr(self.section, f"{name}_examples")
        if limit is None or limit >= len(data):
            return data
        if self.is_language:
            return Subset(data, range(limit))
        return Subset(data, np.sort(np.random.Generator(np.random.PCG64(0)).permutation(len(data))[:limit]).tolist())

    def tokenizer(self) -> PreTrainedTokenizerFast | None:
        """The tokenizer of its texts; None for images."""
        return tokenizer_for(self.task.name, self.folder, model_max_length=self.max_length)


def open_data(section: DataSection, *, on_step: OnStep = _NO_STEPS) -> TaskData:
    """The data of a recipe; a set with options is generated on first use."""
    task = find_task(section.name)
    root = data_folder() if section.folder is None else section.folder
    if section.options:
        if not task.is_generated:
            raise RecipeError(f"data.options are for sets that are generated, and {task.name} is read from files")
        text = json.dumps(section.options, sort_keys=True)
        root = root / "generated" / hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        try:
            prepare(task.name, out=root, options=section.options, on_step=on_step)
        except UsageError as error:
            raise RecipeError(f"data.options: {error}") from None
    return TaskData(section, task, root, prepared(task.name, root)[1])


def count(data: Dataset[Batch]) -> int:
    """How many examples there are."""
    return len(cast("Sized", data))


def lengths(data: Dataset[Batch]) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """The length of every example; None where all have the same, or nearly."""
    if isinstance(data, Subset):
        whole = lengths(data.dataset)
        return None if whole is None else whole[np.asarray(data.indices)]
    return data.lengths if isinstance(data, SequenceDataset) else None


def make_config(recipe: Recipe, data: TaskData) -> MgkConfig:
    """The configuration of the recipe's model: its own fields, then what the data say."""
    values = {
        "vocab_size": data.manifest.facts["vocab_size"],
        "max_position_embeddings": data.max_length,
        **({} if data.is_language else {"num_labels": data.task.num_labels}),
        **({"image_size": data.manifest.facts["height"]} if "height" in data.manifest.facts else {}),
        **recipe.model.given(),
    }
    try:
        return MgkConfig(**values)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"model: {error}") from None


def make_model(recipe: Recipe, data: TaskData) -> PreTrainedModel:
    """A new model; its weights are drawn from torch's generator as it stands."""
    try:
        return model_class(data.task)(make_config(recipe, data))
    except (TypeError, ValueError) as error:
        raise error if isinstance(error, RecipeError) else RecipeError(f"model: {error}") from None


def model_class(task: Task) -> type[PreTrainedModel]:
    """The class of the models of a task."""
    return _MODELS[task.kind]


def num_targets(batch: Batch) -> Tensor:
    """How many predictions the loss of a batch is the mean of."""
    labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
    return labels.ne(-100).sum()


def num_tokens(batch: Batch, config: MgkConfig) -> int:
    """How many real tokens a batch has: pixels or patches of images, padding left out."""
    masks = [value for name, value in batch.items() if name.startswith("attention_mask")]
    if masks:
        return int(sum(mask.sum() for mask in masks))
    if "pixel_values" in batch:
        return len(batch["pixel_values"]) * (config.num_patches or 1)
    return int(num_targets(batch)) if "shift_labels" in batch else batch["input_ids"].numel()
