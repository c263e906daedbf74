"""The six variants, their options and defaults. Does not import torch."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

Variant = Literal["softmax", "linear", "mgk", "smgk", "mlk", "smlk"]
Family = Literal["softmax", "linear"]
Keys = Literal["single", "projected", "shifted"]
Kernel = Literal["gaussian", "dot"]
EStep = Literal["soft", "hard"]
Prior = Literal["learned", "em", "uniform"]
Variance = Literal["constant", "learned", "em", "unequal"]
FeatureMapName = Literal["elu", "favor", "dpfp"]
Position = Literal["learned", "sinusoidal", "rotary", "none"]
Pooling = Literal["mean", "cls"]
Init = Literal["paper", "narrow"]


@dataclass(frozen=True)
class Limits:
    """Bounds of a number; pydantic, which reads recipes, takes them from here."""

    ge: float | None = None
    gt: float | None = None
    lt: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        bounds = {name: bound for name, bound in vars(self).items() if bound is not None}
        infinity = {"allow_inf_nan": False} if source is float else {}
        return {**handler(source), **bounds, **infinity}


Count = Annotated[int, Limits(ge=1)]
Positive = Annotated[float, Limits(gt=0)]
Probability = Annotated[float, Limits(ge=0, lt=1)]


@dataclass(frozen=True)
class VariantSpec:
    """A variant of attention.

    Attributes:
        name: as the paper has it.
        family: "softmax" (Eq. 1, 9), or "linear" with a feature map (Eq. 14).
        keys: "single", M "projected" k_jr = x_j W_r, or "shifted" k_jr = x_j W + b_r.
    """

    name: Variant
    family: Family
    keys: Keys

    @property
    def is_linear(self) -> bool:
        """Whether attention is linear, with a state of constant size."""
        return self.family == "linear"

    @property
    def is_mixture(self) -> bool:
        """Whether a key has components."""
        return self.keys != "single"

    @property
    def is_shifted(self) -> bool:
        """Whether the components of a key share one projection."""
        return self.keys == "shifted"

    def num_components(self, num_mixtures: int) -> int:
        """M, which is 1 for the baselines whatever ``num_mixtures`` says."""
        return num_mixtures if self.is_mixture else 1


VARIANTS: dict[str, VariantSpec] = {
    spec.name: spec
    for spec in (
        VariantSpec("softmax", "softmax", "single"),
        VariantSpec("linear", "linear", "single"),
        VariantSpec("mgk", "softmax", "projected"),
        VariantSpec("smgk", "softmax", "shifted"),
        VariantSpec("mlk", "linear", "projected"),
        VariantSpec("smlk", "linear", "shifted"),
    )
}
assert tuple(VARIANTS) == get_args(Variant)

# The choices of each option that is chosen by name.
CHOICES: dict[str, tuple[str, ...]] = {
    "variant": get_args(Variant),
    "kernel": get_args(Kernel),
    "e_step": get_args(EStep),
    "prior": get_args(Prior),
    "variance": get_args(Variance),
    "feature_map": get_args(FeatureMapName),
    "init": get_args(Init),
}

# The paper's settings.
DEFAULT_VARIANT: Variant = "mgk"
DEFAULT_NUM_MIXTURES = 2
DEFAULT_KERNEL: Kernel = "gaussian"
DEFAULT_E_STEP: EStep = "soft"
DEFAULT_PRIOR: Prior = "learned"
DEFAULT_VARIANCE: Variance = "constant"
DEFAULT_FEATURE_MAP: FeatureMapName = "elu"

# Initialisation of queries, keys and shifts (docs/initialisation.md): the standard
# deviation of q.k / sqrt(D) that "narrow" gives.
NARROW_SCORE_STD = 0.02
DEFAULT_INIT: Init = "narrow"


@dataclass(init=False, eq=False, repr=False, kw_only=True)
class ModelOptions:
    """The options of every model: fields of its configuration and of a recipe.

    Attributes:
        attention: "softmax", "linear", "mgk", "smgk", "mlk" or "smlk".
        num_attention_heads: Hq, of queries.
        num_key_value_heads: H, of keys and values, which divides Hq; None: Hq.
        sliding_window: W: decoders see W tokens up to their own, encoders W on either
            side (0: their own alone); None: all. Not for linear variants.
        head_dim: D; None: ``hidden_size / num_attention_heads``.
        hidden_size: Width of the model.
        num_hidden_layers: Layers.
        intermediate_size: Width of the feed-forward network.
        num_mixtures: M, the components of a key.
        kernel: "gaussian" (Eq. 9) or "dot" (Eq. 8; not for linear variants).
        e_step: "soft" (Eq. 9), or "hard" (Eq. 12; not for linear variants).
        prior: "learned" by SGD, "em" (M-step) or "uniform".
        prior_momentum: Share of an "em" prior or variance that an M-step keeps.
        variance: "constant" (sqrt(D)), "learned", "em" or "unequal" (a third for r > 1).
        feature_map: Linear variants: "elu", "favor" or "dpfp".
        init: "paper", "narrow", or the standard deviation of the scores q.k / sqrt(D).
        backend: "auto" or one of ``mgk.available_backends()``.
        position: "learned", "sinusoidal", "rotary" (before shifts) or "none".
        max_position_embeddings: Longest input in training; a limit only with
            ``position="learned"``.
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
        is_decoder: Causal attention; set by ``MgkForCausalLM``.
        use_cache: Whether a decoder in evaluation returns its cache.
        vocab_size: Token ids are below it.
        pad_token_id: For generation; models mask by ``attention_mask`` only.
        bos_token_id: For generation.
        eos_token_id: For generation; one id or several.
    """

    attention: Variant = DEFAULT_VARIANT
    num_attention_heads: Count = 4
    num_key_value_heads: Count | None = None
    sliding_window: Annotated[int, Limits(ge=0)] | None = None
    head_dim: Count | None = None
    hidden_size: Count = 128
    num_hidden_layers: Count = 4
    intermediate_size: Count = 512
    num_mixtures: Count = DEFAULT_NUM_MIXTURES
    kernel: Kernel = DEFAULT_KERNEL
    e_step: EStep = DEFAULT_E_STEP
    prior: Prior = DEFAULT_PRIOR
    prior_momentum: Probability = 0.0
    variance: Variance = DEFAULT_VARIANCE
    feature_map: FeatureMapName = DEFAULT_FEATURE_MAP
    init: Init | Positive = DEFAULT_INIT
    backend: str = "auto"
    position: Position = "learned"
    max_position_embeddings: Count = 1024
    hidden_dropout_prob: Probability = 0.1
    attention_probs_dropout_prob: Probability = 0.1
    hidden_act: str = "gelu"
    layer_norm_eps: Positive = 1e-5
    initializer_range: Positive = 0.02
    pooling: Pooling = "mean"
    classifier_hidden_size: Count | None = None
    adaptive_cutoffs: list[Count] | None = None
    adaptive_div_value: Positive = 4.0
    tie_word_embeddings: bool = True
    image_size: Count = 32
    patch_size: Count | None = None
    num_channels: Count = 3
    is_decoder: bool = False
    use_cache: bool = True
    vocab_size: Count = 257
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
