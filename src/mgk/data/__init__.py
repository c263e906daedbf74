"""The data sets of the paper: prepared once, then mapped into memory."""

from typing import TYPE_CHECKING

from mgk._util.lazy import lazy_exports

if TYPE_CHECKING:
    from mgk.data.batches import Collator as Collator
    from mgk.data.batches import EpochBatches as EpochBatches
    from mgk.data.batches import StepBatches as StepBatches
    from mgk.data.datasets import ImageDataset as ImageDataset
    from mgk.data.datasets import SequenceDataset as SequenceDataset
    from mgk.data.datasets import load as load
    from mgk.data.datasets import load_tokens as load_tokens
    from mgk.data.errors import DataError as DataError
    from mgk.data.errors import UsageError as UsageError
    from mgk.data.language import SegmentDataset as SegmentDataset
    from mgk.data.language import sliding_window_loss as sliding_window_loss
    from mgk.data.manifest import data_folder as data_folder
    from mgk.data.preparation import prepare as prepare
    from mgk.data.preparation import prepared as prepared
    from mgk.data.task_registry import TASKS as TASKS
    from mgk.data.task_registry import Task as Task
    from mgk.data.tokenizers import byte_tokenizer as byte_tokenizer
    from mgk.data.tokenizers import listops_tokenizer as listops_tokenizer
    from mgk.data.tokenizers import tokenizer_for as tokenizer_for
    from mgk.data.tokenizers import word_tokenizer as word_tokenizer
    from mgk.data.vocabularies import Vocabulary as Vocabulary
    from mgk.data.vocabularies import vocabulary as vocabulary

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
