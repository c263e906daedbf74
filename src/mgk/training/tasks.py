"""The data and the model of a recipe, and the model of a finished run."""

import copy
import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from mgk._util.errors import first_line
from mgk.data import Collator, SequenceDataset, UsageError, data_folder, load, prepare, prepared
from mgk.data.manifest import Manifest
from mgk.data.task_registry import Task, find_task
from mgk.data.tokenizers import tokenizer_for
from mgk.models import (
    MgkConfig,
    MgkForCausalLM,
    MgkForDocumentRetrieval,
    MgkForImageClassification,
    MgkForSequenceClassification,
)
from mgk.training.errors import RecipeError, TrainingError
from mgk.training.recipe import DataSection, Recipe
from mgk.training.run_dir import MODEL, check_files, finished_recipe

if TYPE_CHECKING:
    from collections.abc import Sized

Batch = dict[str, Tensor]

# The objects of a layer take about this much, whatever its width.
_LAYER_BYTES = 1 << 16

_MODELS: dict[str, type[PreTrainedModel]] = {
    "sequence": MgkForSequenceClassification,
    "pair": MgkForDocumentRetrieval,
    "image": MgkForImageClassification,
    "language": MgkForCausalLM,
}


@dataclass(frozen=True)
class TaskData:
    """The data of a recipe; ``folder`` is that of all data sets."""

    section: DataSection
    task: Task
    folder: Path
    manifest: Manifest

    @property
    def is_language(self) -> bool:
        """Whether it is running text."""
        return self.task.kind == "language"

    @property
    def metric(self) -> str:
        """The main metric of its models."""
        if not self.is_language:
            return "accuracy"
        return "bits_per_byte" if self.manifest.facts["unit"] == "byte" else "perplexity"

    @property
    def max_length(self) -> int:
        """Tokens that an example keeps."""
        return self.section.max_length or self.task.max_length

    @property
    def collator(self) -> Collator:
        """Makes batches of examples."""
        return Collator(self.manifest.facts["pad_id"], self.section.packing)

    def split(self, name: str) -> Dataset[Batch]:
        """The examples of a split, as many as the recipe says.

        Always the same random ones, as the first may be of one class; of text, the
        first.
        """
        options: dict[str, Any] = {"max_length": self.max_length, "colour": self.section.colour}
        data = load(self.task.name, name, folder=self.folder, **options)
        limit = getattr(self.section, f"{name}_examples")
        if limit is None or limit >= len(data):
            return data
        if self.is_language:
            return Subset(data, range(limit))
        order = np.random.Generator(np.random.PCG64(0)).permutation(len(data))
        return Subset(data, np.sort(order[:limit]).tolist())

    def tokenizer(self) -> PreTrainedTokenizerFast | None:
        """The tokenizer of its texts; None for images."""
        return tokenizer_for(self.task.name, self.folder, model_max_length=self.max_length)


def open_data(section: DataSection) -> TaskData:
    """The data of a recipe; a data set with options is generated on first use."""
    task = find_task(section.name)
    if section.packing and task.kind != "sequence":
        wanted = "tasks with one sequence an example"
        raise RecipeError(f"data.packing is for {wanted}, and {task.name} is not one")
    root = data_folder() if section.folder is None else section.folder
    if section.options:
        if not task.is_generated:
            name = task.name
            raise RecipeError(f"data.options are for generated sets, and {name} is read from files")
        text = json.dumps(section.options, sort_keys=True)
        root = root / "generated" / hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        try:
            prepare(task.name, out=root, options=section.options)
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


def make_model(recipe: Recipe, data: TaskData) -> PreTrainedModel:
    """A new model, by the recipe's own fields and what follows from the data."""
    facts = data.manifest.facts
    values = {
        "vocab_size": facts["vocab_size"],
        "max_position_embeddings": data.max_length,
        **({} if data.is_language else {"num_labels": data.task.num_labels}),
        **({"image_size": facts["height"]} if "height" in facts else {}),
        **recipe.model.given(),
    }
    if data.section.packing and values.get("pooling") == "cls":
        why = "a packed row has one class token"
        raise RecipeError(f"data.packing needs model.pooling: mean, as {why}")
    kind = model_class(data.task)
    try:
        config = MgkConfig(**values)
        check_size(kind, config)
        return kind(config)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"model: {error}") from None


def load_model(run: Path, task: Task) -> PreTrainedModel:
    """The model of a finished run of this task; its data need not be there."""
    finished_recipe(run)
    check_files(run, f"{MODEL}/")
    return load_weights(run / MODEL, task)


def load_weights(folder: Path, task: Task) -> PreTrainedModel:
    """A saved model of this task."""
    kind = model_class(task)
    try:
        with quiet():
            check_size(kind, MgkConfig.from_pretrained(folder))
            return kind.from_pretrained(folder)
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        reason = first_line(error)
        raise TrainingError(f"{folder}: the model cannot be loaded ({reason})") from None


def check_size(kind: type[PreTrainedModel], config: MgkConfig) -> None:
    """``ValueError`` for a model that this machine cannot hold.

    Weights are a + b L for L layers, by models of 1 and 2 layers on "meta".
    """
    layers, sizes = config.num_hidden_layers, []
    heads, width = config.num_attention_heads, config.hidden_size
    what = f"{layers:,} layers with {heads:,} heads and a width of {width:,}"
    for number in (1, 2):
        small = copy.deepcopy(config)
        small.num_hidden_layers = number
        try:
            with torch.device("meta"):
                model = kind(small)
        except (RuntimeError, OverflowError, TypeError) as error:
            raise ValueError(f"{what} have tensors that are too large for any machine") from error
        sizes.append(sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()]))
    values = sizes[0] + (layers - 1) * (sizes[1] - sizes[0])
    wanted, there = 4 * values + layers * _LAYER_BYTES, _memory_bytes()
    if there is not None and wanted > there:
        have = f"this machine has {there / 1e9:,.0f} GB"
        size = f"{values:.3g} weights, which take {wanted / 1e9:,.3g} GB"
        raise ValueError(f"{what} have {size}, and {have}")


def _memory_bytes() -> int | None:
    """The machine's memory without swap; None where it is not known."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def model_class(task: Task) -> type[PreTrainedModel]:
    """The class of the models of a task."""
    return _MODELS[task.kind]


def num_targets(batch: Batch) -> Tensor:
    """How many labels of a batch are not -100."""
    labels = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
    return labels.ne(-100).sum()


def num_tokens(batch: Batch, config: MgkConfig) -> int:
    """How many tokens a batch has without padding, or pixels, or patches."""
    masks = [value for name, value in batch.items() if name.startswith("attention_mask")]
    if masks:
        return int(sum(mask.sum() for mask in masks))
    if "pixel_values" in batch:
        return len(batch["pixel_values"]) * (config.num_patches or 1)
    return int(num_targets(batch)) if "shift_labels" in batch else batch["input_ids"].numel()


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and warnings of torch and transformers."""
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"(torch|transformers)\b")
            # Its replacement is missing in older releases of torch.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            yield
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()
