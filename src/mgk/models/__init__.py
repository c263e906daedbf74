"""Hugging Face models with mixture attention, registered with ``AutoModel…``."""

try:
    import safetensors  # noqa: F401
    import transformers
except ModuleNotFoundError as error:
    if error.name not in ("safetensors", "transformers"):
        raise
    message = "mgk.models needs Hugging Face transformers: pip install 'mgk[train]'"
    raise ImportError(message, name=error.name) from None

from mgk.models.causal_lm import MgkForCausalLM
from mgk.models.configuration import MgkConfig
from mgk.models.heads import (
    MgkForDocumentRetrieval,
    MgkForImageClassification,
    MgkForSequenceClassification,
    MgkRetrievalOutput,
)
from mgk.models.model_card import write_card
from mgk.models.modeling import MgkModel, MgkPreTrainedModel
from mgk.models.transformers_cache import cache_bytes

__all__ = [
    "MgkConfig",
    "MgkForCausalLM",
    "MgkForDocumentRetrieval",
    "MgkForImageClassification",
    "MgkForSequenceClassification",
    "MgkModel",
    "MgkPreTrainedModel",
    "MgkRetrievalOutput",
    "cache_bytes",
    "write_card",
]

transformers.AutoConfig.register(MgkConfig.model_type, MgkConfig, exist_ok=True)
for _auto, _model in (
    (transformers.AutoModel, MgkModel),
    (transformers.AutoModelForSequenceClassification, MgkForSequenceClassification),
    (transformers.AutoModelForCausalLM, MgkForCausalLM),
    (transformers.AutoModelForImageClassification, MgkForImageClassification),
):
    _auto.register(MgkConfig, _model, exist_ok=True)
