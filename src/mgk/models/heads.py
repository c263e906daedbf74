"""Classifiers of sequences, of images and of pairs of documents."""

from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, ImageClassifierOutput, SequenceClassifierOutput
from transformers.utils import ModelOutput, can_return_tuple

from mgk.functional.mixture.inputs import compute_dtype
from mgk.models.configuration import MgkConfig
from mgk.models.modeling import MgkModel, MgkPreTrainedModel, NumItems, OutputOptions, classification_loss


class MgkClassifier(nn.Module):
    """W_2 relu(W_1 x), the head of the Long Range Arena."""

    def __init__(self, config: MgkConfig, num_vectors: int) -> None:
        super().__init__()
        width = config.classifier_hidden_size or config.intermediate_size
        self.dense = nn.Linear(num_vectors * config.hidden_size, width)
        self.out = nn.Linear(width, config.num_labels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, num_vectors * hidden_size) -> (B, num_labels)."""
        return self.out(self.dense(x).relu())


def pool(hidden: Tensor, attention_mask: Tensor | None, pooling: str) -> Tensor:
    """The first vector for "cls", else the mean over real tokens: (B, hidden_size)."""
    if pooling == "cls":
        return hidden[:, 0]
    exact = hidden.to(compute_dtype(hidden))
    if attention_mask is None:
        return exact.mean(1).to(hidden.dtype)
    weights = attention_mask.bool().to(exact.dtype).unsqueeze(-1)
    mean = (exact * weights).sum(1) / weights.sum(1).clamp_min(1.0)
    return mean.to(hidden.dtype)


def _states(encoded: BaseModelOutputWithPast) -> dict[str, Any]:
    return {"hidden_states": encoded.hidden_states, "attentions": encoded.attentions}


class _Classification(MgkPreTrainedModel):
    num_vectors = 1

    def __init__(self, config: MgkConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = MgkModel(config)
        self.main_input_name = self.model.main_input_name
        self.classifier = MgkClassifier(config, self.num_vectors)
        self.post_init()

    def _encode(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, BaseModelOutputWithPast]:
        """The pooled vector (B, hidden_size), and all of the output."""
        encoded = self.model(input_ids, attention_mask, use_cache=False, return_dict=True, **options)
        return pool(encoded.last_hidden_state, attention_mask, self.config.pooling), encoded

    def _classify(self, vector: Tensor, labels: Tensor | None, num_items: NumItems) -> dict[str, Any]:
        """Logits (B, num_labels), and the loss where there are labels."""
        logits, loss = self.classifier(vector), None
        if labels is not None:
            kind = self.config.problem_type
            loss = classification_loss(logits, labels, kind, num_items)
        return {"loss": loss, "logits": logits}


class MgkForSequenceClassification(_Classification):
    """Classify a sequence by its pooled vector."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: NumItems = None,
        **options: Unpack[OutputOptions],
    ) -> SequenceClassifierOutput:
        """Logits (B, num_labels), and the loss where there are labels.

        ``labels`` are classes (B,), numbers (B,) for a regression, or independent
        labels (B, num_labels). ``num_items_in_batch`` is the number of targets of
        the whole optimizer step. The rest is as in :meth:`MgkModel.forward`.
        """
        given = {"position_ids": position_ids, "inputs_embeds": inputs_embeds, **options}
        vector, encoded = self._encode(input_ids, attention_mask, **given)
        result = self._classify(vector, labels, num_items_in_batch)
        return SequenceClassifierOutput(**result, **_states(encoded))


class MgkForImageClassification(_Classification):
    """Classify an image: pixels as tokens (LRA), or patches (ViT)."""

    takes_patches = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: NumItems = None,
        **options: Unpack[OutputOptions],
    ) -> ImageClassifierOutput:
        """Logits (B, num_labels), and the loss where there are labels (B,).

        The image is ``input_ids`` (B, pixels), values 0 to 255, or with ``patch_size``
        ``pixel_values`` (B, num_channels, image_size, image_size).
        """
        given = {"pixel_values": pixel_values, **options}
        vector, encoded = self._encode(input_ids, attention_mask, **given)
        result = self._classify(vector, labels, num_items_in_batch)
        return ImageClassifierOutput(**result, **_states(encoded))


@dataclass
class MgkRetrievalOutput(ModelOutput):
    """Output of :class:`MgkForDocumentRetrieval`; ``_2``: the second document."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    hidden_states_2: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    attentions_2: tuple[Tensor, ...] | None = None


class MgkForDocumentRetrieval(_Classification):
    """Classify [x1, x2, x1 * x2, x1 - x2] of two documents' pooled vectors."""

    num_vectors = 4

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_ids_2: Tensor | None = None,
        attention_mask_2: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: NumItems = None,
        **options: Unpack[OutputOptions],
    ) -> MgkRetrievalOutput:
        """Logits (B, num_labels), and the loss where there are labels (B,).

        The documents are ``input_ids`` (B, L) and ``input_ids_2`` (B, L').
        """
        if input_ids is None or input_ids_2 is None:
            missing = "input_ids" if input_ids is None else "input_ids_2"
            raise ValueError(f"{missing} is missing: retrieval compares two documents")
        if input_ids.shape[:1] != input_ids_2.shape[:1]:
            wanted = f"as many rows as input_ids, {len(input_ids)}"
            raise ValueError(f"input_ids_2 must have {wanted}, got {len(input_ids_2)}")
        # not in one batch: neither is padded to the length of the other
        x1, first = self._encode(input_ids, attention_mask, **options)
        x2, second = self._encode(input_ids_2, attention_mask_2, **options)
        vector = torch.cat([x1, x2, x1 * x2, x1 - x2], -1)
        result = self._classify(vector, labels, num_items_in_batch)
        of_second = {f"{name}_2": states for name, states in _states(second).items()}
        return MgkRetrievalOutput(**result, **_states(first), **of_second)
