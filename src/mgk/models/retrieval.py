"""Does one document match another: both through one encoder."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import ModelOutput, can_return_tuple

from mgk.models.classification import MgkClassifier, pool
from mgk.models.configuration import MgkConfig
from mgk.models.losses import classification_loss
from mgk.models.modeling import MgkModel, MgkPreTrainedModel


@dataclass
class MgkRetrievalOutput(ModelOutput):
    """The output of :class:`MgkForDocumentRetrieval`; names that end in ``_2`` are of the second document."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    hidden_states_2: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    attentions_2: tuple[Tensor, ...] | None = None


class MgkForDocumentRetrieval(MgkPreTrainedModel):
    """Classify [x1, x2, x1 * x2, x1 - x2], x1 and x2 being the pooled vectors of two documents."""

    def __init__(self, config: MgkConfig) -> None:
        super().__init__(config)
        if config.patch_size is not None:
            raise ValueError("a document is made of tokens: patch_size must be None")
        self.num_labels = config.num_labels
        self.model = MgkModel(config)
        self.classifier = MgkClassifier(config, num_vectors=4)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_ids_2: Tensor | None = None,
        attention_mask_2: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> MgkRetrievalOutput:
        """Logits (B, num_labels), and the loss where there are labels.

        Args:
            input_ids: int64 (B, L), the first documents.
            attention_mask: (B, L), 1 for real tokens.
            input_ids_2: int64 (B, L'), the second documents.
            attention_mask_2: (B, L').
            labels: (B,).
            output_attentions: Whether to return the weights of every layer, for both documents.
            output_hidden_states: Whether to return every layer's output, for both documents.
            num_items_in_batch: The targets of the whole optimizer step, for gradient accumulation; ``Trainer`` tells.
        """
        for name, ids in (("input_ids", input_ids), ("input_ids_2", input_ids_2)):
            if ids is None:
                raise ValueError(f"{name} is missing: retrieval compares two documents")
        assert input_ids is not None
        assert input_ids_2 is not None
        if input_ids.shape[:1] != input_ids_2.shape[:1]:
            raise ValueError(
                f"input_ids_2 must have as many rows as input_ids, {input_ids.shape[0]}, got {input_ids_2.shape[0]}"
            )
        # one after the other: no document is padded to the length of another column's
        first = self._encode(input_ids, attention_mask, output_attentions, output_hidden_states)
        second = self._encode(input_ids_2, attention_mask_2, output_attentions, output_hidden_states)
        x1 = pool(first.last_hidden_state, attention_mask, self.config.pooling)
        x2 = pool(second.last_hidden_state, attention_mask_2, self.config.pooling)
        logits = self.classifier(torch.cat([x1, x2, x1 * x2, x1 - x2], -1))
        loss = None
        if labels is not None:
            loss = classification_loss(logits, labels, self.config.problem_type, num_items_in_batch)
        return MgkRetrievalOutput(
            loss=loss,
            logits=logits,
            hidden_states=first.hidden_states,
            hidden_states_2=second.hidden_states,
            attentions=first.attentions,
            attentions_2=second.attentions,
        )

    def _encode(
        self, input_ids: Tensor, mask: Tensor | None, need_weights: bool | None, need_hidden: bool | None
    ) -> BaseModelOutputWithPast:
        return self.model(
            input_ids,
            mask,
            use_cache=False,
            output_attentions=need_weights,
            output_hidden_states=need_hidden,
            return_dict=True,
        )
