"""Classification of sequences, with the head that all classifiers share."""

from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple

from mgk.functional.mixture.inputs import compute_dtype
from mgk.models.configuration import MgkConfig
from mgk.models.losses import classification_loss
from mgk.models.modeling import MgkModel, MgkPreTrainedModel


class MgkClassifier(nn.Module):
    """W_2 relu(W_1 x), the two-layer head of the Long Range Arena."""

    def __init__(self, config: MgkConfig, *, num_vectors: int = 1) -> None:
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


class MgkForSequenceClassification(MgkPreTrainedModel):
    """Classify a sequence by the mean of its vectors, or by its "cls" vector."""

    def __init__(self, config: MgkConfig) -> None:
        super().__init__(config)
        if config.patch_size is not None:
            raise ValueError("a sequence is made of tokens: patch_size must be None; use MgkForImageClassification")
        self.num_labels = config.num_labels
        self.model = MgkModel(config)
        self.classifier = MgkClassifier(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> SequenceClassifierOutput:
        """Logits (B, num_labels), and the loss where there are labels.

        Args:
            input_ids: int64 (B, L).
            attention_mask: (B, L), 1 for real tokens.
            position_ids: (B, L); see :meth:`MgkModel.forward`.
            inputs_embeds: (B, L, hidden_size), in place of ``input_ids``.
            labels: (B,) classes or, for a regression, numbers; (B, num_labels) for independent labels.
            output_attentions: Whether to return the weights of every layer.
            output_hidden_states: Whether to return every layer's output.
            num_items_in_batch: The targets of the whole optimizer step, for gradient accumulation; ``Trainer`` tells.
        """
        encoded = self.model(
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits = self.classifier(pool(encoded.last_hidden_state, attention_mask, self.config.pooling))
        loss = None
        if labels is not None:
            loss = classification_loss(logits, labels, self.config.problem_type, num_items_in_batch)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )
