"""The configuration of every model."""

import math
import os
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, get_args

from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from mgk import variants
from mgk._util.files import write_file
from mgk._util.suggestions import closest
from mgk.functional import validation
from mgk.nn.attention import check_options
from mgk.variants import CHOICES, VARIANTS, Pooling, Position

# Options of mgk.nn that have another name here, and those with the same.
_NAMES = {
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "variant": "attention",
    "window": "sliding_window",
}
# Names that other libraries have for fields.
_ELSEWHERE = {
    **dict.fromkeys(("d_model", "n_embd"), "hidden_size"),
    **dict.fromkeys(("n_head", "n_heads", "num_head"), "num_attention_heads"),
    **dict.fromkeys(("n_layer", "n_layers"), "num_hidden_layers"),
    **dict.fromkeys(("causal", "is_causal"), "is_decoder"),
    "dropout": "hidden_dropout_prob",
    "num_classes": "num_labels",
    "num_components": "num_mixtures",
}
_SAME = (
    "num_key_value_heads",
    "head_dim",
    "num_mixtures",
    "kernel",
    "e_step",
    "prior",
    "variance",
    "feature_map",
    "init",
    "backend",
)
_CHOICES = {
    "attention": CHOICES["variant"],
    **{name: CHOICES[name] for name in ("kernel", "e_step", "prior", "variance", "feature_map")},
    "position": get_args(Position),
    "pooling": get_args(Pooling),
}
_SIZES = (
    *("vocab_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings"),
    *("image_size", "num_channels", "num_labels"),
)

# Which class each Auto... class of transformers makes.
AUTO_CLASSES: dict[str, str] = {
    "AutoConfig": "MgkConfig",
    "AutoModel": "MgkModel",
    "AutoModelForCausalLM": "MgkForCausalLM",
    "AutoModelForImageClassification": "MgkForImageClassification",
    "AutoModelForMaskedLM": "MgkForMaskedLM",
    "AutoModelForQuestionAnswering": "MgkForQuestionAnswering",
    "AutoModelForSequenceClassification": "MgkForSequenceClassification",
    "AutoModelForTokenClassification": "MgkForTokenClassification",
}
# The module of a saved folder, which says "pip install mgk" if it must.
_CODE_NAME = "modeling_mgk"
_CODE = f'''"""trust_remote_code=True loads the model by this file where mgk is installed: pip install 'mgk[train]'."""

from mgk.models import {", ".join(AUTO_CLASSES.values())}

__all__ = {list(AUTO_CLASSES.values())}
'''


class MgkConfig(PreTrainedConfig):
    """The configuration of a transformer with mixture attention.

    Values are checked here, by every model and when saved. Unknown keywords are
    kept, save those that look like a misspelt one.

    Attributes:
        attention: "softmax", "linear", "mgk", "smgk", "mlk" or "smlk".
        vocab_size: Token ids are below it.
        hidden_size: Width of the model.
        num_hidden_layers: Layers.
        num_attention_heads: Hq, of queries.
        num_key_value_heads: H, of keys and values, which divides Hq; None: Hq.
        sliding_window: W: a token of a decoder sees itself and the W - 1 before it, of an
            encoder W on either side (0: itself alone); None: all. Not for the linear variants.
        head_dim: D; None: ``hidden_size / num_attention_heads``.
        intermediate_size: Width of the feed-forward network.
        num_mixtures: M, the components of a key.
        kernel: "gaussian" (Eq. 9) or "dot" (Eq. 8; not for linear variants).
        e_step: "soft" (Eq. 9), or "hard" (Eq. 12; not for linear variants).
        prior: "learned" by SGD, "em" (M-step) or "uniform".
        prior_momentum: Share of an "em" prior or variance that an M-step keeps.
        variance: "constant" (sqrt(D)), "learned", "em" or "unequal" (sqrt(D), and a third of it for r > 1).
        feature_map: Linear variants: "elu", "favor" or "dpfp".
        init: Of queries, keys and shifts: "paper", "narrow", or the standard deviation of
            the scores q.k / sqrt(D).
        backend: "auto" or one of ``mgk.available_backends()``.
        max_position_embeddings: Longest input in training; a limit only with
            ``position="learned"``.
        position: "learned", "sinusoidal", "rotary" (before shifts) or "none".
        is_decoder: Causal attention; set by ``MgkForCausalLM``.
        use_cache: Whether a decoder in evaluation returns its cache.
        hidden_dropout_prob: Dropout of embeddings and residual branches.
        attention_probs_dropout_prob: Dropout of attention weights; ignored by
            the linear variants.
        hidden_act: Activation, by its name in transformers.
        layer_norm_eps: Of the layer norms.
        initializer_range: Standard deviation of initial embeddings.
        pooling: Input of a classifier: "mean" over real tokens, or "cls", the
            output at a learned first vector.
        classifier_hidden_size: Width in a classifier; None: ``intermediate_size``.
        adaptive_cutoffs: Of an adaptive softmax, e.g. [20000, 40000].
        adaptive_div_value: Ratio of the widths of its successive clusters.
        tie_word_embeddings: Whether an ordinary softmax uses the token vectors.
        image_size: Height and width of ``pixel_values``.
        patch_size: Height and width of a patch; None: pixels as ``input_ids``.
        num_channels: Of ``pixel_values``.
        pad_token_id: For generation; models mask by ``attention_mask`` only.
        bos_token_id: For generation.
        eos_token_id: For generation; one id or several.
        training: Facts for the model card; see :func:`mgk.models.write_card`.
    """

    model_type: ClassVar[str] = "mgk"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    attention: str = variants.DEFAULT_VARIANT
    vocab_size: int = 257
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    sliding_window: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 512
    num_mixtures: int = variants.DEFAULT_NUM_MIXTURES
    kernel: str = variants.DEFAULT_KERNEL
    e_step: str = variants.DEFAULT_E_STEP
    prior: str = variants.DEFAULT_PRIOR
    prior_momentum: float = 0.0
    variance: str = variants.DEFAULT_VARIANCE
    feature_map: str = variants.DEFAULT_FEATURE_MAP
    init: str | float = variants.DEFAULT_INIT
    backend: str = "auto"
    max_position_embeddings: int = 1024
    position: str = "learned"
    is_decoder: bool = False
    use_cache: bool = True
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    pooling: str = "mean"
    classifier_hidden_size: int | None = None
    adaptive_cutoffs: list[int] | tuple[int, ...] | None = None
    adaptive_div_value: float = 4.0
    tie_word_embeddings: bool = True
    image_size: int = 32
    patch_size: int | None = None
    num_channels: int = 3
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    training: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the values; derive the widths left open."""
        # before transformers makes names for that many labels
        if kwargs.get("num_labels") is not None:
            validation.positive_int("num_labels", kwargs["num_labels"])
        self._check_names(kwargs)
        super().__post_init__(**kwargs)
        if isinstance(self.adaptive_cutoffs, tuple):
            self.adaptive_cutoffs = list(self.adaptive_cutoffs)
        self.check()
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:  # libraries read it
            self.num_key_value_heads = self.num_attention_heads
        if self.classifier_hidden_size is None:
            self.classifier_hidden_size = self.intermediate_size

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write ``config.json``, and the code for ``trust_remote_code=True``."""
        self.check()  # attributes may have been set since it was made
        self.auto_map = {auto: f"{_CODE_NAME}.{name}" for auto, name in AUTO_CLASSES.items()}
        super().save_pretrained(save_directory, *args, **kwargs)
        write_file(Path(save_directory) / f"{_CODE_NAME}.py", _CODE)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: every saved folder names its classes."""

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values in ``config.json``, which must be there."""
        values, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if not values:
            raise OSError(f"{pretrained_model_name_or_path} has no config.json")
        return values, rest

    @property
    def is_linear(self) -> bool:
        """Whether attention is linear, with a constant state."""
        return VARIANTS[self.attention].is_linear

    @property
    def num_patches(self) -> int | None:
        """Patches of an image, if it has patches."""
        if self.patch_size is None:
            return None
        return (self.image_size // self.patch_size) ** 2

    @property
    def window(self) -> tuple[int, int] | None:
        """The (left, right) of ``sliding_window``."""
        width = self.sliding_window
        if width is None:
            return None
        return (width - 1, 0) if self.is_decoder else (width, width)

    def attention_options(self) -> dict[str, Any]:
        """The arguments of :class:`mgk.nn.MixtureAttention`."""
        return {
            **{name: getattr(self, ours) for name, ours in _NAMES.items()},
            **{name: getattr(self, name) for name in _SAME},
            "window": self.window,
            "dropout": 0.0 if self.is_linear else self.attention_probs_dropout_prob,
            "bias": True,
        }

    def check(self) -> None:
        """Raise ``ValueError`` or ``TypeError`` for a wrong value."""
        optional = ("classifier_hidden_size", "patch_size", "sliding_window")
        given = [name for name in optional if getattr(self, name) is not None]
        if self.sliding_window == 0 and not self.is_decoder:
            given.remove("sliding_window")
        for name in (*_SIZES, *given):
            validation.positive_int(name, getattr(self, name))
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "prior_momentum"):
            validation.probability(name, getattr(self, name))
        for name in ("layer_norm_eps", "initializer_range", "adaptive_div_value"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        for name in ("is_decoder", "use_cache", "tie_word_embeddings"):
            validation.flag(name, getattr(self, name))
        for name, allowed in _CHOICES.items():
            validation.option(name, getattr(self, name), allowed)
        if self.hidden_act not in ACT2FN:
            wanted = "an activation of transformers such as 'gelu'"
            raise ValueError(f"hidden_act must be {wanted}, got {self.hidden_act!r}")
        try:
            check_options(self.attention_options())
        except (TypeError, ValueError) as error:
            pattern = rf"\b({'|'.join(_NAMES)})\b"
            message = re.sub(pattern, lambda match: _NAMES[match[0]], str(error))
            raise type(error)(message) from None
        self._check_positions()
        self._check_cutoffs()
        last = self.vocab_size - 1
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            ids = getattr(self, name)
            for number in ids if isinstance(ids, list) else [ids]:
                is_id = isinstance(number, int) and 0 <= number <= last
                if number is not None and not is_id:
                    raise ValueError(f"{name} must be from 0 to {last} (vocab_size - 1), got {number!r}")

    def _check_names(self, unknown: Iterable[str]) -> None:
        """Raise for keywords that are close to a field's name, or the name it has elsewhere."""
        names, others = [field.name for field in fields(self)], _NAMES | _ELSEWHERE
        for name in unknown:
            # properties, and what older files hold for generation
            is_known = name == "auto_map" or hasattr(type(self), name) or hasattr(GenerationConfig(), name)
            if is_known and name not in others:
                continue
            near = others.get(name) or closest(name, names, cutoff=0.7)
            if near is not None:
                raise TypeError(f"MgkConfig has no {name!r}: did you mean {near!r}?")

    def _check_positions(self) -> None:
        width = self.head_dim or self.hidden_size // self.num_attention_heads
        if self.position == "rotary" and width % 2:
            raise ValueError(f"position='rotary' needs an even head_dim, got {width}")
        if self.position == "sinusoidal" and self.hidden_size % 2:
            raise ValueError(f"position='sinusoidal' needs an even hidden_size, got {self.hidden_size}")
        if self.is_decoder and self.pooling == "cls":
            raise ValueError("pooling='cls' sees nothing in a decoder: use pooling='mean'")
        if self.sliding_window is not None and self.pooling == "cls":
            raise ValueError("pooling='cls' sees nothing beyond sliding_window: use pooling='mean'")
        if self.patch_size is not None and self.image_size % self.patch_size:
            wanted = f"a multiple of patch_size={self.patch_size}"
            raise ValueError(f"image_size must be {wanted}, got {self.image_size}")
        patches, limit = self.num_patches or 0, self.max_position_embeddings
        if self.position == "learned" and patches > limit:
            wanted = f"at least the {patches} patches of an image"
            raise ValueError(f"max_position_embeddings must be {wanted}, got {limit}")

    def _check_cutoffs(self) -> None:
        cutoffs: Any = self.adaptive_cutoffs
        if cutoffs is None:
            return
        is_list = isinstance(cutoffs, list) and all(type(x) is int for x in cutoffs)
        if not is_list or not cutoffs or sorted(set(cutoffs)) != cutoffs or cutoffs[0] < 1:
            raise ValueError(f"adaptive_cutoffs must be increasing whole numbers from 1 up, got {cutoffs!r}")
        if cutoffs[-1] >= self.vocab_size:
            raise ValueError(f"adaptive_cutoffs must be below vocab_size={self.vocab_size}, got {cutoffs}")
        if self.hidden_size // self.adaptive_div_value ** len(cutoffs) < 1:
            raise ValueError(
                f"adaptive_div_value={self.adaptive_div_value} leaves no width to the last"
                f" of {len(cutoffs)} clusters of hidden_size={self.hidden_size}"
            )
