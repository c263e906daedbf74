"""What a model costs, by formula: parameters, FLOPs, bytes of the cache and of the activations, for all six variants.

Conventions. A multiply-add is 2 FLOPs; every other elementary operation (add, compare, exp, divide) is 1. All matrix
products count, and in attention also the pointwise work on pairs of a query and a key, which grows with N^2 as they
do. What is O(N C) beside them (norms, activations, residuals, dropout, embeddings) does not. Training is a forward and
a backward, which takes every product twice and the pointwise work as often: 3 forwards; what a kernel recomputes to
save memory is not counted. The M-step's counts are taken in training only and have no backward.

Symbols: E examples in B sequences (two each for pairs of documents) of N tokens with P = N^2 attended pairs each, or
N (N + 1) / 2 when causal; L layers of width C with a feed-forward width F; H heads of width D; M components, K keys
that are projected for each token (M for mgk and mlk, else 1), R features of phi; V words, T positions in the table; G
width between the two maps of a classifier, O labels; A numbers in a patch of an image; W bytes of a number.

Free of torch and NumPy: the command line and any script can plan with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal, Self, get_args

from mgk.analysis.formula import Quantity, Term

Variant = Literal["softmax", "linear", "mgk", "smgk", "mlk", "smlk"]
Formulation = Literal["fused", "plain"]
Head = Literal["none", "classification", "retrieval", "language"]

VARIANTS: tuple[Variant, ...] = get_args(Variant)
BASELINES: dict[str, Variant] = {"mgk": "softmax", "smgk": "softmax", "mlk": "linear", "smlk": "linear"}

_LINEAR = ("linear", "mlk", "smlk")
_SHIFTED = ("smgk", "smlk")
_SINGLE = ("softmax", "linear")
_CHOICES: dict[str, tuple[str, ...]] = {
    "attention": VARIANTS,
    "e_step": ("soft", "hard"),
    "prior": ("learned", "em", "uniform"),
    "variance": ("constant", "learned", "em"),
    "feature_map": ("elu", "favor", "dpfp"),
    "position": ("learned", "sinusoidal", "rotary", "none"),
    "head": get_args(Head),
    "pooling": ("mean", "cls"),
    "formulation": get_args(Formulation),
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """All that the cost depends on.

    Attributes:
        attention: the variant.
        heads: H.
        head_dim: D.
        hidden: C.
        layers: L.
        intermediate: F.
        length: N.
        batch: B.
        mixtures: M; softmax and linear have one whatever is said here.
        vocab: V.
        max_positions: T, of learned positions; the length if not given.
        labels: O.
        classifier_hidden: G; F if not given.
        head: what stands on top of the layers.
        tied: whether a language model's softmax uses the vectors of the words.
        cutoffs: of an adaptive softmax, whose cost is that of all words: what a training step leaves out depends on
            the words that it meets.
        cutoff_divisor: by which its clusters' widths shrink.
        pooling: "mean", or "cls", which adds a token.
        patch: A, for images cut into patches; 0 for tokens.
        causal: whether a token sees those before it only.
        e_step: "soft" or "hard".
        prior: "learned", "em" or "uniform".
        variance: "constant", "learned" or "em".
        feature_map: "elu", "favor" or "dpfp", of the linear variants.
        position: "learned", "sinusoidal", "rotary" or "none".
        bytes_per_number: W, 4 for float32, 2 for half precision.
        formulation: "fused" takes the q.k product of shifted keys once, as our kernels do (identity 2); "plain" takes
            it for each component, as Eq. 9 is written and as the paper counts.
    """

    attention: Variant
    heads: int
    head_dim: int
    hidden: int
    layers: int
    intermediate: int
    length: int
    batch: int = 1
    mixtures: int = 2
    vocab: int = 0
    max_positions: int | None = None
    labels: int = 0
    classifier_hidden: int | None = None
    head: Head = "none"
    tied: bool = True
    cutoffs: tuple[int, ...] = ()
    cutoff_divisor: float = 4.0
    pooling: str = "mean"
    patch: int = 0
    causal: bool = False
    e_step: str = "soft"
    prior: str = "learned"
    variance: str = "constant"
    feature_map: str = "elu"
    position: str = "learned"
    bytes_per_number: int = 4
    formulation: Formulation = "fused"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("vocab", "labels", "patch") else 1
            is_count = field.type in (int, int | None) and value is not None
            if is_count and (type(value) is not int or value < least):
                raise ValueError(f"{field.name} must be a whole number, {least} or more, got {value!r}")

    @classmethod
    def from_config(cls, config: Any, *, length: int, batch: int = 1, head: Head = "none", **options: Any) -> Self:
        """The sizes of a model with this :class:`mgk.models.MgkConfig`, of inputs of ``length`` tokens or patches."""
        patch = config.num_channels * config.patch_size**2 if config.patch_size else 0
        values = {
            "attention": config.attention,
            "heads": config.num_attention_heads,
            "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
            "hidden": config.hidden_size,
            "layers": config.num_hidden_layers,
            "intermediate": config.intermediate_size,
            "length": length,
            "batch": batch,
            "mixtures": config.num_mixtures,
            "vocab": config.vocab_size,
            "max_positions": config.max_position_embeddings,
            "labels": config.num_labels,
            "classifier_hidden": config.classifier_hidden_size,
            "head": head,
            "tied": config.tie_word_embeddings,
            "cutoffs": tuple(config.adaptive_cutoffs or ()),
            "cutoff_divisor": config.adaptive_div_value,
            "pooling": config.pooling,
            "patch": patch,
            "causal": config.is_decoder or head == "language",
            "e_step": config.e_step,
            "prior": config.prior,
            "variance": config.variance,
            "feature_map": config.feature_map,
            "position": config.position,
        }
        return cls(**{**values, **options})

    def baseline(self) -> Self:
        """The attention that a mixture replaces: softmax, or linear, with twice the heads."""
        if self.attention in _SINGLE:
            raise ValueError(f"attention {self.attention!r} is a baseline itself")
        return replace(self, attention=BASELINES[self.attention], heads=2 * self.heads)

    @property
    def is_linear(self) -> bool:
        """Whether attention is linear in the length."""
        return self.attention in _LINEAR

    @property
    def is_shifted(self) -> bool:
        """Whether the components of a key are shifts of one projection."""
        return self.attention in _SHIFTED

    @property
    def is_mixture(self) -> bool:
        """Whether a key has components."""
        return self.attention not in _SINGLE

    @property
    def symbols(self) -> dict[str, int]:
        """The value of every symbol of the formulas."""
        mixtures = self.mixtures if self.is_mixture else 1
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
            "K": 1 if self.is_shifted else mixtures,
            "R": self.head_dim * (1 if self.feature_map == "elu" else 2),
            "V": self.vocab,
            "T": self.length if self.max_positions is None else self.max_positions,
            "G": self.intermediate if self.classifier_hidden is None else self.classifier_hidden,
            "A": self.patch,
            "O": self.labels,
            "W": self.bytes_per_number,
        }


def attention_parameters(sizes: Sizes) -> Quantity:
    """(3 + K) C H D weights of one layer's attention, its biases, shifts, prior and variances.

    With a head width of its own, mgk with h heads and M = 2 has 5 C h D where softmax with 2h has 8 C h D; smgk has
    4 C h D and its shifts.
    """
    terms = [Term("projections", "(3 + K) * C * H * D"), Term("biases", "(2 + K) * H * D + C")]
    if sizes.is_shifted:
        terms.append(Term("shifts", "H * M * D"))
    if sizes.is_mixture and sizes.prior == "learned" and sizes.e_step == "soft":
        terms.append(Term("prior", "H * M"))
    if sizes.variance == "learned":
        terms.append(Term("variance", "H * M"))
    return _quantity("attention parameters", "", terms, sizes)


def layer_parameters(sizes: Sizes) -> Quantity:
    """Attention, the feed-forward part and two norms."""
    rest = [Term("feed-forward", "2 * C * F + F + C"), Term("norms", "4 * C")]
    return _named("layer parameters", attention_parameters(sizes) + _quantity("", "", rest, sizes))


def model_parameters(sizes: Sizes) -> Quantity:
    """Embeddings, all layers, the last norm and the head."""
    terms = [Term("patches", "A * C + C") if sizes.patch else Term("words", "V * C")]
    if sizes.position == "learned":
        terms.append(Term("positions", "T * C"))
    if sizes.pooling == "cls":
        terms.append(Term("vector in front", "C"))
    terms.append(Term("last norm", "2 * C"))
    rest = _quantity("", "", [*terms, *_head_parameters(sizes)], sizes)
    return _named("model parameters", layer_parameters(sizes).times("L") + rest)


def attention_flops(sizes: Sizes) -> Quantity:
    """One layer's attention, forward, without its projections."""
    return _quantity("attention FLOPs", "FLOPs", list(_attention_terms(sizes)), sizes)


def forward_flops(sizes: Sizes) -> Quantity:
    """The whole model, forward, for the whole batch."""
    layer = [
        Term("projections", "2 * (3 + K) * B * N * C * H * D"),
        *_attention_terms(sizes),
        Term("feed-forward", "4 * B * N * C * F"),
    ]
    layers = _quantity("forward FLOPs", "FLOPs", layer, sizes).times("L")
    patches = "N" if sizes.pooling == "mean" else "(N - 1)"
    outside = [Term("patches", f"2 * B * {patches} * A * C")] if sizes.patch else []
    return layers + _quantity("", "FLOPs", [*outside, *_head_flops(sizes)], sizes)


def training_flops(sizes: Sizes) -> Quantity:
    """One step of training: three forwards, and the M-step's counts where a prior or variance is "em"."""
    counts = _quantity("", "FLOPs", list(_m_step_terms(sizes)), sizes).times("L")
    return forward_flops(sizes).times("3", name="training FLOPs") + counts


def cache_bytes(sizes: Sizes) -> Quantity:
    """What decoding keeps: K keys and a value a token; of the linear variants a state that does not grow."""
    state = Term("state", "W * L * B * H * R * (D + 1)")
    grown = Term("keys and values", "W * L * B * H * (K + 1) * N * D")
    return _quantity("cache bytes", "bytes", [state if sizes.is_linear else grown], sizes)


def activation_bytes(sizes: Sizes) -> Quantity:
    """What autograd keeps of a training forward until the backward, with fused attention and no checkpointing.

    Memory that attention without a fused kernel needs for its N x N matrices comes on top.
    """
    layer = [
        Term("inputs of norms and maps, dropout masks", "W * B * N * 6 * C"),
        Term("feed-forward", "W * B * N * 2 * F"),
        *_attention_activations(sizes),
    ]
    layers = _quantity("activation bytes", "bytes", layer, sizes).times("L")
    logits = [Term("logits", "W * B * N * V")] if sizes.head == "language" else []
    return layers + _quantity("", "bytes", [Term("first dropout, last norm", "W * B * N * 2 * C"), *logits], sizes)


def _attention_activations(sizes: Sizes) -> Iterator[Term]:
    if sizes.is_linear:
        if sizes.feature_map != "elu":  # whose gradient needs its features alone
            yield Term("feature maps of queries and keys", "W * B * N * H * 3 * R * (1 + M)")
        yield Term("features, and the queries' in the order of a product", "W * B * N * H * R * (3 + M)")
        yield Term("values, sums, output", "W * B * N * H * (3 * D + 2)")
        return
    copies = " + 2" if sizes.is_shifted else ""
    yield Term("queries, keys, values, output", f"W * B * N * H * (K + 4{copies}) * D")
    yield Term("maxima, sums, biases", "W * B * N * H * (M + 2)")


def head_parameters(sizes: Sizes) -> Quantity:
    """What stands on top of the last norm; a softmax that uses the words' vectors adds none."""
    return _quantity("head parameters", "", list(_head_parameters(sizes)), sizes)


def _head_parameters(sizes: Sizes) -> Iterator[Term]:
    if sizes.head in _VECTORS:
        yield Term("classifier", f"{_VECTORS[sizes.head]} * C * G + G + G * O + O")
    elif sizes.head == "language" and sizes.cutoffs:
        yield from _adaptive(sizes, "")
    elif sizes.head == "language" and not sizes.tied:
        yield Term("softmax", "V * C")


def _head_flops(sizes: Sizes) -> Iterator[Term]:
    if sizes.head in _VECTORS:
        yield Term("classifier", f"2 * E * ({_VECTORS[sizes.head]} * C * G + G * O)")
    elif sizes.head == "language" and sizes.cutoffs:
        yield from _adaptive(sizes, "2 * B * N * ")
    elif sizes.head == "language":
        yield Term("softmax", "2 * B * N * C * V")


# Vectors that a classifier looks at together: of a pair x1, x2, x1 * x2 and x1 - x2.
_VECTORS = {"classification": 1, "retrieval": 4}


def _adaptive(sizes: Sizes, factor: str) -> Iterator[Term]:
    """The first words and one score a cluster; each cluster through a width that shrinks with its number."""
    yield Term("adaptive softmax, first words", f"{factor}C * {sizes.cutoffs[0] + len(sizes.cutoffs)}")
    for number, (start, end) in enumerate(pairwise((*sizes.cutoffs, sizes.vocab)), 1):
        width = int(sizes.hidden // sizes.cutoff_divisor**number)
        yield Term(f"adaptive softmax, cluster {number}", f"{factor}(C + {end - start}) * {width}")


def _attention_terms(sizes: Sizes) -> Iterator[Term]:
    if sizes.is_linear:
        yield Term("sums of features and values, twice", "4 * B * N * H * R * (D + 1)")
        if sizes.feature_map == "favor":
            yield Term("random features", "2 * B * N * H * R * D * (1 + M)")
        return
    is_shared = sizes.is_shifted and sizes.formulation == "fused"
    yield Term("query-key products", f"2 * B * P * H * D{'' if is_shared else ' * M'}")
    if is_shared:
        yield Term("shifts with queries and keys", "4 * B * N * H * M * D")
    yield Term("weights times values", "2 * B * P * H * D")
    yield Term(_POINTWISE_NAME, f"B * P * H * {_pointwise(sizes, is_shared)}")


_POINTWISE_NAME = "scale, shift, maximum, exp, sum"


def _pointwise(sizes: Sizes, is_shared: bool) -> str:
    """Elementary operations on a pair: of scores the scale and bias, maximum, difference, exp and sum.

    A hard E-step takes a maximum over the components and then one exp a pair; keys that share their product take one
    exp a pair too, times a product of M numbers (identity 2).
    """
    if sizes.attention == "softmax":
        return "5"
    if sizes.e_step == "hard":
        return "(2 * M + 6)" if is_shared else "(3 * M + 3)"
    return "(2 * M + 7)" if is_shared else "(6 * M)"


def _m_step_terms(sizes: Sizes) -> Iterator[Term]:
    if not sizes.is_mixture or "em" not in (sizes.prior, sizes.variance):
        return
    if sizes.is_linear:
        yield Term("M-step: products", "2 * B * P * H * R * M")
        yield Term("M-step: counts", "B * P * H * 3 * M")
        return
    is_shared = sizes.is_shifted and sizes.formulation == "fused"
    yield Term("M-step: products", f"2 * B * P * H * D{'' if is_shared else ' * M'}")
    yield Term("M-step: counts", "B * P * H * 6 * M")
    if sizes.variance == "em":
        yield Term("M-step: moments", "2 * B * P * H * (D + 1) * M")


def _quantity(name: str, unit: str, terms: list[Term], sizes: Sizes) -> Quantity:
    return Quantity(name, unit, tuple(terms), sizes.symbols)


def _named(name: str, quantity: Quantity) -> Quantity:
    return replace(quantity, name=name)
