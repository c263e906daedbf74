"""A language model with a tied or an adaptive softmax."""

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
from mgk.functional.validation import is_autocast_on, is_unobserved
from mgk.models.configuration import MgkConfig
from mgk.models.linear_cross_entropy import sum_of_adaptive_losses
from mgk.models.modeling import (
    IGNORE,
    MgkModel,
    MgkPreTrainedModel,
    NumItems,
    OutputOptions,
    check_attn_implementation,
    check_shape,
    check_targets,
    class_loss,
)

# Logits at a time where only losses are needed: 128 MB in float32.
MAX_LOGITS = 2**25


class CausalOptions(OutputOptions, total=False):
    """Arguments of :meth:`MgkForCausalLM.forward` that it does not name.

    ``Trainer`` takes each named argument with "label" in it for a data column.
    """

    shift_labels: Tensor | None  # (B, L), the token after each; -100 is ignored
    num_items_in_batch: NumItems  # targets of the whole optimizer step


class MgkForCausalLM(MgkPreTrainedModel, GenerationMixin):
    """Predict the next token. ``config.is_decoder`` is set.

    With ``config.adaptive_cutoffs`` the softmax is ``AdaptiveLogSoftmaxWithLoss``
    and logits are log probabilities; with labels, ``return_logits=True`` asks for them.
    """

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embeddings.tokens.weight"}

    def __init__(self, config: MgkConfig) -> None:
        check_attn_implementation(config)
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
            self._tied_weights_keys = {}  # type: ignore[misc]
            self.adaptive_softmax = nn.AdaptiveLogSoftmaxWithLoss(
                config.hidden_size,
                config.vocab_size,
                config.adaptive_cutoffs,
                config.adaptive_div_value,
            )
        self.post_init()

    @property
    def _is_stateful(self) -> bool:
        """Whether the cache cannot be cropped, as assisted decoding needs."""
        return self.config.is_linear

    def get_output_embeddings(self) -> nn.Module | None:
        """The linear map to logits; None for the adaptive softmax."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the linear map to logits."""
        if not isinstance(new_embeddings, nn.Linear):
            got = type(new_embeddings).__name__
            raise TypeError(f"the output embeddings must be an nn.Linear, got {got}")
        self.lm_head = new_embeddings

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Embedding:
        """Change the vocabulary's size; an adaptive softmax raises."""
        if self.adaptive_softmax is not None and (new_num_tokens is not None or args or kwargs):
            raise ValueError("an adaptive softmax cannot be resized: adaptive_cutoffs are fixed")
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
            labels: (B, L), the tokens themselves; -100 is ignored, as for the first
                token of a packed sequence.
            logits_to_keep: So many last positions, or positions; 0: all.
            return_logits: None: unless an adaptive softmax has targets.
            **options: ``shift_labels`` (B, L), the token after each, in place of
                ``labels``; ``num_items_in_batch``; and those of :meth:`MgkModel.forward`,
                which has the other arguments too.
        """
        targets = options.pop("shift_labels", None)
        num_items = options.pop("num_items_in_batch", None)
        given = input_ids if inputs_embeds is None else inputs_embeds
        if targets is None and labels is not None:
            check_shape("labels", labels, given)
            targets = pad(labels, (0, 1), value=IGNORE)[:, 1:]
        if targets is not None:  # before the cache grows
            check_shape("labels", targets, given)
            check_targets(targets, self.config.vocab_size, "vocab_size")
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
        if return_logits is None:
            return_logits = self.adaptive_softmax is None or targets is None
        logits = self._logits(hidden, logits_to_keep) if return_logits else None
        loss = None
        if targets is not None:
            is_whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
            if logits is not None and is_whole and self.lm_head is not None:
                flat = targets.flatten().to(logits.device)
                loss = class_loss(logits.flatten(0, 1), flat, num_items, "vocab_size")
            else:
                has_target = targets != IGNORE
                total = self._loss_sum(hidden[has_target], targets[has_target])
                loss = total / (has_target.sum() if num_items is None else num_items)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=decoded.past_key_values,
            hidden_states=decoded.hidden_states,
            attentions=decoded.attentions,
        )

    def token_losses(self, input_ids: Tensor, targets: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """-log p(target) (B, L), 0 where the target is -100.

        ``targets`` (B, L) are the token after each. Few logits exist at a time.
        """
        device = self.model.norm.weight.device
        input_ids = input_ids.to(device)
        decoded = self.model(input_ids, attention_mask, use_cache=False, return_dict=True)
        hidden = decoded.last_hidden_state
        check_shape("targets", targets, hidden)
        targets = targets.to(device)
        losses = hidden.new_zeros(targets.shape, dtype=compute_dtype(hidden))
        has_target = targets != IGNORE
        losses[has_target] = self._losses(hidden[has_target], targets[has_target])
        return losses

    def _logits(self, hidden: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        is_count = isinstance(logits_to_keep, int)
        hidden = hidden[:, slice(-logits_to_keep, None) if is_count else logits_to_keep]
        if self.lm_head is not None:
            return self.lm_head(hidden)
        assert self.adaptive_softmax is not None
        log_prob = self.adaptive_softmax.log_prob(hidden.flatten(0, 1))
        return log_prob.unflatten(0, hidden.shape[:2])

    def _loss_sum(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """-sum log p(target), of hidden (N, hidden_size) and N targets."""
        softmax = self.adaptive_softmax
        is_chunked = softmax is not None and hidden.dtype == torch.float32 and hidden.requires_grad
        if not (is_chunked and targets.numel() and is_unobserved()) or is_autocast_on(hidden):
            return self._losses(hidden, targets).sum()
        assert softmax is not None
        return sum_of_adaptive_losses(hidden, softmax, targets)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """-log p(target) (N,) of the N targets."""
        check_targets(targets, self.config.vocab_size, "vocab_size")
        dtype = compute_dtype(hidden)
        if targets.numel() == 0:
            return hidden.to(dtype).sum(-1)
        if self.adaptive_softmax is not None:
            return -self.adaptive_softmax(hidden, targets).output.to(dtype)
        assert self.lm_head is not None
        rows = max(1, MAX_LOGITS // self.config.vocab_size)
        losses = []
        for x, t in zip(hidden.split(rows), targets.split(rows), strict=True):
            logits = self.lm_head(x).to(dtype)
            losses.append(cross_entropy(logits, t, reduction="none"))
        return torch.cat(losses)

    @staticmethod
    def create_masks_for_generate(
        inputs_embeds: Tensor, attention_mask: Tensor | None, past_key_values: Cache, **unused: Any
    ) -> Tensor:
        """The mask (B, places of a static cache), of constant shape."""
        if attention_mask is None:
            attention_mask = inputs_embeds.new_zeros((inputs_embeds.shape[0], 0), dtype=torch.long)
        missing = past_key_values.get_max_length() - attention_mask.shape[1]
        return pad(attention_mask, (0, missing), value=1)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """ValueError: its paged cache has no place for mixtures of keys."""
        advice = "use generate() on padded batches"
        raise ValueError(f"continuous batching (a paged cache) is not supported: {advice}")

    def _validate_generated_length(
        self, generation_config: Any, input_ids_length: int, has_default_max_length: bool
    ) -> None:
        """Raise where generation would pass the last learned position."""
        super()._validate_generated_length(generation_config, input_ids_length, has_default_max_length)
        length, limit = generation_config.max_length, self.config.max_position_embeddings
        needed = length - 1  # the last token is not read
        if self.config.position == "learned" and needed > limit:
            have = f"position='learned' has max_position_embeddings={limit}"
            want = f"generation to {length} tokens needs {needed} positions"
            raise ValueError(f"{want}, and {have}: choose a smaller max_new_tokens")
