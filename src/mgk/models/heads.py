"""Heads of an encoder: classification, masked tokens, question answering."""

from dataclasses import dataclass
from typing import Any, ClassVar, Unpack, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    ImageClassifierOutput,
    MaskedLMOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput, can_return_tuple

from mgk.functional.mixture.inputs import compute_dtype
from mgk.models.configuration import MgkConfig
from mgk.models.modeling import (
    IGNORE,
    MgkModel,
    MgkPreTrainedModel,
    NumItems,
    OutputOptions,
    check_shape,
    class_loss,
    classification_loss,
)
from mgk.models.packing import PackingOptions, find_segments, mean_of_segments


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
    """The first vector for "cls", else the mean over real tokens."""
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
        """The pooled vector (B or segments, hidden_size), and the output."""
        given = input_ids if input_ids is not None else options.get("inputs_embeds")
        ids = None
        if given is not None and given.ndim > 1:
            packing, sizes = cast("PackingOptions", options), (given.shape[0], given.shape[1])
            ids = find_segments(packing, options.get("position_ids"), attention_mask, sizes)
            options["seq_idx"] = ids
        encoded = self.model(input_ids, attention_mask, use_cache=False, return_dict=True, **options)
        hidden = encoded.last_hidden_state
        if ids is not None:
            return mean_of_segments(hidden, ids, attention_mask), encoded
        return pool(hidden, attention_mask, self.config.pooling), encoded

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

        Of packed rows (``position_ids`` that restart, ``seq_idx``, ``cu_seq_lens_q``) the
        logits are (segments, num_labels), in row order, and so are the labels.
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
        for name in PackingOptions.__annotations__:
            if options.get(name) is not None:
                advice = "give one pair of documents per row"
                raise ValueError(f"{name} has no meaning for retrieval: {advice}")
        # not in one batch: neither is padded to the length of the other
        x1, first = self._encode(input_ids, attention_mask, **options)
        x2, second = self._encode(input_ids_2, attention_mask_2, **options)
        vector = torch.cat([x1, x2, x1 * x2, x1 - x2], -1)
        result = self._classify(vector, labels, num_items_in_batch)
        of_second = {f"{name}_2": states for name, states in _states(second).items()}
        return MgkRetrievalOutput(**result, **_states(first), **of_second)


class _TokenHead(MgkPreTrainedModel):
    """A linear map ``head_name`` of every token's vector."""

    head_name: str

    def __init__(self, config: MgkConfig, num_outputs: int, *, bias: bool = True) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = MgkModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.add_module(self.head_name, nn.Linear(config.hidden_size, num_outputs, bias=bias))
        self.post_init()

    def _encode(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, BaseModelOutputWithPast]:
        """Logits (B, L, outputs), and all of the encoder's output."""
        encoded = self.model(input_ids, attention_mask, use_cache=False, return_dict=True, **options)
        hidden = encoded.last_hidden_state
        if self.config.pooling == "cls":
            hidden = hidden[:, 1:]  # its first vector is no token
        return self.get_submodule(self.head_name)(self.dropout(hidden)), encoded


class _TokenLabels(_TokenHead):
    """A class for every token; ``num_classes``: the option of their number."""

    num_classes: ClassVar[str]
    output: ClassVar[type[TokenClassifierOutput | MaskedLMOutput]]

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
    ) -> TokenClassifierOutput | MaskedLMOutput:
        """Logits (B, L, classes), and the loss of ``labels`` (B, L).

        The rest is as in :meth:`MgkForSequenceClassification.forward`.
        """
        given = {"position_ids": position_ids, "inputs_embeds": inputs_embeds, **options}
        logits, encoded = self._encode(input_ids, attention_mask, **given)
        loss = None
        if labels is not None:
            check_shape("labels", labels, logits)
            flat = logits.flatten(0, 1), labels.flatten()
            loss = class_loss(*flat, num_items_in_batch, self.num_classes)
        return self.output(loss=loss, logits=logits, **_states(encoded))


class MgkForTokenClassification(_TokenLabels):
    """Classify every token."""

    head_name = "classifier"
    num_classes = "num_labels"
    output = TokenClassifierOutput

    def __init__(self, config: MgkConfig) -> None:
        super().__init__(config, config.num_labels)


class MgkForMaskedLM(_TokenLabels):
    """Predict masked tokens, by the token vectors if they are tied."""

    head_name = "lm_head"
    num_classes = "vocab_size"
    output = MaskedLMOutput
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embeddings.tokens.weight"}

    def __init__(self, config: MgkConfig) -> None:
        for name in ("is_decoder", "adaptive_cutoffs"):
            if getattr(config, name):
                raise ValueError(f"{name} must not be set for MgkForMaskedLM: MgkForCausalLM has it")
        super().__init__(config, config.vocab_size, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        """The linear map to logits."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the linear map to logits."""
        self.lm_head = new_embeddings


class MgkForQuestionAnswering(_TokenHead):
    """The first and the last token of an answer in the text."""

    head_name = "qa_outputs"

    def __init__(self, config: MgkConfig) -> None:
        super().__init__(config, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: NumItems = None,
        **options: Unpack[OutputOptions],
    ) -> QuestionAnsweringModelOutput:
        """Logits of start and end, (B, L) each, and the mean of both losses.

        ``start_positions`` and ``end_positions`` (B,) beyond the input are ignored.
        """
        given = {"position_ids": position_ids, "inputs_embeds": inputs_embeds, **options}
        logits, encoded = self._encode(input_ids, attention_mask, **given)
        start, end = logits.unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            losses = [
                class_loss(scores, _within(places, scores.shape[1]), num_items_in_batch, "L")
                for scores, places in ((start, start_positions), (end, end_positions))
            ]
            loss = (losses[0] + losses[1]) / 2
        logits_of = {"start_logits": start.contiguous(), "end_logits": end.contiguous()}
        return QuestionAnsweringModelOutput(loss=loss, **logits_of, **_states(encoded))


def _within(places: Tensor, length: int) -> Tensor:
    places = places.view(-1)
    return places.masked_fill((places < 0) | (places >= length), IGNORE)
