"""Hugging Face models with mixture attention. One import registers them with ``AutoConfig`` and ``AutoModel…``."""

try:
    import safetensors  # noqa: F401
    import transformers
except ModuleNotFoundError as error:
    if error.name not in ("safetensors", "transformers"):
        raise
    raise ImportError("mgk.models needs Hugging Face transformers: pip install 'mgk[train]'", name=error.name) from None

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
transformers.AutoModel.register(MgkConfig, MgkModel, exist_ok=True)
transformers.AutoModelForSequenceClassification.register(MgkConfig, MgkForSequenceClassification, exist_ok=True)
transformers.AutoModelForCausalLM.register(MgkConfig, MgkForCausalLM, exist_ok=True)
transformers.AutoModelForImageClassification.register(MgkConfig, MgkForImageClassification, exist_ok=True)
