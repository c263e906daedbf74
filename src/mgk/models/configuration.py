"""The configuration of every model."""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from mgk import variants
from mgk._util.files import write_file
from mgk._util.suggestions import closest
from mgk.functional import validation
from mgk.nn.attention import MixtureAttention, check_options
from mgk.variants import VARIANTS, ModelOptions

# Options of mgk.nn that have another name here; the others have the same.
_NAMES = {
    "embed_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "variant": "attention",
    "window": "sliding_window",
}
# Names of fields in other libraries.
_FOREIGN_NAMES = {
    **dict.fromkeys(("d_model", "n_embd"), "hidden_size"),
    **dict.fromkeys(("n_head", "n_heads", "num_head"), "num_attention_heads"),
    **dict.fromkeys(("n_layer", "n_layers"), "num_hidden_layers"),
    **dict.fromkeys(("causal", "is_causal"), "is_decoder"),
    "dropout": "hidden_dropout_prob",
    "num_classes": "num_labels",
    "num_components": "num_mixtures",
}
_OPTIONS = get_type_hints(ModelOptions, include_extras=True)
_SAME = [name for name in _OPTIONS if name in signature(MixtureAttention).parameters]
# How a value is checked, by the type of its field.
_CHECKS: dict[Any, Callable[[str, Any], None]] = {
    variants.Count: validation.positive_int,
    variants.Positive: validation.positive,
    variants.Probability: validation.probability,
    bool: validation.flag,
}

# The class that each Auto... class of transformers makes.
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


class MgkConfig(ModelOptions, PreTrainedConfig):
    """The configuration of a transformer with mixture attention.

    Values are checked here, by every model and when saved. Unknown keywords are
    kept, save those that look like a misspelt one.

    Its options are those of :class:`mgk.variants.ModelOptions`.

    Attributes:
        training: Facts for the model card; see :func:`mgk.models.write_card`.
    """

    model_type: ClassVar[str] = "mgk"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    training: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Check the values; derive the widths left open."""
        # before transformers makes names for that many labels
        if kwargs.get("num_labels") is not None:
            validation.positive_int("num_labels", kwargs["num_labels"])
        self._check_names(kwargs)
        super().__post_init__(**kwargs)
        cutoffs: Any = self.adaptive_cutoffs
        if isinstance(cutoffs, tuple):
            self.adaptive_cutoffs = list(cutoffs)
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
        for name, kind in _OPTIONS.items():
            _check_type(name, kind, getattr(self, name))
        validation.positive_int("num_labels", self.num_labels)
        if self.sliding_window is not None and (self.is_decoder or self.sliding_window != 0):
            validation.positive_int("sliding_window", self.sliding_window)
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
                    wanted = f"from 0 to {last} (vocab_size - 1)"
                    raise ValueError(f"{name} must be {wanted}, got {number!r}")

    def _check_names(self, unknown: Iterable[str]) -> None:
        """Raise for keywords that misspell a field or name it as other libraries do."""
        names, others = [field.name for field in fields(self)], _NAMES | _FOREIGN_NAMES
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
            got = f"got {self.hidden_size}"
            raise ValueError(f"position='sinusoidal' needs an even hidden_size, {got}")
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
            wanted = "increasing whole numbers from 1 up"
            raise ValueError(f"adaptive_cutoffs must be {wanted}, got {cutoffs!r}")
        if cutoffs[-1] >= self.vocab_size:
            wanted = f"below vocab_size={self.vocab_size}"
            raise ValueError(f"adaptive_cutoffs must be {wanted}, got {cutoffs}")
        if self.hidden_size // self.adaptive_div_value ** len(cutoffs) < 1:
            raise ValueError(
                f"adaptive_div_value={self.adaptive_div_value} leaves no width to the last"
                f" of {len(cutoffs)} clusters of hidden_size={self.hidden_size}"
            )


def _check_type(name: str, kind: Any, value: Any) -> None:
    """Raise for a value of a wrong type, where layers do not check it."""
    kinds = get_args(kind)
    if NoneType in kinds:
        if value is None:
            return
        kind = kinds[0]
    if get_origin(kind) is Literal:
        validation.option(name, value, get_args(kind))
    elif kind in _CHECKS:
        _CHECKS[kind](name, value)
