"""Parameters, FLOPs and bytes of a model by formula. Imports no torch, no NumPy.

A multiply-add is 2 FLOPs, any other operation 1. Counted are matrix products, and
in attention pointwise work on pairs; not O(N C) work (norms, activations, residuals,
dropout, embeddings), nor what kernels recompute. Training takes 3 forwards, as a
backward has every product twice, plus the M-step's counts.

Symbols: E examples in B sequences (two each for pairs of documents) of N tokens; P
attended pairs, N^2 or N (N + 1) / 2 when causal; L layers of width C, feed-forward
width F; H heads of width D; M components; K projected keys a token; R features of
phi; V words; T positions; G classifier width; O labels; A numbers in a patch; W bytes
of a number.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal, Self, get_args

from mgk import variants
from mgk.analysis.formula import Quantity, Term
from mgk.variants import VARIANTS, VariantSpec

Head = Literal["none", "classification", "retrieval", "language"]
# Input vectors of a classifier: x1, x2, x1 * x2 and x1 - x2 for a pair.
_VECTORS = {"classification": 1, "retrieval": 4}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the cost depends on, with the symbol of each size."""

    attention: variants.Variant
    heads: int  # H, of queries
    head_dim: int  # D
    hidden: int  # C
    layers: int  # L
    intermediate: int  # F
    length: int  # N
    key_heads: int | None = None  # J, of keys and values; by default H
    batch: int = 1  # E
    mixtures: int = variants.DEFAULT_NUM_MIXTURES  # M
    vocab: int = 0  # V
    max_positions: int | None = None  # T; by default the length
    labels: int = 0  # O
    classifier_hidden: int | None = None  # G; by default F
    head: Head = "none"
    tied: bool = True  # a language model's output shares the token embeddings
    cutoffs: tuple[int, ...] = ()  # of an adaptive softmax; all clusters count
    cutoff_divisor: float = variants.ModelOptions.adaptive_div_value  # ratio of their widths
    pooling: variants.Pooling = variants.ModelOptions.pooling  # "cls" adds a token
    patch: int = 0  # A; 0 for tokens
    causal: bool = False
    e_step: variants.EStep = variants.DEFAULT_E_STEP
    prior: variants.Prior = variants.DEFAULT_PRIOR
    variance: variants.Variance = variants.DEFAULT_VARIANCE
    feature_map: variants.FeatureMapName = variants.DEFAULT_FEATURE_MAP
    position: variants.Position = variants.ModelOptions.position
    bytes_per_number: int = 4  # W
    fused: bool = True  # False: a product q.k for each shifted key

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            choices = get_args(field.type)
            if str in map(type, choices) and value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
            least = 0 if name in ("vocab", "labels", "patch") else 1
            is_count = field.type in (int, int | None) and value is not None
            if is_count and (type(value) is not int or value < least):
                raise ValueError(f"{name} must be a whole number, {least} or more, got {value!r}")

    @classmethod
    def from_config(
        cls, config: Any, *, length: int, batch: int = 1, head: Head = "none", **options: Any
    ) -> Self:
        """The sizes of a :class:`mgk.models.MgkConfig`, for ``length`` tokens or patches."""
        sizes = {name: getattr(config, name) for name in _SHARED_NAMES}
        sizes |= {name: getattr(config, source) for name, source in _CONFIG_NAMES.items()}
        sizes |= {
            "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
            "cutoffs": tuple(config.adaptive_cutoffs or ()),
            "patch": config.num_channels * (config.patch_size or 0) ** 2,
            "causal": config.is_decoder or head == "language",
        }
        if sizes["key_heads"] == sizes["heads"]:  # no groups
            sizes["key_heads"] = None
        return cls(length=length, batch=batch, head=head, **(sizes | options))

    def baseline(self) -> Self:
        """Softmax or linear attention with twice the heads."""
        if not self.variant.is_mixture:
            raise ValueError(f"attention {self.attention!r} is a baseline itself")
        groups = None if self.key_heads is None else 2 * self.key_heads
        return replace(self, attention=self.variant.family, heads=2 * self.heads, key_heads=groups)

    @property
    def variant(self) -> VariantSpec:
        """The declaration of the variant."""
        return VARIANTS[self.attention]

    @property
    def has_shared_product(self) -> bool:
        """Whether the components of a key share one product q.k."""
        return self.fused and self.variant.is_shifted

    @property
    def symbols(self) -> dict[str, int]:
        """The value of every symbol."""
        mixtures = self.variant.num_components(self.mixtures)
        n = self.length + (self.pooling == "cls")
        return {
            "E": self.batch,
            "B": self.batch * (2 if self.head == "retrieval" else 1),
            "N": n,
            "P": n * (n + 1) // 2 if self.causal else n * n,
            "L": self.layers,
            "C": self.hidden,
            "F": self.intermediate,
            "H": self.heads,
            "J": self.key_heads or self.heads,
            "D": self.head_dim,
            "M": mixtures,
            "K": 1 if self.variant.is_shifted else mixtures,
            "R": self.head_dim * (1 if self.feature_map == "elu" else 2),
            "V": self.vocab,
            "T": self.max_positions or self.length,
            "G": self.classifier_hidden or self.intermediate,
            "A": self.patch,
            "O": self.labels,
            "W": self.bytes_per_number,
        }

    def quantity(self, name: str, *terms: Term) -> Quantity:
        """The sum of some terms at these sizes."""
        return Quantity(name, terms, self.symbols)


_SHARED_NAMES = ("attention", "pooling", "e_step", "prior", "variance", "feature_map", "position")
_CONFIG_NAMES = {
    "heads": "num_attention_heads",
    "key_heads": "num_key_value_heads",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "intermediate": "intermediate_size",
    "mixtures": "num_mixtures",
    "vocab": "vocab_size",
    "max_positions": "max_position_embeddings",
    "labels": "num_labels",
    "classifier_hidden": "classifier_hidden_size",
    "tied": "tie_word_embeddings",
    "cutoff_divisor": "adaptive_div_value",
}


def attention_parameters(sizes: Sizes) -> Quantity:
    """(3 + K) C H D weights, plus biases, shifts, prior and variances.

    With J key heads (2 H + (1 + K) J) C D. For M = 2 and h heads, mgk has 5 C h D and smgk
    4 C h D, where softmax with 2h heads has 8 C h D.
    """
    terms = [Term("projections", _projections(sizes)), Term("biases", "(H + (1 + K) * J) * D + C")]
    if sizes.variant.is_shifted:
        terms.append(Term("shifts", "J * M * D"))
    has_prior = sizes.prior == "learned" and sizes.e_step == "soft"
    if sizes.variant.is_mixture and has_prior:
        terms.append(Term("prior", "J * M"))
    if sizes.variance == "learned":
        terms.append(Term("variance", "J * M"))
    return sizes.quantity("attention parameters", *terms)


def _projections(sizes: Sizes) -> str:
    """Weights of queries and outputs, and of K keys and a value of each key head."""
    return "(3 + K) * C * H * D" if sizes.key_heads is None else "(2 * H + (1 + K) * J) * C * D"


def layer_parameters(sizes: Sizes) -> Quantity:
    """Attention, the feed-forward part and two norms."""
    rest = Term("feed-forward", "2 * C * F + F + C"), Term("norms", "4 * C")
    return sizes.quantity("layer parameters", *attention_parameters(sizes).terms, *rest)


def model_parameters(sizes: Sizes) -> Quantity:
    """Embeddings, all layers, the last norm and the head."""
    terms = [Term("patches", "A * C + C") if sizes.patch else Term("words", "V * C")]
    if sizes.position == "learned":
        terms.append(Term("positions", "T * C"))
    if sizes.pooling == "cls":
        terms.append(Term("class token", "C"))
    terms.append(Term("last norm", "2 * C"))
    layers = layer_parameters(sizes).times("L", name="model parameters")
    return layers + sizes.quantity("", *terms, *_head_terms(sizes, flops=False))


def attention_flops(sizes: Sizes) -> Quantity:
    """One layer's attention, forward, without its projections."""
    return sizes.quantity("attention FLOPs", *_attention_terms(sizes))


def forward_flops(sizes: Sizes) -> Quantity:
    """The whole model, forward, for the whole batch."""
    layer = sizes.quantity(
        "forward FLOPs",
        Term("projections", f"2 * B * N * {_projections(sizes)}"),
        *_attention_terms(sizes),
        Term("feed-forward", "4 * B * N * C * F"),
    )
    patches = "N" if sizes.pooling == "mean" else "(N - 1)"
    terms = [Term("patches", f"2 * B * {patches} * A * C")] if sizes.patch else []
    rest = sizes.quantity("", *terms, *_head_terms(sizes, flops=True))
    return layer.times("L") + rest


def training_flops(sizes: Sizes) -> Quantity:
    """One step: three forwards, and the M-step's counts with "em"."""
    counts = sizes.quantity("", *_m_step_terms(sizes)).times("L")
    return forward_flops(sizes).times("3", name="training FLOPs") + counts


def cache_bytes(sizes: Sizes) -> Quantity:
    """K keys and a value per token, or a constant state."""
    term = Term("keys and values", "W * L * B * J * (K + 1) * N * D")
    if sizes.variant.is_linear:
        term = Term("state", "W * L * B * J * R * (D + 1)")
    return sizes.quantity("cache bytes", term)


def activation_bytes(sizes: Sizes) -> Quantity:
    """What autograd saves in a forward, fused and without checkpointing."""
    layer = sizes.quantity(
        "activation bytes",
        Term("inputs of norms and maps", "W * B * N * 4 * C"),
        Term("weights of the joint projection", "W * C * (H + (K + 1) * J) * D"),
        Term("feed-forward", "W * B * N * 2 * F"),
        *_attention_activations(sizes),
    )
    rest = [Term("last norm", "W * B * N * C")]
    if sizes.head == "language" and not sizes.cutoffs:
        rest.append(Term("logits", "W * B * N * V"))
    return layer.times("L") + sizes.quantity("", *rest)


def _attention_activations(sizes: Sizes) -> Iterator[Term]:
    if sizes.variant.is_linear:
        if sizes.feature_map != "elu":  # whose gradient needs its features alone
            yield Term("feature maps of queries and keys", "W * B * N * (H + M * J) * 3 * R")
        yield Term(
            "features, and the queries' in the order of a product", "W * B * N * (2 * H + (1 + M) * J) * R"
        )
        yield Term("values, sums, output", "W * B * N * (H * (2 * D + 2) + J * D)")
        return
    yield Term("queries, keys, values, output", "W * B * N * (3 * H + (K + 1) * J) * D")
    yield Term("maxima, sums", "W * B * N * 2 * H")


def _head_terms(sizes: Sizes, *, flops: bool) -> Iterator[Term]:
    """The parameters of the head, or its FLOPs."""
    per_token = "2 * B * N * " if flops else ""
    if sizes.head in _VECTORS:
        weights = f"{_VECTORS[sizes.head]} * C * G"
        parameters = f"{weights} + G + G * O + O"
        yield Term("classifier", f"2 * E * ({weights} + G * O)" if flops else parameters)
    elif sizes.head == "language" and sizes.cutoffs:
        yield from _adaptive_softmax(sizes, per_token)
    elif sizes.head == "language" and (flops or not sizes.tied):
        yield Term("softmax", f"{per_token}C * V")


def _adaptive_softmax(sizes: Sizes, factor: str) -> Iterator[Term]:
    """First words and a score per cluster; then clusters of falling width."""
    ends = (*sizes.cutoffs, sizes.vocab)
    first = ends[0] + len(sizes.cutoffs)
    yield Term("adaptive softmax, first words", f"{factor}C * {first}")
    for number, (start, end) in enumerate(pairwise(ends), 1):
        width = int(sizes.hidden // sizes.cutoff_divisor**number)
        formula = f"{factor}(C + {end - start}) * {width}"
        yield Term(f"adaptive softmax, cluster {number}", formula)


def _attention_terms(sizes: Sizes) -> Iterator[Term]:
    if sizes.variant.is_linear:
        yield Term("sums of features and values, twice", "2 * B * N * (H + J) * R * (D + 1)")
        if sizes.feature_map == "favor":
            yield Term("random features", "2 * B * N * R * D * (H + M * J)")
        return
    yield Term("query-key products", _products(sizes))
    if sizes.has_shared_product:
        yield Term("shifts with queries and keys", "2 * B * N * (H + J) * M * D")
    yield Term("weights times values", "2 * B * P * H * D")
    yield Term("scale, shift, maximum, exp, sum", f"B * P * H * {_pointwise(sizes)}")


def _products(sizes: Sizes) -> str:
    return "2 * B * P * H * D" if sizes.has_shared_product else "2 * B * P * H * D * M"


def _pointwise(sizes: Sizes) -> str:
    """Operations per pair: scale, bias, maximum, difference, exp and sum.

    A hard E-step, and components that share their product, take one exp per pair.
    """
    if sizes.attention == "softmax":
        return "5"
    if sizes.e_step == "hard":
        return "(2 * M + 6)" if sizes.has_shared_product else "(3 * M + 3)"
    return "(2 * M + 7)" if sizes.has_shared_product else "(6 * M)"


def _m_step_terms(sizes: Sizes) -> Iterator[Term]:
    if not sizes.variant.is_mixture or "em" not in (sizes.prior, sizes.variance):
        return
    if sizes.variant.is_linear:
        yield Term("M-step: products", "2 * B * P * H * R * M")
        yield Term("M-step: counts", "B * P * H * 3 * M")
        return
    yield Term("M-step: products", _products(sizes))
    yield Term("M-step: counts", "B * P * H * 6 * M")
    if sizes.variance == "em":
        yield Term("M-step: moments", "2 * B * P * H * (D + 1) * M")
