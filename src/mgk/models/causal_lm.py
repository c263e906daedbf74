"""A language model with a tied or an adaptive softmax, and generation with the caches of mgk.nn."""

import copy
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from mgk.functional.mixture.inputs import compute_dtype
from mgk.models.configuration import MgkConfig
from mgk.models.losses import IGNORE, NumItems, check_targets, class_loss
from mgk.models.modeling import MgkModel, MgkPreTrainedModel, OutputOptions

# Logits at a time where only losses are needed: 2^25 numbers, 128 MB in float32.
MAX_LOGITS = 2**25


class CausalOptions(OutputOptions, total=False):
    """The arguments of :meth:`MgkForCausalLM.forward` that it does not name.

    ``Trainer`` expects every named argument with "label" in its name to be a column of each data set.
    """

    shift_labels: Tensor | None  # (B, L): the token after each, -100 where there is none; in place of labels
    num_items_in_batch: NumItems  # the targets of the whole optimizer step, for gradient accumulation


class MgkForCausalLM(MgkPreTrainedModel, GenerationMixin):
    """Predict the next token. ``config.is_decoder`` is set.

    With ``config.adaptive_cutoffs`` the softmax is PyTorch's ``AdaptiveLogSoftmaxWithLoss``. Logits are then log
    probabilities; with labels they are only computed for ``return_logits=True``, as the loss does not need those of
    the whole vocabulary.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embeddings.tokens.weight"}

    def __init__(self, config: MgkConfig) -> None:
        if not config.is_decoder:
            config = copy.deepcopy(config)
            config.is_decoder = True
        super().__init__(config)
        self.model = MgkModel(config)
        self.lm_head: nn.Linear | None = None
        self.adaptive_softmax: nn.AdaptiveLogSoftmaxWithLoss | None = None
        if config.adaptive_cutoffs is None:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        else:
            self._tied_weights_keys = {}  # type: ignore[misc]  # the adaptive softmax has vectors of its own
            self.adaptive_softmax = nn.AdaptiveLogSoftmaxWithLoss(
                config.hidden_size, config.vocab_size, config.adaptive_cutoffs, config.adaptive_div_value
            )
        self.post_init()

    @property
    def _is_stateful(self) -> bool:
        """Whether the cache cannot be cropped: transformers then refuses assisted decoding."""
        return self.config.is_linear

    def get_output_embeddings(self) -> nn.Module | None:
        """The linear map to logits; None for the adaptive softmax."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the linear map to logits."""
        if not isinstance(new_embeddings, nn.Linear):
            raise TypeError(f"the output embeddings must be an nn.Linear, got {type(new_embeddings).__name__}")
        self.lm_head = new_embeddings

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Change the size of the vocabulary; an adaptive softmax, whose clusters are fixed, raises."""
        if self.adaptive_softmax is not None and (new_num_tokens is not None or args or kwargs):
            raise ValueError("an adaptive softmax cannot be resized: its clusters are cut for adaptive_cutoffs")
        return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        **options: Unpack[CausalOptions],
    ) -> CausalLMOutputWithPast:
        """Logits (B, L, vocab_size), and the loss where there are targets.

        Args:
            input_ids: int64 (B, L).
            attention_mask: (B, L), 1 for real tokens; with a cache (B, past + L).
            position_ids: (B, L); see :meth:`MgkModel.forward`, also for the next two and ``use_cache``.
            past_key_values: The tokens before these, as an earlier call returned them.
            inputs_embeds: (B, L, hidden_size), in place of ``input_ids``.
            labels: (B, L): the tokens themselves, shifted inside; -100 is ignored.
            use_cache: Whether to return ``past_key_values``.
            logits_to_keep: Logits of so many last positions only, or of the positions in a tensor; 0 for all.
            return_logits: Whether to return logits; None: unless an adaptive softmax has targets.
            **options: ``shift_labels`` (B, L), targets as :class:`mgk.data.SegmentDataset` has them;
                ``num_items_in_batch`` from ``Trainer``; ``output_attentions`` and ``output_hidden_states``.
        """
        targets = options.pop("shift_labels", None)
        num_items = options.pop("num_items_in_batch", None)
        decoded = self.model(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **options,
        )
        hidden = decoded.last_hidden_state
        if targets is None and labels is not None:
            targets = pad(labels, (0, 1), value=IGNORE)[:, 1:]
        if return_logits is None:
            return_logits = self.adaptive_softmax is None or targets is None
        logits = self._logits(hidden, logits_to_keep) if return_logits else None
        loss = None
        if targets is not None:
            _check_shape("labels", targets, hidden)
            is_whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
            if logits is not None and is_whole and self.lm_head is not None:
                loss = class_loss(logits.flatten(0, 1), targets.flatten().to(logits.device), num_items, "vocab_size")
            else:
                losses = self._losses(hidden, targets)
                loss = losses.mean() if num_items is None else losses.sum() / num_items
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=decoded.past_key_values,
            hidden_states=decoded.hidden_states,
            attentions=decoded.attentions,
        )

    def token_losses(self, input_ids: Tensor, targets: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """-log p(target) for each position (B, L), 0 where the target is -100.

        Logits are computed only for the positions that have a target, some at a time.

        Args:
            input_ids: int64 (B, L).
            targets: int64 (B, L), the token after each; -100 is ignored.
            attention_mask: (B, L), 1 for real tokens.
        """
        device = self.model.norm.weight.device
        hidden = self.model(input_ids.to(device), attention_mask, use_cache=False, return_dict=True).last_hidden_state
        _check_shape("targets", targets, hidden)
        targets = targets.to(device)
        losses = hidden.new_zeros(targets.shape, dtype=compute_dtype(hidden))
        losses[targets != IGNORE] = self._losses(hidden, targets)
        return losses

    def _logits(self, hidden: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = hidden[:, keep]
        if self.lm_head is not None:
            return self.lm_head(hidden)
        assert self.adaptive_softmax is not None
        return self.adaptive_softmax.log_prob(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """-log p(target) (N,) of the N targets of vectors (B, L, hidden_size)."""
        has_target = targets != IGNORE
        hidden, targets = hidden[has_target], targets[has_target]
        check_targets(targets, self.config.vocab_size, "vocab_size")
        dtype = compute_dtype(hidden)
        if targets.numel() == 0:
            return hidden.to(dtype).sum(-1)
        if self.adaptive_softmax is not None:
            return -self.adaptive_softmax(hidden, targets).output.to(dtype)
        assert self.lm_head is not None
        rows = max(1, MAX_LOGITS // self.config.vocab_size)
        pieces = zip(hidden.split(rows), targets.split(rows), strict=True)
        return torch.cat([cross_entropy(self.lm_head(x).to(dtype), t, reduction="none") for x, t in pieces])

    def _validate_generated_length(
        self, generation_config: Any, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        """Raise before generation where it would pass the last learned position."""
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)
        length, limit = generation_config.max_length, self.config.max_position_embeddings
        if self.config.position == "learned" and length - 1 > limit:  # the last token is predicted, never read
            raise ValueError(
                f"generation to {length} tokens needs {length - 1} positions, and position='learned' has"
                f" max_position_embeddings={limit}: choose a smaller max_new_tokens"
            )


def _check_shape(name: str, targets: Tensor, hidden: Tensor) -> None:
    if targets.shape != hidden.shape[:2]:
        raise ValueError(
            f"{name} must have the shape of input_ids, {tuple(hidden.shape[:2])}, got {tuple(targets.shape)}"
        )
