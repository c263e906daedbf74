"""Classifiers of sequences, of images and of pairs of documents: one transformer, one pooling, one two-layer head."""

from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, ImageClassifierOutput, SequenceClassifierOutput
from transformers.utils import ModelOutput, can_return_tuple

from mgk.functional.mixture.inputs import compute_dtype
from mgk.models.configuration import MgkConfig
from mgk.models.losses import NumItems, classification_loss
from mgk.models.modeling import MgkModel, MgkPreTrainedModel, OutputOptions


class MgkClassifier(nn.Module):
    """W_2 relu(W_1 x), the two-layer head of the Long Range Arena."""

    def __init__(self, config: MgkConfig, num_vectors: int) -> None:
        super().__init__()
        width = config.classifier_hidden_size or config.intermediate_size
        self.dense = nn.Linear(num_vectors * config.hidden_size, width)
        self.out = nn.Linear(width, config.num_labels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, num_vectors * hidden_size) -> (B, num_labels)."""
        return self.out(self.dense(x).relu())


def pool(hidden: Tensor, attention_mask: Tensor | None, pooling: str) -> Tensor:
    """(B, L, hidden_size) -> (B, hidden_size): the "cls" vector, or the mean over real tokens."""
    if pooling == "cls":
        return hidden[:, 0]
    exact = hidden.to(compute_dtype(hidden))
    if attention_mask is None:
        return exact.mean(1).to(hidden.dtype)
    weights = attention_mask.bool().to(exact.dtype).unsqueeze(-1)
    return ((exact * weights).sum(1) / weights.sum(1).clamp_min(1.0)).to(hidden.dtype)


class _Classification(MgkPreTrainedModel):
    """The transformer and the head that every classifier has."""

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
        """The pooled vector (B, hidden_size), and the transformer's output."""
        encoded = self.model(input_ids, attention_mask, use_cache=False, return_dict=True, **options)
        return pool(encoded.last_hidden_state, attention_mask, self.config.pooling), encoded

    def _classify(self, vector: Tensor, labels: Tensor | None, num_items: NumItems) -> dict[str, Tensor | None]:
        """The logits (B, num_labels) of vectors (B, num_vectors * hidden_size), and the loss where there are labels."""
        logits, loss = self.classifier(vector), None
        if labels is not None:
            loss = classification_loss(logits, labels, self.config.problem_type, num_items)
        return {"loss": loss, "logits": logits}


class MgkForSequenceClassification(_Classification):
    """Classify a sequence by the mean of its vectors, or by its "cls" vector."""

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

        Args:
            input_ids: int64 (B, L).
            attention_mask: (B, L), 1 for real tokens.
            labels: (B,) classes or, for a regression, numbers; (B, num_labels) for independent labels.
            position_ids: (B, L); see :meth:`MgkModel.forward`.
            inputs_embeds: (B, L, hidden_size), in place of ``input_ids``.
            num_items_in_batch: The targets of the whole optimizer step, for gradient accumulation; from ``Trainer``.
            **options: ``output_attentions`` and ``output_hidden_states``; see :meth:`MgkModel.forward`.
        """
        vector, encoded = self._encode(
            input_ids, attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds, **options
        )
        result = self._classify(vector, labels, num_items_in_batch)
        return SequenceClassifierOutput(**result, hidden_states=encoded.hidden_states, attentions=encoded.attentions)


class MgkForImageClassification(_Classification):
    """Classify an image: ``input_ids`` of pixel values 0 to 255 as in LRA, or with ``patch_size`` patches as in ViT."""

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
        """Logits (B, num_labels), and the loss where there are labels.

        Args:
            input_ids: int64 (B, pixels) where ``patch_size`` is None.
            pixel_values: (B, num_channels, image_size, image_size) where it is set.
            attention_mask: (B, pixels) or (B, patches), 1 for what takes part.
            labels: (B,).
            num_items_in_batch: See :meth:`MgkForSequenceClassification.forward`.
            **options: ``output_attentions`` and ``output_hidden_states``.
        """
        vector, encoded = self._encode(input_ids, attention_mask, pixel_values=pixel_values, **options)
        result = self._classify(vector, labels, num_items_in_batch)
        return ImageClassifierOutput(**result, hidden_states=encoded.hidden_states, attentions=encoded.attentions)


@dataclass
class MgkRetrievalOutput(ModelOutput):
    """The output of :class:`MgkForDocumentRetrieval`; names that end in ``_2`` are of the second document."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    hidden_states_2: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    attentions_2: tuple[Tensor, ...] | None = None


class MgkForDocumentRetrieval(_Classification):
    """Classify [x1, x2, x1 * x2, x1 - x2], x1 and x2 being the pooled vectors of two documents."""

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
        """Logits (B, num_labels), and the loss where there are labels.

        Args:
            input_ids: int64 (B, L), the first documents.
            attention_mask: (B, L), 1 for real tokens.
            input_ids_2: int64 (B, L'), the second documents.
            attention_mask_2: (B, L').
            labels: (B,).
            num_items_in_batch: See :meth:`MgkForSequenceClassification.forward`.
            **options: ``output_attentions`` and ``output_hidden_states``, for both documents.
        """
        if input_ids is None or input_ids_2 is None:
            missing = "input_ids" if input_ids is None else "input_ids_2"
            raise ValueError(f"{missing} is missing: retrieval compares two documents")
        if input_ids.shape[:1] != input_ids_2.shape[:1]:
            raise ValueError(
                f"input_ids_2 must have as many rows as input_ids, {input_ids.shape[0]}, got {input_ids_2.shape[0]}"
            )
        # one after the other: neither column is padded to the length of the other
        x1, first = self._encode(input_ids, attention_mask, **options)
        x2, second = self._encode(input_ids_2, attention_mask_2, **options)
        result = self._classify(torch.cat([x1, x2, x1 * x2, x1 - x2], -1), labels, num_items_in_batch)
        return MgkRetrievalOutput(
            **result,
            hidden_states=first.hidden_states,
            hidden_states_2=second.hidden_states,
            attentions=first.attentions,
            attentions_2=second.attentions,
        )
