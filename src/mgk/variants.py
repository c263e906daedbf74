"""The six variants, their options and defaults. Does not import torch."""

from dataclasses import dataclass
from typing import Literal, get_args

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
