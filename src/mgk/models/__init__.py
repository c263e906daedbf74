"""Hugging Face models with mixture attention. One import registers them with ``AutoConfig`` and ``AutoModel…``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import safetensors  # noqa: F401
    import transformers
except ModuleNotFoundError as error:
    if error.name not in ("safetensors", "transformers"):
        raise
    raise ImportError("mgk.models needs Hugging Face transformers: pip install 'mgk[train]'", name=error.name) from None

from mgk.models.causal_lm import MgkForCausalLM
from mgk.models.classification import MgkForSequenceClassification
from mgk.models.configuration import MgkConfig
from mgk.models.image import MgkForImageClassification
from mgk.models.model_card import write_card
from mgk.models.modeling import MgkModel, MgkPreTrainedModel
from mgk.models.retrieval import MgkForDocumentRetrieval, MgkRetrievalOutput
from mgk.models.transformers_cache import cache_bytes

if TYPE_CHECKING:
    from mgk.data.tokenizers import byte_tokenizer, listops_tokenizer, tokenizer_for, word_tokenizer

__all__ = [
    "MgkConfig",
    "MgkForCausalLM",
    "MgkForDocumentRetrieval",
    "MgkForImageClassification",
    "MgkForSequenceClassification",
    "MgkModel",
    "MgkPreTrainedModel",
    "MgkRetrievalOutput",
    "byte_tokenizer",
    "cache_bytes",
    "listops_tokenizer",
    "tokenizer_for",
    "word_tokenizer",
    "write_card",
]

_TOKENIZERS = ("byte_tokenizer", "listops_tokenizer", "tokenizer_for", "word_tokenizer")

transformers.AutoConfig.register(MgkConfig.model_type, MgkConfig, exist_ok=True)
transformers.AutoModel.register(MgkConfig, MgkModel, exist_ok=True)
transformers.AutoModelForSequenceClassification.register(MgkConfig, MgkForSequenceClassification, exist_ok=True)
transformers.AutoModelForCausalLM.register(MgkConfig, MgkForCausalLM, exist_ok=True)
transformers.AutoModelForImageClassification.register(MgkConfig, MgkForImageClassification, exist_ok=True)


def __getattr__(name: str) -> Any:
    if name in _TOKENIZERS:
        return getattr(import_module("mgk.data.tokenizers"), name)
    raise AttributeError(f"module 'mgk.models' has no attribute {name!r}")
