"""``MgkModel``, the transformer below every head, and what all models have in common."""

import os
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple, logging

from mgk.functional.linear.feature_maps import favor_projection
from mgk.models.configuration import MgkConfig
from mgk.models.embeddings import MgkEmbeddings
from mgk.models.layers import MgkLayer
from mgk.models.loading import checked_from_pretrained
from mgk.models.model_card import write_card
from mgk.models.transformers_cache import core_cache, new_cache
from mgk.nn import Favor, MixtureAttention, m_step_all, rotary_tables
from mgk.nn.em import EMModule
from mgk.nn.priors import LearnedPrior
from mgk.nn.variances import LearnedVariance

_log = logging.get_logger(__name__)


class MgkPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation, the same for every model here."""

    config: MgkConfig
    config_class = MgkConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    # A loss is told how many targets an optimizer step has in all, so gradient accumulation averages over all of them.
    accepts_loss_kwargs = True
    _no_split_modules: ClassVar[list[str]] = ["MgkLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    # Counts pass float16's 65,504 in one forward: the M-step's buffers stay in float32.
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = [
        r"prior\.(pi|counts)",
        r"variance\.(sigma2|counts|distances)",
    ]

    def __init__(self, config: MgkConfig, *args: Any, **kwargs: Any) -> None:
        config.check()  # again: attributes may have been set since it was made
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any) -> Any:
        """Load weights from safetensors; a folder that is incomplete, corrupt or of another variant raises.

        Every weight of the transformer must be there, and every weight of the head if the checkpoint is of this class
        (``architectures`` in its ``config.json``). From a checkpoint of another class, e.g. ``MgkModel``'s for a
        classifier, the transformer is loaded and a head that is not there starts anew.
        """
        load = super().from_pretrained
        return checked_from_pretrained(cls, load, name_or_path, *args, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save configuration and weights (safetensors), and a model card that says what was trained on what.

        The card tells of ``config.training`` where that is set, see :func:`mgk.models.write_card`.
        """
        super().save_pretrained(save_directory, *args, **kwargs)
        is_main = args[0] if args else kwargs.get("is_main_process", True)
        if is_main:
            write_card(save_directory, self.config)

    def m_step(self) -> None:
        """Update the "em" priors and variances of all layers: once per optimizer step, on every rank."""
        m_step_all(self)

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: ``_init_weights`` keeps loaded weights by itself, so no module needs to be left out as a whole."""
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Fill what is not loaded: every parameter and buffer of ours, by functions that leave loaded ones alone."""
        if isinstance(module, MixtureAttention | LearnedPrior | LearnedVariance | EMModule):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Conv2d):
            init.xavier_uniform_(module.weight.flatten(1) if module.weight.ndim > 2 else module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, MgkEmbeddings) and module.cls is not None:
            init.normal_(module.cls, std=self.config.initializer_range)
        elif isinstance(module, Favor):
            seed = int(torch.randint(2**31, (), device="cpu"))
            init.copy_(module.projection, favor_projection(module.head_dim, module.num_features, seed))


class MgkModel(MgkPreTrainedModel):
    """A pre-norm transformer: an encoder, or with ``config.is_decoder`` a causal decoder."""

    def __init__(self, config: MgkConfig) -> None:
        super().__init__(config)
        self.embeddings = MgkEmbeddings(config)
        self.layers = nn.ModuleList(MgkLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        if config.patch_size is not None:
            self.main_input_name = "pixel_values"
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The table of token vectors, or the map of patches."""
        module = self.embeddings.tokens or self.embeddings.patches
        assert module is not None
        return module

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the table of token vectors."""
        if not isinstance(value, nn.Embedding) or self.embeddings.tokens is None:
            raise TypeError(f"the input embeddings must be an nn.Embedding of tokens, got {type(value).__name__}")
        self.embeddings.tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Encode tokens (B, L), vectors (B, L, hidden_size), or images (B, C, H, W).

        Args:
            input_ids: int64 (B, L).
            attention_mask: (B, L), 1 or True for real tokens; with a cache (B, past + L).
            position_ids: (B, L) or (1, L); if not given, real tokens are counted from 0 on, on whatever side the
                padding is.
            past_key_values: Of a decoder: the tokens before these.
            inputs_embeds: In place of ``input_ids``.
            pixel_values: Of a model with ``config.patch_size``.
            use_cache: Whether to return ``past_key_values``; ``config.use_cache`` if not given, False in training.
            output_attentions: Whether to return the attention weights of every layer, (B, H, L, S) each.
            output_hidden_states: Whether to return the embeddings and every layer's output, the last one normed.

        Returns:
            ``last_hidden_state`` (B, L, hidden_size), after the last norm; where pooling is "cls", the first of L + 1
            is that of the learned vector.
        """
        vectors = self._vectors(input_ids, inputs_embeds, pixel_values)
        batch, length = vectors.shape[:2]
        cache = self._cache(past_key_values, use_cache)
        caches = None if cache is None else [core_cache(cache, i, x) for i, x in enumerate(self._attentions())]
        past = 0 if caches is None else caches[0].length
        need_weights = self.config.output_attentions if output_attentions is None else output_attentions
        need_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if need_weights and past and self.config.is_linear:
            raise ValueError(
                f"output_attentions cannot look into the state of attention={self.config.attention!r}, which sums up"
                " the past: use use_cache=False"
            )
        key_mask = _key_mask(attention_mask, batch, past + length)
        position_ids = self._positions(position_ids, key_mask, past, length, vectors.device)
        hidden = self.embeddings(vectors, position_ids)
        if self.embeddings.cls is not None:
            if key_mask is not None:
                key_mask = nn.functional.pad(key_mask, (1, 0), value=True)
            if self.config.position == "rotary":
                position_ids = nn.functional.pad(position_ids, (1, 0))
        rotary = None
        if self.config.position == "rotary":
            rotary = rotary_tables(position_ids, self._attentions()[0].head_dim)
        all_hidden, all_weights = [hidden], []
        for index, layer in enumerate(self.layers):
            hidden, weights = layer(
                hidden,
                key_mask=key_mask,
                is_causal=self.config.is_decoder,
                rotary=rotary,
                cache=None if caches is None else caches[index],
                need_weights=need_weights,
            )
            all_hidden.append(hidden)
            all_weights.append(weights)
        hidden = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=(*all_hidden[:-1], hidden) if need_hidden else None,
            attentions=tuple(all_weights) if need_weights else None,
        )

    def _attentions(self) -> list[MixtureAttention]:
        return [layer.attention for layer in self.layers]  # type: ignore[misc]  # a list of MgkLayer

    def _vectors(self, input_ids: Any, inputs_embeds: Any, pixel_values: Any) -> Tensor:
        given = [x for x in (input_ids, inputs_embeds, pixel_values) if x is not None]
        if len(given) != 1:
            raise ValueError(f"give one of input_ids, inputs_embeds and pixel_values, got {len(given)} of them")
        if pixel_values is not None:
            if self.embeddings.patches is None:
                raise ValueError("pixel_values were given to a model of tokens (patch_size is not set): give input_ids")
            return self.embeddings.patches(pixel_values)
        if input_ids is not None:
            if input_ids.ndim != 2 or input_ids.is_floating_point():
                raise ValueError(
                    f"input_ids must be whole numbers of shape (B, L), got {input_ids.dtype} of shape"
                    f" {tuple(input_ids.shape)}"
                )
            return self.embeddings.look_up(input_ids)
        if inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != self.config.hidden_size:
            raise ValueError(
                f"inputs_embeds must have shape (B, L, {self.config.hidden_size}), got {tuple(inputs_embeds.shape)}"
            )
        return inputs_embeds

    def _cache(self, past_key_values: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache that this forward reads and extends, if there is one."""
        if not self.config.is_decoder:
            if past_key_values is not None:
                raise ValueError("past_key_values has no meaning for an encoder: it needs is_decoder=True")
            return None
        if self.gradient_checkpointing and self.training:
            if past_key_values is not None:
                raise ValueError("past_key_values cannot be used with gradient checkpointing, which runs layers twice")
            if use_cache:
                _log.warning_once("use_cache=True is ignored: gradient checkpointing runs layers twice")
            return None
        if past_key_values is not None:
            return past_key_values
        wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        return new_cache() if wanted else None

    def _positions(
        self, position_ids: Tensor | None, key_mask: Tensor | None, past: int, length: int, device: torch.device
    ) -> Tensor:
        """Positions (B or 1, L): those given, or real tokens counted from 0 on."""
        if position_ids is None and key_mask is None:
            position_ids = torch.arange(past, past + length, device=device).unsqueeze(0)
        elif position_ids is None:
            assert key_mask is not None
            position_ids = (key_mask.cumsum(1) - 1).clamp_min(0)[:, past:]
        if torch.compiler.is_compiling() or self.config.position != "learned":
            return position_ids
        limit = self.config.max_position_embeddings
        if past + length > limit and (last := int(position_ids.max())) >= limit:  # a look at the values: only if needed
            raise ValueError(
                f"the input reaches position {last}, and position='learned' has vectors for"
                f" max_position_embeddings={limit} positions: give a shorter input"
            )
        return position_ids


def _key_mask(attention_mask: Tensor | None, batch: int, num_keys: int) -> Tensor | None:
    """The mask as bool, True takes part."""
    if attention_mask is None:
        return None
    if attention_mask.shape != (batch, num_keys):
        raise ValueError(
            f"attention_mask must have shape (B, past + L) = ({batch}, {num_keys}), 1 for real tokens, got"
            f" {tuple(attention_mask.shape)}"
        )
    return attention_mask.bool()
