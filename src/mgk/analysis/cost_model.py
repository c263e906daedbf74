"""The cost of a model by formula: parameters, FLOPs, bytes of the cache and of the activations, for all six variants.

A multiply-add is 2 FLOPs; every other elementary operation (add, compare, exp, divide) is 1. Counted are all matrix
products, and in attention also the pointwise operations on pairs of a query and a key, which grow with N^2 as well.
Norms, activations, residuals, dropout and embeddings, which are O(N C), are not. Training is a forward and a backward,
which takes every product twice and the pointwise work as often: 3 forwards. What a kernel recomputes to save memory is
not counted. The M-step's counts are taken in training only and have no backward.

Symbols: E examples in B sequences (two each for pairs of documents) of N tokens with P = N^2 attended pairs each, or
N (N + 1) / 2 when causal; L layers of width C with a feed-forward width F; H heads of width D; M components, K keys
that are projected for each token (M for mgk and mlk, else 1), R features of phi; V words, T positions in the table; G
width between the two maps of a classifier, O labels; A numbers in a patch of an image; W bytes of a number.

Imports neither torch nor NumPy.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal, Self, get_args

from mgk import variants
from mgk.analysis.formula import Quantity, Term
from mgk.variants import VARIANTS, VariantSpec

Head = Literal["none", "classification", "retrieval", "language"]
# Input vectors of a classifier: for a pair x1, x2, x1 * x2 and x1 - x2.
_VECTORS = {"classification": 1, "retrieval": 4}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Everything that the cost depends on; in comments the symbol of each size."""

    attention: variants.Variant
    heads: int  # H
    head_dim: int  # D
    hidden: int  # C
    layers: int  # L
    intermediate: int  # F
    length: int  # N
    batch: int = 1  # E
    mixtures: int = variants.DEFAULT_NUM_MIXTURES  # M; softmax and linear attention have one key
    vocab: int = 0  # V
    max_positions: int | None = None  # T, of learned positions; by default the length
    labels: int = 0  # O
    classifier_hidden: int | None = None  # G; by default F
    head: Head = "none"  # on top of the layers
    tied: bool = True  # whether a language model's output layer shares the token embeddings
    cutoffs: tuple[int, ...] = ()  # of an adaptive softmax, counted as if all clusters were evaluated
    cutoff_divisor: float = 4.0  # by which its clusters' widths shrink
    pooling: variants.Pooling = "mean"  # "cls" adds a token
    patch: int = 0  # A, for images cut into patches; 0 for tokens
    causal: bool = False
    e_step: variants.EStep = variants.DEFAULT_E_STEP
    prior: variants.Prior = variants.DEFAULT_PRIOR
    variance: variants.Variance = variants.DEFAULT_VARIANCE
    feature_map: variants.FeatureMapName = variants.DEFAULT_FEATURE_MAP
    position: variants.Position = "learned"
    bytes_per_number: int = 4  # W: 4 for float32, 2 for half precision
    fused: bool = (
        True  # False: a q.k product for each component of shifted keys too, as in Eq. 9 and the paper's counts
    )

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value, choices = field.name, getattr(self, field.name), get_args(field.type)
            if str in map(type, choices) and value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
            least = 0 if name in ("vocab", "labels", "patch") else 1
            is_count = field.type in (int, int | None) and value is not None
            if is_count and (type(value) is not int or value < least):
                raise ValueError(f"{name} must be a whole number, {least} or more, got {value!r}")

    @classmethod
    def from_config(cls, config: Any, *, length: int, batch: int = 1, head: Head = "none", **options: Any) -> Self:
        """The sizes of a model with this :class:`mgk.models.MgkConfig`, for inputs of ``length`` tokens or patches."""
        names = {name: getattr(config, name) for name in _SHARED_NAMES}
        sizes = {name: getattr(config, source) for name, source in _CONFIG_NAMES.items()}
        computed = {
            "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
            "cutoffs": tuple(config.adaptive_cutoffs or ()),
            "patch": config.num_channels * config.patch_size**2 if config.patch_size else 0,
            "causal": config.is_decoder or head == "language",
        }
        return cls(length=length, batch=batch, head=head, **{**names, **sizes, **computed, **options})

    def baseline(self) -> Self:
        """Softmax or linear attention with twice the heads, which a mixture replaces."""
        if not self.variant.is_mixture:
            raise ValueError(f"attention {self.attention!r} is a baseline itself")
        return replace(self, attention=self.variant.family, heads=2 * self.heads)

    @property
    def variant(self) -> VariantSpec:
        """The declaration of the variant."""
        return VARIANTS[self.attention]

    @property
    def has_shared_product(self) -> bool:
        """Whether the components of a key share one q.k product."""
        return self.fused and self.variant.is_shifted

    @property
    def symbols(self) -> dict[str, int]:
        """The value of every symbol of the formulas."""
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
            "D": self.head_dim,
            "M": mixtures,
            "K": 1 if self.variant.is_shifted else mixtures,
            "R": self.head_dim * (1 if self.feature_map == "elu" else 2),
            "V": self.vocab,
            "T": self.length if self.max_positions is None else self.max_positions,
            "G": self.intermediate if self.classifier_hidden is None else self.classifier_hidden,
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
    """(3 + K) C H D weights of one layer's attention, plus biases, shifts, prior and variances.

    mgk with h heads and M = 2 has 5 C h D where softmax with 2h heads has 8 C h D; smgk has 4 C h D and its shifts.
    """
    terms = [Term("projections", "(3 + K) * C * H * D"), Term("biases", "(2 + K) * H * D + C")]
    if sizes.variant.is_shifted:
        terms.append(Term("shifts", "H * M * D"))
    if sizes.variant.is_mixture and sizes.prior == "learned" and sizes.e_step == "soft":
        terms.append(Term("prior", "H * M"))
    if sizes.variance == "learned":
        terms.append(Term("variance", "H * M"))
    return sizes.quantity("attention parameters", *terms)


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
    rest = sizes.quantity("", *terms, *_head_terms(sizes, flops=False))
    return layer_parameters(sizes).times("L", name="model parameters") + rest


def attention_flops(sizes: Sizes) -> Quantity:
    """One layer's attention, forward, without its projections."""
    return sizes.quantity("attention FLOPs", *_attention_terms(sizes))


def forward_flops(sizes: Sizes) -> Quantity:
    """The whole model, forward, for the whole batch."""
    layer = sizes.quantity(
        "forward FLOPs",
        Term("projections", "2 * (3 + K) * B * N * C * H * D"),
        *_attention_terms(sizes),
        Term("feed-forward", "4 * B * N * C * F"),
    )
    patches = "N" if sizes.pooling == "mean" else "(N - 1)"
    embedding = [Term("patches", f"2 * B * {patches} * A * C")] if sizes.patch else []
    return layer.times("L") + sizes.quantity("", *embedding, *_head_terms(sizes, flops=True))


def training_flops(sizes: Sizes) -> Quantity:
    """One training step: three forwards, and the M-step's counts where a prior or variance is "em"."""
    counts = sizes.quantity("", *_m_step_terms(sizes)).times("L")
    return forward_flops(sizes).times("3", name="training FLOPs") + counts


def cache_bytes(sizes: Sizes) -> Quantity:
    """The decoding cache: K keys and a value per token; for the linear variants a state of constant size."""
    if sizes.variant.is_linear:
        return sizes.quantity("cache bytes", Term("state", "W * L * B * H * R * (D + 1)"))
    return sizes.quantity("cache bytes", Term("keys and values", "W * L * B * H * (K + 1) * N * D"))


def activation_bytes(sizes: Sizes) -> Quantity:
    """What autograd saves in a training forward, with fused attention and without checkpointing.

    The N x N matrices of attention without a fused kernel are not included.
    """
    layer = sizes.quantity(
        "activation bytes",
        Term("inputs of norms and maps, dropout masks", "W * B * N * 6 * C"),
        Term("feed-forward", "W * B * N * 2 * F"),
        *_attention_activations(sizes),
    )
    logits = [Term("logits", "W * B * N * V")] if sizes.head == "language" else []
    return layer.times("L") + sizes.quantity("", Term("first dropout, last norm", "W * B * N * 2 * C"), *logits)


def head_parameters(sizes: Sizes) -> Quantity:
    """The head on top of the last norm; an output layer that shares the token embeddings adds none."""
    return sizes.quantity("head parameters", *_head_terms(sizes, flops=False))


def _attention_activations(sizes: Sizes) -> Iterator[Term]:
    if sizes.variant.is_linear:
        if sizes.feature_map != "elu":  # whose gradient needs its features alone
            yield Term("feature maps of queries and keys", "W * B * N * H * 3 * R * (1 + M)")
        yield Term("features, and the queries' in the order of a product", "W * B * N * H * R * (3 + M)")
        yield Term("values, sums, output", "W * B * N * H * (3 * D + 2)")
        return
    copies = " + 2" if sizes.variant.is_shifted else ""
    yield Term("queries, keys, values, output", f"W * B * N * H * (K + 4{copies}) * D")
    yield Term("maxima, sums, biases", "W * B * N * H * (M + 2)")


def _head_terms(sizes: Sizes, *, flops: bool) -> Iterator[Term]:
    """The parameters of the head, or its FLOPs."""
    per_token = "2 * B * N * " if flops else ""
    if sizes.head in _VECTORS:
        weights = f"{_VECTORS[sizes.head]} * C * G"
        yield Term("classifier", f"2 * E * ({weights} + G * O)" if flops else f"{weights} + G + G * O + O")
    elif sizes.head == "language" and sizes.cutoffs:
        yield from _adaptive_softmax(sizes, per_token)
    elif sizes.head == "language" and (flops or not sizes.tied):
        yield Term("softmax", f"{per_token}C * V")


def _adaptive_softmax(sizes: Sizes, factor: str) -> Iterator[Term]:
    """The first words and one score per cluster; each cluster has a width that shrinks with its number."""
    yield Term("adaptive softmax, first words", f"{factor}C * {sizes.cutoffs[0] + len(sizes.cutoffs)}")
    for number, (start, end) in enumerate(pairwise((*sizes.cutoffs, sizes.vocab)), 1):
        width = int(sizes.hidden // sizes.cutoff_divisor**number)
        yield Term(f"adaptive softmax, cluster {number}", f"{factor}(C + {end - start}) * {width}")


def _attention_terms(sizes: Sizes) -> Iterator[Term]:
    if sizes.variant.is_linear:
        yield Term("sums of features and values, twice", "4 * B * N * H * R * (D + 1)")
        if sizes.feature_map == "favor":
            yield Term("random features", "2 * B * N * H * R * D * (1 + M)")
        return
    yield Term("query-key products", _products(sizes))
    if sizes.has_shared_product:
        yield Term("shifts with queries and keys", "4 * B * N * H * M * D")
    yield Term("weights times values", "2 * B * P * H * D")
    yield Term("scale, shift, maximum, exp, sum", f"B * P * H * {_pointwise(sizes)}")


def _products(sizes: Sizes) -> str:
    return "2 * B * P * H * D" if sizes.has_shared_product else "2 * B * P * H * D * M"


def _pointwise(sizes: Sizes) -> str:
    """Elementary operations per pair: scale and bias of the scores, maximum, difference, exp and sum.

    A hard E-step takes a maximum over the components and then one exp per pair. Components that share their product
    take one exp per pair too, times a product of M numbers.
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
