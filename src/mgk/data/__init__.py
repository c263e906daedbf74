"""The data sets of the paper, read from real files or generated, prepared once and mapped into memory ever after.

Names load on first use, so that the command line can read the catalog without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mgk.data.batches import Collator as Collator
    from mgk.data.batches import EpochBatches as EpochBatches
    from mgk.data.batches import StepBatches as StepBatches
    from mgk.data.catalog import TASKS as TASKS
    from mgk.data.catalog import Task as Task
    from mgk.data.datasets import ImageDataset as ImageDataset
    from mgk.data.datasets import SequenceDataset as SequenceDataset
    from mgk.data.datasets import load as load
    from mgk.data.datasets import load_tokens as load_tokens
    from mgk.data.errors import DataError as DataError
    from mgk.data.errors import UsageError as UsageError
    from mgk.data.folders import data_folder as data_folder
    from mgk.data.language import SegmentDataset as SegmentDataset
    from mgk.data.language import sliding_window_loss as sliding_window_loss
    from mgk.data.preparation import prepare as prepare
    from mgk.data.preparation import prepared as prepared
    from mgk.data.vocabularies import Vocabulary as Vocabulary
    from mgk.data.vocabularies import vocabulary as vocabulary

_MODULES = {
    "Collator": "batches",
    "DataError": "errors",
    "EpochBatches": "batches",
    "ImageDataset": "datasets",
    "SegmentDataset": "language",
    "SequenceDataset": "datasets",
    "StepBatches": "batches",
    "TASKS": "catalog",
    "Task": "catalog",
    "UsageError": "errors",
    "Vocabulary": "vocabularies",
    "data_folder": "folders",
    "load": "datasets",
    "load_tokens": "datasets",
    "prepare": "preparation",
    "prepared": "preparation",
    "sliding_window_loss": "language",
    "vocabulary": "vocabularies",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mgk.data' has no attribute {name!r}")
    return getattr(import_module(f"mgk.data.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
