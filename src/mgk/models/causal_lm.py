"""A language model with a tied softmax or PyTorch's adaptive one, and generation with the core's caches."""

import copy
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from mgk.functional.mixture.inputs import compute_dtype
from mgk.models.configuration import MgkConfig
from mgk.models.losses import IGNORE, Items, average, check_targets
from mgk.models.modeling import MgkModel, MgkPreTrainedModel

# Logits at a time where only losses are wanted: 2^25 numbers, 128 MB in float32.
_MOST_LOGITS = 2**25


class LossOptions(TypedDict, total=False):
    """What :meth:`MgkForCausalLM.forward` takes beside its named arguments.

    ``Trainer`` takes every argument with "label" in its name for one that each data set has: so this one is not named.
    """

    shift_labels: Tensor | None  # (B, L): the token after each, -100 where there is none; in place of labels
    num_items_in_batch: Items  # the targets of the whole optimizer step, for gradient accumulation


_LOSS_OPTIONS = frozenset(LossOptions.__annotations__)


class MgkForCausalLM(MgkPreTrainedModel, GenerationMixin):
    """Predict the next token. ``config.is_decoder`` is set.

    With ``config.adaptive_cutoffs`` the softmax is PyTorch's ``AdaptiveLogSoftmaxWithLoss``: logits are then log
    probabilities, and with labels they are left out unless ``return_logits=True`` asks for them, as the loss does not
    need those of the whole vocabulary.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embeddings.tokens.weight"}

    def __init__(self, config: MgkConfig) -> None:
        if not config.is_decoder:
            config = copy.deepcopy(config)
            config.is_decoder = True
        super().__init__(config)
        if config.patch_size is not None:
            raise ValueError("a language model is made of tokens: patch_size must be None")
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
        """The map to logits; None for the adaptive softmax."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the map to logits."""
        if not isinstance(new_embeddings, nn.Linear):
            raise TypeError(f"the output embeddings must be an nn.Linear, got {type(new_embeddings).__name__}")
        self.lm_head = new_embeddings

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Change the vocabulary's size; the clusters of an adaptive softmax are fixed, so that raises."""
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
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_logits: bool | None = None,
        **options: Unpack[LossOptions],
    ) -> CausalLMOutputWithPast:
        """Logits (B, L, vocab_size), and the loss where there are targets.

        Args:
            input_ids: int64 (B, L).
            attention_mask: (B, L), 1 for real tokens; with a cache (B, past + L).
            position_ids: (B, L); see :meth:`MgkModel.forward`.
            past_key_values: The tokens before these, as an earlier call returned them.
            inputs_embeds: (B, L, hidden_size), in place of ``input_ids``.
            labels: (B, L): the tokens themselves, shifted inside; -100 does not count.
            use_cache: Whether to return ``past_key_values``; ``config.use_cache`` if not given, False in training.
            output_attentions: Whether to return the weights of every layer.
            output_hidden_states: Whether to return every layer's output.
            logits_to_keep: Logits of so many last positions only, or of the positions in a tensor; 0 for all.
            return_logits: Whether to return logits; if not given, unless an adaptive softmax has targets.
            **options: ``shift_labels`` (B, L), targets as :class:`mgk.data.SegmentDataset` gives them, and
                ``num_items_in_batch``, which ``Trainer`` gives.
        """
        for name in options:
            if name not in _LOSS_OPTIONS:
                raise TypeError(f"forward() got an unexpected argument {name!r}")
        decoded = self.model(
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        hidden = decoded.last_hidden_state
        targets = options.get("shift_labels")
        if targets is None and labels is not None:
            targets = pad(labels, (0, 1), value=IGNORE)[:, 1:]
        if return_logits is None:
            return_logits = self.adaptive_softmax is None or targets is None
        logits = self._logits(hidden, logits_to_keep) if return_logits else None
        loss = None
        if targets is not None:
            if targets.shape != hidden.shape[:2]:
                raise ValueError(
                    f"labels must have the shape of input_ids, {tuple(hidden.shape[:2])}, got {tuple(targets.shape)}"
                )
            is_whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
            loss = self._loss(hidden, logits if is_whole else None, targets, options.get("num_items_in_batch"))
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=decoded.past_key_values,
            hidden_states=decoded.hidden_states,
            attentions=decoded.attentions,
        )

    def token_losses(self, input_ids: Tensor, targets: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """-log p(target) for each position (B, L), 0 where the target is -100.

        Logits over the vocabulary are made for the positions that count only, some at a time:
        ``mgk.data.sliding_window_loss(model.token_losses, tokens)`` asks for the last of 256.

        Args:
            input_ids: int64 (B, L).
            targets: int64 (B, L), the token after each; -100 does not count.
            attention_mask: (B, L), 1 for real tokens.
        """
        device = self.model.norm.weight.device
        hidden = self.model(input_ids.to(device), attention_mask, use_cache=False, return_dict=True).last_hidden_state
        if targets.shape != hidden.shape[:2]:
            raise ValueError(
                f"targets must have the shape of input_ids, {tuple(hidden.shape[:2])}, got {tuple(targets.shape)}"
            )
        targets = targets.to(device)
        counts = targets != IGNORE
        losses = hidden.new_zeros(targets.shape, dtype=compute_dtype(hidden))
        losses[counts] = self._losses(hidden[counts], targets[counts])
        return losses

    def _logits(self, hidden: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = hidden[:, keep]
        if self.lm_head is not None:
            return self.lm_head(hidden)
        assert self.adaptive_softmax is not None
        return self.adaptive_softmax.log_prob(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])

    def _loss(self, hidden: Tensor, logits: Tensor | None, targets: Tensor, num_items: Items) -> Tensor:
        if logits is None or self.lm_head is None:
            counts = targets != IGNORE
            return average(self._losses(hidden[counts], targets[counts]), num_items)
        check_targets("labels", targets, self.config.vocab_size, "vocab_size")
        reduction = "mean" if num_items is None else "sum"
        flat = logits.to(compute_dtype(logits)).flatten(0, 1)
        loss = cross_entropy(flat, targets.flatten().to(flat.device), ignore_index=IGNORE, reduction=reduction)
        return loss if num_items is None else loss / num_items

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """-log p(target) (N,) of vectors (N, hidden_size)."""
        check_targets("labels", targets, self.config.vocab_size, "vocab_size")
        dtype = compute_dtype(hidden)
        if targets.numel() == 0:
            return hidden.to(dtype).sum(-1)
        if self.adaptive_softmax is not None:
            return -self.adaptive_softmax(hidden, targets).output.to(dtype)
        assert self.lm_head is not None
        rows = max(1, _MOST_LOGITS // self.config.vocab_size)
        pieces = zip(hidden.split(rows), targets.split(rows), strict=True)
        return torch.cat([cross_entropy(self.lm_head(x).to(dtype), t, reduction="none") for x, t in pieces])

    def _validate_generated_length(
        self, generation_config: Any, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        """Refuse at once what would fail after the last learned position."""
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)
        length, limit = generation_config.max_length, self.config.max_position_embeddings
        if self.config.position == "learned" and length - 1 > limit:  # the last token is predicted, never read
            raise ValueError(
                f"generation to {length} tokens needs {length - 1} positions, and position='learned' has"
                f" max_position_embeddings={limit}: choose a smaller max_new_tokens"
            )
