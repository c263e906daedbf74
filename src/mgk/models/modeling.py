"""``MgkModel``, the pre-norm transformer below every head: embeddings, layers, loading and saving."""

import math
import os
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple, logging

from mgk import nn as mgk_nn
from mgk.functional.linear.feature_maps import favor_projection
from mgk.models.configuration import MgkConfig
from mgk.models.loading import checked_from_pretrained
from mgk.models.model_card import write_card
from mgk.models.transformers_cache import core_cache
from mgk.nn.em import EMModule
from mgk.variants import VARIANTS

_log = logging.get_logger(__name__)


class OutputOptions(TypedDict, total=False):
    """What a model returns beside its result; ``config`` has the defaults."""

    output_attentions: bool | None  # the attention weights of every layer, (B, H, L, S) each
    output_hidden_states: bool | None  # the embeddings and every layer's output, the last one normed


class MgkEmbeddings(nn.Module):
    """x_t = token or patch vector + position vector, with a learned vector in front where pooling is "cls".

    With sinusoidal positions the token vectors are first multiplied by sqrt(hidden_size) (Vaswani 2017), as the initial
    vectors are much smaller than the sines.
    """

    def __init__(self, config: MgkConfig) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.position = config.position
        self.tokens: nn.Embedding | None = None
        self.patches: MgkPatches | None = None
        if config.patch_size is None:
            self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            self.patches = MgkPatches(config, config.patch_size)
        self.positions: nn.Embedding | None = None
        if config.position == "learned":
            self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.cls = nn.Parameter(torch.empty(config.hidden_size)) if config.pooling == "cls" else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def embed(self, input_ids: Any, inputs_embeds: Any, pixel_values: Any) -> Tensor:
        """Vectors (B, L, hidden_size) of tokens (B, L), of patches of images (B, C, H, W), or as they are given."""
        given = [x for x in (input_ids, inputs_embeds, pixel_values) if x is not None]
        if len(given) != 1:
            raise ValueError(f"give one of input_ids, inputs_embeds and pixel_values, got {len(given)} of them")
        if pixel_values is not None:
            if self.patches is None:
                raise ValueError("pixel_values were given to a model of tokens (patch_size is not set): give input_ids")
            return self.patches(pixel_values)
        if input_ids is not None:
            if input_ids.ndim != 2 or input_ids.is_floating_point():
                raise ValueError(
                    f"input_ids must be whole numbers of shape (B, L), got {input_ids.dtype} of shape"
                    f" {tuple(input_ids.shape)}"
                )
            if self.tokens is None:
                raise ValueError("input_ids were given to a model of patches (patch_size is set): give pixel_values")
            return _look_up(self.tokens, input_ids, "input_ids", "vocab_size")
        if inputs_embeds.ndim != 3 or inputs_embeds.shape[2] != self.hidden_size:
            raise ValueError(
                f"inputs_embeds must have shape (B, L, {self.hidden_size}), got {tuple(inputs_embeds.shape)}"
            )
        return inputs_embeds

    def forward(self, vectors: Tensor, position_ids: Tensor) -> Tensor:
        """Add positions (B or 1, L) to vectors (B, L, hidden_size)."""
        if self.positions is not None:
            vectors = vectors + _look_up(self.positions, position_ids, "positions", "max_position_embeddings")
        elif self.position == "sinusoidal":
            sines = sinusoids(position_ids, self.hidden_size).to(vectors.dtype)
            vectors = vectors * math.sqrt(self.hidden_size) + sines
        if self.cls is not None:
            vectors = torch.cat([self.cls.to(vectors.dtype).expand(vectors.shape[0], 1, -1), vectors], 1)
        return self.dropout(vectors)


class MgkPatches(nn.Module):
    """Vectors of the square patches of an image, row by row, as in ViT: a linear map of each patch's pixels."""

    def __init__(self, config: MgkConfig, patch_size: int) -> None:
        super().__init__()
        self.shape = (config.num_channels, config.image_size, config.image_size)
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, patch_size, patch_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, patches, hidden_size)."""
        if pixel_values.ndim != 4 or pixel_values.shape[1:] != self.shape:
            raise ValueError(
                f"pixel_values must have shape (B, num_channels, image_size, image_size) = (B, {self.shape[0]},"
                f" {self.shape[1]}, {self.shape[2]}), got {tuple(pixel_values.shape)}"
            )
        return self.projection(pixel_values.to(self.projection.weight.dtype)).flatten(2).mT


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """[sin(p w_0), ..., cos(p w_0), ...] with w_m = 10000^(-2m/width) (Vaswani 2017): (..., L) -> (..., L, width)."""
    cos, sin = mgk_nn.rotary_tables(positions, width)
    return torch.cat([sin[..., : width // 2], cos[..., : width // 2]], -1)


def _look_up(table: nn.Embedding, ids: Tensor, name: str, limit: str) -> Tensor:
    """The rows of the ids. On the CPU the lookup itself finds ids out of range: no check before it."""
    if torch.compiler.is_compiling():
        return table(ids)
    try:
        return table(ids)
    except IndexError:
        raise ValueError(
            f"{name} must be from 0 to {table.num_embeddings - 1} ({limit} - 1),"
            f" got {int(ids.min())} to {int(ids.max())}"
        ) from None


class MgkFeedForward(nn.Module):
    """W_2 act(W_1 x)."""

    def __init__(self, config: MgkConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) -> (..., hidden_size)."""
        return self.down_proj(self.act(self.up_proj(x)))


def make_attention(config: MgkConfig) -> mgk_nn.MixtureAttention:
    """The attention of one layer."""
    options = config.attention_options()
    width = options["head_dim"] or config.hidden_size // config.num_attention_heads
    sizes = (config.num_attention_heads, VARIANTS[config.attention].num_components(config.num_mixtures))
    if config.prior == "em":
        options["prior"] = mgk_nn.EMPrior(*sizes, momentum=config.prior_momentum)
    if config.variance == "em":
        options["variance"] = mgk_nn.EMVariance(*sizes, width, momentum=config.prior_momentum)
    return mgk_nn.MixtureAttention(**options)


class MgkLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: MgkConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = make_attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MgkFeedForward(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor, *, need_weights: bool = False, **options: Any) -> tuple[Tensor, Tensor | None]:
        """The output (B, L, hidden_size), and the attention weights (B, H, L, S) if they are needed.

        ``options`` are those of :meth:`mgk.nn.MixtureAttention.forward`.
        """
        attended = self.attention(self.attention_norm(hidden), need_weights=need_weights, **options)
        out, weights = attended if need_weights else (attended, None)
        hidden = hidden + self._drop(out)
        return hidden + self._drop(self.mlp(self.mlp_norm(hidden))), weights

    def _drop(self, x: Tensor) -> Tensor:
        return self.dropout(x) if self.training else x  # decoding one token, every module call takes noticeable time


class MgkPreTrainedModel(PreTrainedModel):
    """Initialisation, loading and saving, the same for every model."""

    config: MgkConfig
    config_class = MgkConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    # Losses are divided by the targets of the whole optimizer step: gradient accumulation equals one larger batch.
    accepts_loss_kwargs = True
    takes_patches = False
    _no_split_modules: ClassVar[list[str]] = ["MgkLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    # Counts pass float16's 65,504 in one forward: the M-step's buffers stay in float32.
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = [
        r"prior\.(pi|counts)",
        r"variance\.(sigma2|counts|distances)",
    ]

    def __init__(self, config: MgkConfig, *args: Any, **kwargs: Any) -> None:
        config.check()  # again: attributes may have been set since it was made
        if config.patch_size is not None and not self.takes_patches:
            raise ValueError(
                f"{type(self).__name__} reads tokens: patch_size must be None; MgkForImageClassification reads patches"
            )
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any) -> Any:
        """Load weights from safetensors; a folder that is incomplete, corrupt or of another variant raises.

        Every weight of the transformer must be there, and every weight of the head if the checkpoint is of this class
        (``architectures`` in its ``config.json``). From a checkpoint of another class, e.g. ``MgkModel``'s for a
        classifier, the transformer is loaded and a missing head is initialised.
        """
        load = super().from_pretrained
        return checked_from_pretrained(cls, load, name_or_path, *args, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save configuration, weights (safetensors) and a model card, which shows ``config.training`` if that is set.

        See :func:`mgk.models.write_card`.
        """
        super().save_pretrained(save_directory, *args, **kwargs)
        is_main = args[0] if args else kwargs.get("is_main_process", True)
        if is_main:
            write_card(save_directory, self.config)

    def m_step(self) -> None:
        """Update the "em" priors and variances of all layers: once per optimizer step, on every rank."""
        mgk_nn.m_step_all(self)

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: ``_init_weights`` itself keeps loaded weights, so that transformers need not skip whole modules."""
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise every parameter and buffer that is not loaded; these functions skip loaded ones."""
        std = self.config.initializer_range
        if isinstance(module, mgk_nn.MixtureAttention | mgk_nn.LearnedPrior | mgk_nn.LearnedVariance | EMModule):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Conv2d):
            init.xavier_uniform_(module.weight.flatten(1) if module.weight.ndim > 2 else module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=std)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, MgkEmbeddings) and module.cls is not None:
            init.normal_(module.cls, std=std)
        elif isinstance(module, mgk_nn.Favor):
            seed = int(torch.randint(2**31, (), device="cpu"))
            init.copy_(module.projection, favor_projection(module.head_dim, module.num_features, seed))


class MgkModel(MgkPreTrainedModel):
    """A pre-norm transformer: an encoder, or with ``config.is_decoder`` a causal decoder."""

    takes_patches = True

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
        """The token embedding, or the linear map of patches."""
        module = self.embeddings.tokens or self.embeddings.patches
        assert module is not None
        return module

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        if not isinstance(value, nn.Embedding) or self.embeddings.tokens is None:
            raise TypeError(f"the input embeddings must be an nn.Embedding of tokens, got {type(value).__name__}")
        self.embeddings.tokens = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Encode tokens (B, L), vectors (B, L, hidden_size), or images (B, C, H, W).

        Args:
            input_ids: int64 (B, L).
            attention_mask: (B, L), 1 or True for real tokens; with a cache (B, past + L).
            inputs_embeds: (B, L, hidden_size), in place of ``input_ids``.
            pixel_values: Of a model with ``config.patch_size``.
            position_ids: (B, L) or (1, L); None: real tokens are counted from 0 on, with padding on either side.
            past_key_values: Of a decoder: the tokens before these, as an earlier call returned them.
            use_cache: Whether to return ``past_key_values``; None: ``config.use_cache``, False in training.
            output_attentions: Whether to return the attention weights of every layer, (B, H, L, S) each.
            output_hidden_states: Whether to return the embeddings and every layer's output, the last one normed.

        Returns:
            ``last_hidden_state`` (B, L, hidden_size), after the last norm; where pooling is "cls", the first of L + 1
            is that of the learned vector.
        """
        config = self.config
        vectors = self.embeddings.embed(input_ids, inputs_embeds, pixel_values)
        batch, length = vectors.shape[:2]
        cache = self._cache(past_key_values, use_cache)
        attentions: list[Any] = [layer.attention for layer in self.layers]
        caches = [None if cache is None else core_cache(cache, i, x) for i, x in enumerate(attentions)]
        past = 0 if caches[0] is None else caches[0].length
        need_weights = config.output_attentions if output_attentions is None else output_attentions
        need_hidden = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if need_weights and past and config.is_linear:
            raise ValueError(
                f"output_attentions cannot be computed from the state of attention={config.attention!r}, a sum over"
                " the past: use use_cache=False"
            )
        key_mask = _key_mask(attention_mask, batch, past + length)
        position_ids = self._positions(position_ids, key_mask, past, length, vectors.device)
        hidden = self.embeddings(vectors, position_ids)
        if self.embeddings.cls is not None:
            key_mask = None if key_mask is None else pad(key_mask, (1, 0), value=True)
            position_ids = pad(position_ids, (1, 0))
        options: dict[str, Any] = {"key_mask": key_mask, "is_causal": config.is_decoder, "need_weights": need_weights}
        if config.position == "rotary":
            options["rotary"] = mgk_nn.rotary_tables(position_ids, attentions[0].head_dim)
        all_hidden, all_weights = [hidden], []
        for layer, layer_cache in zip(self.layers, caches, strict=True):
            hidden, weights = layer(hidden, cache=layer_cache, **options)
            all_hidden.append(hidden)
            all_weights.append(weights)
        hidden = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=(*all_hidden[:-1], hidden) if need_hidden else None,
            attentions=tuple(all_weights) if need_weights else None,
        )

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
        is_wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        return DynamicCache() if is_wanted else None

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
        # reading values waits for the device: only where a position can be too large
        if past + length > limit and (last := int(position_ids.max())) >= limit:
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
