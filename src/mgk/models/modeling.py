"""The pre-norm transformer, its loading, saving and losses."""

import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from logging import LogRecord, getLogger
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, pad
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple, logging

from mgk import nn as mgk_nn
from mgk._util.private_names import LOAD_REPORT
from mgk._util.suggestions import did_you_mean
from mgk.functional.dropout import add_dropout
from mgk.functional.linear.feature_maps import favor_projection
from mgk.functional.masks import without_dead
from mgk.functional.mixture.inputs import compute_dtype
from mgk.functional.validation import is_plain
from mgk.models.configuration import MgkConfig
from mgk.models.model_card import write_card
from mgk.models.packing import PackingOptions, find_segments, restarting_positions
from mgk.models.transformers_cache import core_cache
from mgk.nn import caches
from mgk.nn.em import EMModule
from mgk.variants import VARIANTS

_log = logging.get_logger(__name__)
_weights_log = logging.get_logger("transformers.mgk")
IGNORE = -100  # as in cross_entropy
_PASSED_ON = ("tokenizer", "assistant_tokenizer")
VARIANT_MARK = "attention_name"  # the buffer of a model with its variant

NumItems = Tensor | int | None
_SHOWN = 3  # names in a message
_RESETS_ITSELF = (
    mgk_nn.MixtureAttention,
    mgk_nn.LearnedPrior,
    mgk_nn.LearnedVariance,
    mgk_nn.UnequalVariance,
    EMModule,
)


class OutputOptions(PackingOptions, total=False):
    """Packed sequences, and what else a model returns."""

    output_attentions: bool | None  # weights (B, H, L, S) of every layer
    output_hidden_states: bool | None  # embeddings and layers


class MgkEmbeddings(nn.Module):
    """x_t = token or patch vector + position vector; "cls" in front.

    Sinusoidal positions are added to sqrt(hidden_size) x (Vaswani 2017).
    """

    def __init__(self, config: MgkConfig) -> None:
        super().__init__()
        self.hidden_size, self.position = config.hidden_size, config.position
        width = config.hidden_size
        self.tokens: nn.Embedding | None = None
        self.patches: MgkPatches | None = None
        if config.patch_size is None:
            self.tokens = nn.Embedding(config.vocab_size, width)
        else:
            self.patches = MgkPatches(config, config.patch_size)
        self.positions: nn.Embedding | None = None
        if config.position == "learned":
            self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.cls: nn.Parameter | None = None
        if config.pooling == "cls":
            self.cls = nn.Parameter(torch.empty(width))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def embed(self, input_ids: Any, inputs_embeds: Any, pixel_values: Any) -> Tensor:
        """Vectors (B, L, hidden_size) of tokens, of images, or as given."""
        inputs = (input_ids, inputs_embeds, pixel_values)
        count = sum(x is not None for x in inputs)
        if count != 1:
            raise ValueError(f"give one of input_ids, inputs_embeds and pixel_values, got {count}")
        if pixel_values is not None:
            if self.patches is None:
                raise ValueError("pixel_values need a model with patch_size: give input_ids")
            return self.patches(pixel_values)
        if input_ids is not None:
            if input_ids.ndim != 2 or input_ids.is_floating_point():
                got = f"{input_ids.dtype} of shape {tuple(input_ids.shape)}"
                raise ValueError(f"input_ids must be whole numbers of shape (B, L), got {got}")
            if self.tokens is None:
                raise ValueError("input_ids need a model without patch_size: give pixel_values")
            return _look_up(self.tokens, input_ids, "input_ids", "vocab_size")
        shape, width = tuple(inputs_embeds.shape), self.hidden_size
        if len(shape) != 3 or shape[2] != width:
            raise ValueError(f"inputs_embeds must have shape (B, L, {width}), got {shape}")
        return inputs_embeds

    def forward(self, vectors: Tensor, position_ids: Tensor) -> Tensor:
        """Add positions (B or 1, L) to vectors (B, L, hidden_size)."""
        if self.positions is not None:
            limit = "max_position_embeddings"
            vectors = vectors + _look_up(self.positions, position_ids, "positions", limit)
        elif self.position == "sinusoidal":
            sines = sinusoids(position_ids, self.hidden_size).to(vectors.dtype)
            vectors = vectors * math.sqrt(self.hidden_size) + sines
        if self.cls is not None:
            first = self.cls.to(vectors.dtype).expand(vectors.shape[0], 1, -1)
            vectors = torch.cat([first, vectors], 1)
        return add_dropout(vectors, None, self.dropout.p if self.training else 0.0)


class MgkPatches(nn.Module):
    """A linear map of each square patch of an image, row by row, as in ViT."""

    def __init__(self, config: MgkConfig, patch_size: int) -> None:
        super().__init__()
        channels, size = config.num_channels, config.image_size
        self.shape = (channels, size, size)
        self.projection = nn.Conv2d(channels, config.hidden_size, patch_size, patch_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, patches, hidden_size)."""
        if pixel_values.ndim != 4 or pixel_values.shape[1:] != self.shape:
            sizes = ", ".join(map(str, self.shape))
            raise ValueError(
                "pixel_values must have shape (B, num_channels, image_size, image_size)"
                f" = (B, {sizes}), got {tuple(pixel_values.shape)}"
            )
        pixel_values = pixel_values.to(self.projection.weight.dtype)
        return self.projection(pixel_values).flatten(2).mT


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """[sin(p w_0), ..., cos(p w_0), ...], w_m = 10000^(-2m/width), (..., L, width)."""
    cos, sin = mgk_nn.rotary_tables(positions, width)
    return torch.cat([sin[..., : width // 2], cos[..., : width // 2]], -1)


def _look_up(table: nn.Embedding, ids: Tensor, name: str, limit: str) -> Tensor:
    """The rows of the ids; on the CPU the lookup itself checks their range."""
    if torch.compiler.is_compiling():
        return table(ids)
    try:
        return table(ids)
    except IndexError:
        wanted = f"from 0 to {table.num_embeddings - 1} ({limit} - 1)"
        got = f"{int(ids.min())} to {int(ids.max())}"
        raise ValueError(f"{name} must be {wanted}, got {got}") from None


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
    heads = config.num_key_value_heads or config.num_attention_heads
    momentum = config.prior_momentum
    mixtures = VARIANTS[config.attention].num_components(config.num_mixtures)
    if config.prior == "em":
        options["prior"] = mgk_nn.EMPrior(heads, mixtures, momentum=momentum)
    if config.variance == "em":
        width = config.head_dim or config.hidden_size // config.num_attention_heads
        options["variance"] = mgk_nn.EMVariance(heads, mixtures, width, momentum=momentum)
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

    def forward(
        self, hidden: Tensor, *, need_weights: bool = False, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The output (B, L, hidden_size), and the weights or None.

        ``options`` are those of :meth:`mgk.nn.MixtureAttention.forward`.
        """
        normed = self.attention_norm(hidden)
        attended = self.attention(normed, need_weights=need_weights, **options)
        out, weights = attended if need_weights else (attended, None)
        p = self.dropout.p if self.training else 0.0
        hidden = add_dropout(out, hidden, p)
        return add_dropout(self.mlp(self.mlp_norm(hidden)), hidden, p), weights


def check_attn_implementation(config: MgkConfig) -> None:
    """Raise for a kernel of transformers, and forget it."""
    asked = config._attn_implementation
    if asked not in (None, "eager"):
        config._attn_implementation = None
        wanted = "'eager' or left out"
        got = f"{asked!r}: backend chooses the kernel"
        raise ValueError(f"attn_implementation must be {wanted}, got {got}")


class MgkPreTrainedModel(PreTrainedModel):
    """Initialisation, loading and saving."""

    config: MgkConfig
    config_class = MgkConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    # Losses are divided by the targets of the whole optimizer step.
    accepts_loss_kwargs = True
    takes_patches = False
    _no_split_modules: ClassVar[list[str]] = ["MgkLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    # The M-step's counts pass float16's 65,504.
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = [
        r"prior\.(pi|counts)",
        r"variance\.(sigma2|counts|distances)",
    ]

    def __init__(self, config: MgkConfig, *args: Any, **kwargs: Any) -> None:
        config.check()  # again: attributes may have been set since it was made
        if config.patch_size is not None and not self.takes_patches:
            wanted = f"None for {type(self).__name__}"
            raise ValueError(f"patch_size must be {wanted}; MgkForImageClassification reads patches")
        check_attn_implementation(config)
        super().__init__(config, *args, **kwargs)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
    ) -> Any:
        """Load weights from safetensors; what misfits raises.

        Another variant, missing and unexpected weights raise ValueError, another
        shape raises RuntimeError, as in transformers.

        From a checkpoint of another class (``architectures`` in ``config.json``)
        the transformer is loaded, and a missing head is initialised.
        """
        load = super().from_pretrained
        return checked_from_pretrained(cls, load, pretrained_model_name_or_path, *args, **kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save configuration, weights and :func:`mgk.models.write_card`."""
        super().save_pretrained(save_directory, *args, **kwargs)
        is_main = args[0] if args else kwargs.get("is_main_process", True)
        if is_main:
            write_card(save_directory, self.config, tags=self.model_tags or ())

    def m_step(self) -> None:
        """Every layer's M-step: once per optimizer step, on every rank."""
        mgk_nn.m_step_all(self)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: every saved folder names its classes."""

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: ``_init_weights`` itself keeps loaded weights."""
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what is not loaded; these functions skip loaded tensors."""
        std = self.config.initializer_range
        if isinstance(module, _RESETS_ITSELF):
            module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Conv2d):
            weight = module.weight
            init.xavier_uniform_(weight.flatten(1) if weight.ndim > 2 else weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=std)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, MgkEmbeddings) and module.cls is not None:
            init.normal_(module.cls, std=std)
        elif isinstance(module, MgkModel):
            init.copy_(module.get_buffer(VARIANT_MARK), _mark(module.config.attention))
        elif isinstance(module, mgk_nn.Favor):
            seed = int(torch.randint(2**31, (), device="cpu"))
            drawn = favor_projection(module.head_dim, module.num_features, seed)
            init.copy_(module.projection, drawn)


class MgkModel(MgkPreTrainedModel):
    """A pre-norm encoder, or with ``config.is_decoder`` a causal decoder."""

    takes_patches = True

    def __init__(self, config: MgkConfig) -> None:
        super().__init__(config)
        self.embeddings = MgkEmbeddings(config)
        self.layers = nn.ModuleList(MgkLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        # shapes of mlk and mgk are equal: the weights say which they are
        self.register_buffer(VARIANT_MARK, _mark(config.attention))
        self.register_load_state_dict_pre_hook(_check_mark)
        self.gradient_checkpointing = False
        if config.patch_size is not None:
            self.main_input_name = "pixel_values"
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding, or the linear map of patches."""
        module: Any = self.embeddings.tokens or self.embeddings.patches
        return module

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        if not isinstance(value, nn.Embedding) or self.embeddings.tokens is None:
            got = type(value).__name__
            raise TypeError(f"the input embeddings must be an nn.Embedding of tokens, got {got}")
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
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        **unused: Any,
    ) -> BaseModelOutputWithPast:
        """``last_hidden_state`` (B, L, hidden_size), normed; "cls" comes first of L + 1.

        Args:
            input_ids: int64 (B, L).
            attention_mask: (B, past + L), 1 or True for real tokens.
            inputs_embeds: (B, L, hidden_size), in place of ``input_ids``.
            pixel_values: (B, C, H, W), of a model with ``config.patch_size``.
            position_ids: (B, L) or (1, L); None: real tokens from 0 on. Where they fall or
                stay, without mask and cache, another packed sequence begins.
            past_key_values: Of a decoder: from an earlier call.
            use_cache: None: ``config.use_cache``, False in training.
            output_attentions: Return weights (B, H, L, S) of every layer.
            output_hidden_states: Return embeddings and the output of every layer.
            seq_idx: int (B, past + L), of packed sequences, runs of equal numbers.
            cu_seq_lens_q: int (sequences + 1,), in its place for one row: where each
                begins, and the row's end. The next three are not needed.
            **unused: What ``generate`` passes on; other names raise.
        """
        config = self.config
        _check_unused(unused)
        vectors = self.embeddings.embed(input_ids, inputs_embeds, pixel_values)
        batch, length = vectors.shape[:2]
        cache = self._cache(past_key_values, use_cache)
        attentions: list[Any] = [layer.attention for layer in self.layers]
        layer_caches: list[caches.Cache | None] = [None] * len(attentions)
        if cache is not None:
            layer_caches = [core_cache(cache, i, x) for i, x in enumerate(attentions)]
        tokens = TokenPlaces(layer_caches[0], batch, length, vectors.device)
        if output_attentions is None:
            output_attentions = config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        if output_attentions and config.is_linear and tokens.has_past:
            state = f"the state of attention={config.attention!r}"
            raise ValueError(f"output_attentions cannot be computed from {state}: use use_cache=False")
        key_mask = tokens.key_mask(attention_mask)
        if inputs_embeds is not None and key_mask is not None and not tokens.static:
            vectors = without_dead(vectors, key_mask[:, tokens.past :])
        packing: PackingOptions = {"seq_idx": seq_idx, "cu_seq_lens_q": cu_seq_lens_q}
        past = tokens.num_keys - length
        segment_ids = find_segments(packing, position_ids, attention_mask, (batch, length), past)
        if segment_ids is not None:
            if self.embeddings.cls is not None:
                wanted = "packed sequences need pooling='mean'"
                raise ValueError(f"pooling='cls' has one vector per row: {wanted}")
            if position_ids is None:
                position_ids = restarting_positions(segment_ids)[:, past:]
        if position_ids is None:
            position_ids = tokens.positions(key_mask)
        self._check_positions(position_ids, tokens.num_keys)
        hidden = self.embeddings(vectors, position_ids)
        if self.embeddings.cls is not None:
            key_mask = None if key_mask is None else pad(key_mask, (1, 0), value=True)
            position_ids = pad(position_ids, (1, 0))
        options: dict[str, Any] = {"key_mask": key_mask, "is_causal": config.is_decoder}
        options["segment_ids"] = segment_ids
        if config.position == "rotary":
            options["rotary"] = mgk_nn.rotary_tables(position_ids, attentions[0].head_dim)
        all_hidden, all_weights = [hidden], []
        with ExitStack() as stack:
            for layer_cache in layer_caches:
                if layer_cache is not None:
                    stack.enter_context(layer_cache.unchanged_on_error())
            for layer, layer_cache in zip(self.layers, layer_caches, strict=True):
                options["cache"] = layer_cache
                hidden, weights = layer(hidden, need_weights=output_attentions, **options)
                all_hidden.append(hidden)
                all_weights.append(weights)
            hidden = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=(*all_hidden[:-1], hidden) if output_hidden_states else None,
            attentions=tuple(all_weights) if output_attentions else None,
        )

    def _cache(self, past_key_values: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache that this forward extends, if any."""
        is_given = past_key_values is not None
        if not self.config.is_decoder:
            if is_given:
                raise ValueError("past_key_values has no meaning for an encoder: set is_decoder=True")
            return None
        if self.gradient_checkpointing and self.training:
            if is_given:
                raise ValueError("past_key_values cannot be used with gradient checkpointing")
            if use_cache:
                _log.warning_once("use_cache=True is ignored: gradient checkpointing runs layers twice")
            return None
        if is_given:
            return past_key_values
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return DynamicCache() if use_cache else None

    def _check_positions(self, position_ids: Tensor, num_keys: int) -> None:
        """Raise where a position has no vector."""
        limit = self.config.max_position_embeddings
        if torch.compiler.is_compiling() or self.config.position != "learned" or num_keys <= limit:
            return
        # reading values waits for the device: only where one can be too large
        if (last := int(position_ids.max())) >= limit:
            have = f"position='learned' has max_position_embeddings={limit}"
            raise ValueError(f"the input reaches position {last}, and {have}: give a shorter input")


def _check_unused(unused: Mapping[str, Any]) -> None:
    """Raise for arguments that ``generate`` does not pass on."""
    for name, value in unused.items():
        if value is not None and name not in _PASSED_ON:
            known = inspect.signature(MgkModel.forward).parameters.keys() - {"self", "unused"}
            near = did_you_mean(name, sorted(known))
            raise TypeError(f"forward got an unexpected argument {name!r}: {near}")


class TokenPlaces:
    """The positions of the L new tokens, after those in the cache."""

    def __init__(self, cache: caches.Cache | None, batch: int, length: int, device: torch.device) -> None:
        self.batch, self.length, self.device = batch, length, device
        self.has_past = cache is not None and cache.batch is not None
        self.static = cache if isinstance(cache, caches.StaticCache) else None
        self.past = 0 if cache is None or self.static else cache.length
        # a static cache has as many keys as places
        self.num_keys = self.static.max_length if self.static else self.past + length

    def key_mask(self, attention_mask: Tensor | None) -> Tensor | None:
        """Bool (B, number of keys), True for real tokens."""
        if attention_mask is None:
            return None
        shape, wanted = tuple(attention_mask.shape), (self.batch, self.num_keys)
        if shape != wanted and self.static is not None:
            wanted = (self.batch, self.static.length + self.length)
        if shape != wanted:
            raise ValueError(f"attention_mask must have shape (B, past + L) = {wanted}, got {shape}")
        # no query sees the places that are still empty
        attention_mask = pad(attention_mask, (0, self.num_keys - shape[1]), value=1)
        if attention_mask.dtype == torch.bool:
            return attention_mask
        # reading whole numbers would wait for the device at every token
        is_cheap = attention_mask.is_floating_point() or attention_mask.device.type == "cpu"
        if is_cheap and is_plain(attention_mask):
            other = (attention_mask != 0) & (attention_mask != 1)
            if other.any():
                meaning = "1 for real tokens and 0 for padding, not additive"
                got = attention_mask[other].min().item()
                raise ValueError(f"attention_mask must be {meaning}, got {got}")
        return attention_mask.bool()

    def positions(self, key_mask: Tensor | None) -> Tensor:
        """Positions (B or 1, L): real tokens from 0 on."""
        if self.static is None:
            places = torch.arange(self.past, self.past + self.length, device=self.device)
        else:
            places = self.static.places(self.length).to(self.device)
        if key_mask is None:
            return places.unsqueeze(0)
        return (key_mask.cumsum(1) - 1).clamp_min(0).index_select(1, places)


def _mark(attention: str) -> Tensor:
    """The variant's name as ASCII codes, uint8 (8,)."""
    return torch.tensor(list(attention.encode().ljust(8, b"\0")), dtype=torch.uint8)


def _check_mark(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
    """Raise for weights of another variant; without a mark they pass."""
    config: Any = model.config
    attention = config.attention
    mark = state_dict.setdefault(prefix + VARIANT_MARK, _mark(attention))
    if (found := _marked(mark)) != attention:
        misfit = f"the weights do not fit attention={attention!r}"
        raise ValueError(f"{misfit}: they are of attention={found!r}")


def _marked(mark: Tensor) -> str:
    return bytes(mark.tolist()).rstrip(b"\0").decode(errors="replace")


def checked_from_pretrained(
    cls: Any, load: Callable[..., Any], name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
) -> Any:
    """The result of ``load``, a ``from_pretrained``; ValueError for a misfit."""
    wants_info = kwargs.pop("output_loading_info", False)
    may_mismatch = kwargs.pop("ignore_mismatched_sizes", False)
    if kwargs.setdefault("use_safetensors", True) is not True:
        raise ValueError("use_safetensors must be True: weights are never unpickled")
    kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with _without_report():
            model, info = load(name_or_path, *args, **kwargs)
    except SafetensorError as error:
        raise ValueError(f"the weights of {name_or_path} are corrupt: {error}") from None
    if new := check_weights(cls, model, info, name_or_path, may_mismatch):
        parts = (cls.__name__, _some(new), name_or_path)
        _weights_log.warning("%s: %s are new, not from %s: train them before use", *parts)
    return (model, info) if wants_info else model


def check_weights(cls: Any, model: Any, info: dict[str, Any], place: object, may_mismatch: bool) -> set[str]:
    """Raise where weights do not fit; return the names of new ones."""
    prefix = f"{cls.base_model_prefix}."
    base = model.base_model
    attention = model.config.attention
    misfit = f"the weights of {place} do not fit {cls.__name__} with attention={attention!r}"
    if (found := _marked(base.get_buffer(VARIANT_MARK))) != attention:
        raise ValueError(f"{misfit}: they are of attention={found!r}")
    parts = {VARIANT_MARK, *(name for name, _ in base.named_children())}

    def is_of_transformer(name: str) -> bool:
        return name.removeprefix(prefix).partition(".")[0] in parts

    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    missing -= {VARIANT_MARK, prefix + VARIANT_MARK}
    mismatched = {name: f"{name} {tuple(size)}" for name, size, _ in info["mismatched_keys"]}
    new: set[str] = set(mismatched)
    architectures = model.config.architectures
    if architectures is not None and cls.__name__ not in architectures:
        head = {name for name in model.state_dict() if not is_of_transformer(name)}
        if head <= missing:  # an incomplete head is an error
            missing, new = missing - head, new | head
        unexpected = set(filter(is_of_transformer, unexpected))
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise ValueError(f"{misfit}: {kind} are {_some(names)}")
    if mismatched and not may_mismatch:
        is_head = not any(map(is_of_transformer, mismatched))
        way = "; ignore_mismatched_sizes=True initialises them" if is_head else ""
        raise RuntimeError(f"{misfit}: of another shape are {_some(mismatched.values())}{way}")
    return new


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@contextmanager
def _without_report() -> Iterator[None]:
    """Hide transformers' table of missing weights: ours replaces it."""
    name, text = LOAD_REPORT

    def keep(record: LogRecord) -> bool:
        return text not in str(record.msg)

    logger = getLogger(name)
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def classification_loss(
    logits: Tensor, labels: Tensor, problem_type: str | None, num_items: NumItems
) -> Tensor:
    """Cross entropy of classes (B,) or labels (B, num_labels), or squared error.

    Without ``problem_type`` one output is a regression, whole numbers are classes
    and other numbers independent labels, as in transformers.
    """
    if problem_type is None:
        if logits.shape[-1] == 1:
            problem_type = "regression"
        elif labels.is_floating_point():
            problem_type = "multi_label_classification"
        else:
            problem_type = "single_label_classification"
    logits = logits.to(compute_dtype(logits))
    if problem_type == "single_label_classification":
        return class_loss(logits, labels.view(-1), num_items, "num_labels")
    labels = labels.to(logits.dtype)
    if problem_type == "multi_label_classification":
        return _over(num_items, binary_cross_entropy_with_logits, logits, labels)
    return _over(num_items, mse_loss, logits.view(labels.shape), labels)


def class_loss(logits: Tensor, targets: Tensor, num_items: NumItems, limit_name: str) -> Tensor:
    """Cross entropy of logits (N, classes), by ``num_items`` or the mean."""
    check_targets(targets, logits.shape[-1], limit_name)
    logits = logits.to(compute_dtype(logits))
    return _over(num_items, cross_entropy, logits, targets)


def check_shape(name: str, targets: Tensor, hidden: Tensor | None) -> None:
    """Targets are (B, L), as ``hidden`` (B, L, ...) is."""
    if hidden is None:  # which the model refuses
        return
    wanted, got = tuple(hidden.shape[:2]), tuple(targets.shape)
    if got != wanted:
        raise ValueError(f"{name} must have the shape of input_ids, {wanted}, got {got}")


def check_targets(targets: Tensor, limit: int, limit_name: str) -> None:
    """Targets are from 0 to ``limit - 1``, or -100.

    Checked on the CPU only: elsewhere it would wait for the device.
    """
    if targets.device.type != "cpu" or not is_plain(targets):
        return
    real = targets[targets != IGNORE]
    if real.numel() == 0:
        return
    least, largest = int(real.min()), int(real.max())
    if least < 0 or largest >= limit:
        wanted = f"from 0 to {limit - 1} ({limit_name} - 1) or {IGNORE}"
        raise ValueError(f"labels must be {wanted}, got {least} to {largest}")


def _over(num_items: NumItems, loss: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    if num_items is None:
        return loss(*inputs)
    return loss(*inputs, reduction="sum") / num_items
