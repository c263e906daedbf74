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
from mgk.models.configuration import AUTO_CLASSES, MgkConfig
from mgk.models.heads import (
    MgkForDocumentRetrieval,
    MgkForImageClassification,
    MgkForMaskedLM,
    MgkForQuestionAnswering,
    MgkForSequenceClassification,
    MgkForTokenClassification,
    MgkRetrievalOutput,
)
from mgk.models.m_step_callback import MStepCallback
from mgk.models.model_card import write_card
from mgk.models.modeling import MgkModel, MgkPreTrainedModel
from mgk.models.transformers_cache import cache_bytes

__all__ = [
    "MStepCallback",
    "MgkConfig",
    "MgkForCausalLM",
    "MgkForDocumentRetrieval",
    "MgkForImageClassification",
    "MgkForMaskedLM",
    "MgkForQuestionAnswering",
    "MgkForSequenceClassification",
    "MgkForTokenClassification",
    "MgkModel",
    "MgkPreTrainedModel",
    "MgkRetrievalOutput",
    "cache_bytes",
    "write_card",
]

for _auto, _name in AUTO_CLASSES.items():
    _key = MgkConfig.model_type if _auto == "AutoConfig" else MgkConfig
    getattr(transformers, _auto).register(_key, globals()[_name], exist_ok=True)
