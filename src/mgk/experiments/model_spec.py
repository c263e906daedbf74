"""What is compared: a variant of attention, its heads and its options."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import yaml

from mgk import variants
from mgk._util.suggestions import did_you_mean
from mgk.analysis.cost_model import Head, Sizes
from mgk.data.task_registry import SYNTHETIC, Kind, find_task
from mgk.training.recipe import Recipe, load_recipe
from mgk.variants import VARIANTS, ModelOptions, VariantSpec

_RECIPE_FIELDS = {
    "attention": "model.attention",
    "heads": "model.num_attention_heads",
    "key_value_heads": "model.num_key_value_heads",
    "mixtures": "model.num_mixtures",
    "kernel": "model.kernel",
    "e_step": "model.e_step",
    "prior": "model.prior",
    "variance": "model.variance",
    "feature_map": "model.feature_map",
    "init": "model.init",
    "head_dim": "model.head_dim",
    "feed_forward": "model.intermediate_size",
    "window": "model.sliding_window",
    "position": "model.position",
}
# Options that are the recipe's where they are None.
_OF_RECIPE = ("init", "head_dim", "feed_forward", "window", "position")
# The additions of Table 4 as the paper has them.
_OPTION_TITLES = {
    ("kernel", "dot"): " + dot kernel",
    ("e_step", "hard"): " + Hard-E",
    ("prior", "em"): " + Soft-E",
    ("prior", "uniform"): " + uniform prior",
    ("variance", "learned"): " + learned variance",
    ("variance", "em"): " + M-step variance",
    ("variance", "unequal"): " + unequal variances",
    ("feature_map", "favor"): " + Performer features",
    ("feature_map", "dpfp"): " + DPFP features",
    ("init", "paper"): " with the paper's initialisation",
    ("init", "narrow"): " with the narrow initialisation",
    ("position", "none"): ", no positions",
}

_SYMBOLS = {
    "mixtures": "M",
    "init": "initial score std",
    "head_dim": "D",
    "feed_forward": "feed-forward width",
    "window": "window",
    "position": "positions",
}

# Heads of the mixtures in Figures 3 and 7; their baselines have twice as many.
HALVED = (4, 2, 1)
HEAD_OF_KIND: dict[Kind, Head] = {
    "sequence": "classification",
    "image": "classification",
    "pair": "retrieval",
    "language": "language",
}
# Vocabulary sizes of tasks whose data may be absent; texts are bytes.
_BYTES = 257
_VOCABULARIES = {
    "listops": 16,
    "image": 256,
    "pathfinder": 256,
    "bytes": 256,
    "wikitext-2": 33_278,
    "wikitext-103": 267_735,
}


@dataclass(frozen=True)
class ModelSpec:
    """A variant of attention and its options; everything else follows from the recipe.

    Attributes:
        heads: Hq, of queries.
        key_value_heads: H, of keys and values; None: Hq.
        mixtures: M; softmax and linear attention have one key and ignore it.
        e_step: "soft" (settings A and B of Section 3.3) or "hard" (C).
        prior: "learned" (A and C), "em" (B) or "uniform".
        init: of queries, keys and shifts; None: the recipe's.
        kernel: "gaussian" (Eq. 9) or "dot" (Eq. 8).
        head_dim: D; like ``feed_forward``, ``window`` and ``position`` the recipe's if None.
    """

    attention: str
    heads: int
    key_value_heads: int | None = None
    mixtures: int = variants.DEFAULT_NUM_MIXTURES
    e_step: str = variants.DEFAULT_E_STEP
    prior: str = variants.DEFAULT_PRIOR
    variance: str = variants.DEFAULT_VARIANCE
    feature_map: str = variants.DEFAULT_FEATURE_MAP
    init: str | float | None = None
    kernel: str = variants.DEFAULT_KERNEL
    head_dim: int | None = None
    feed_forward: int | None = None
    window: int | None = None
    position: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """``mgk:4`` is mgk with 4 heads, ``mgk:8/4`` with 8 that read 4 of keys and values.

        Options follow: ``mgk:4 mixtures=3 variance=em``. ``ValueError`` suggests the nearest
        variant or option otherwise.
        """
        name, *options = text.split()
        model = cls._parse_name(name)
        for option in options:
            field, _, value = option.partition("=")
            if field not in _RECIPE_FIELDS:
                near = did_you_mean(field, _RECIPE_FIELDS)
                raise ValueError(f"{text!r}: there is no option {field!r}; {near}")
            model = replace(model, **{field: yaml.safe_load(value)})
        return model

    @classmethod
    def _parse_name(cls, text: str) -> Self:
        attention, colon, rest = text.strip().partition(":")
        heads, slash, groups = rest.partition("/")
        if attention not in VARIANTS:
            raise ValueError(f"there is no attention {attention!r}; {did_you_mean(attention, VARIANTS)}")
        if not colon or not heads.isdecimal() or int(heads) < 1:
            raise ValueError(f"{text!r} must name the attention and its heads, as in {attention}:4")
        if not slash:
            return cls(attention, int(heads))
        if not groups.isdecimal() or int(groups) < 1 or int(heads) % int(groups):
            wanted = f"heads of keys and values that divide the {heads} heads"
            raise ValueError(f"{text!r} must have {wanted}, as in {attention}:8/4")
        return cls(attention, int(heads), int(groups))

    @classmethod
    def of_recipe(cls, recipe: Recipe) -> Self:
        """The model of a recipe."""
        given, own = (one.model.given() for one in (recipe, load_recipe(recipe.task, recipe.preset)))
        fields = {name: path.partition(".")[2] for name, path in _RECIPE_FIELDS.items()}
        chosen = {name: given.get(field) for name, field in fields.items()}
        for name in _OF_RECIPE:
            if chosen[name] == own.get(fields[name]):
                chosen[name] = None
        model = cls(**{name: value for name, value in chosen.items() if value is not None})
        return model if model.is_mixture else replace(model, mixtures=variants.DEFAULT_NUM_MIXTURES)

    @property
    def name(self) -> str:
        """The name on the command line: ``mgk:4``, ``mgk:8/4``, ``mgk:4 mixtures=3``."""
        options = (f" {name}={value}" for name, value in self._options.items() if name != "key_value_heads")
        return f"{self.attention}:{self._numbers}{''.join(options)}"

    @property
    def slug(self) -> str:
        """The name in file names: ``mgk-1h``, ``mgk-8h-4kv``, ``smgk-1h-e_step-hard``."""
        groups = [] if self.key_value_heads is None else [f"{self.key_value_heads}kv"]
        options = (f"{name}-{value}" for name, value in self._options.items() if name != "key_value_heads")
        return "-".join([self.attention, f"{self.heads}h", *groups, *options])

    @property
    def title(self) -> str:
        """The name in tables: ``mgk, 1 head``, ``smgk + Hard-E, 1 head``."""
        return f"{self._variant}, {self._heads}"

    @property
    def phrase(self) -> str:
        """The name in sentences: ``mgk with 1 head``."""
        return f"{self._variant} with {self._heads}"

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields of a recipe that make it this model's."""
        chosen = {"attention": self.attention, "heads": self.heads, **self._options}
        return {_RECIPE_FIELDS[name]: value for name, value in chosen.items()}

    @property
    def variant(self) -> VariantSpec:
        """The declaration of the variant."""
        return VARIANTS[self.attention]

    @property
    def is_mixture(self) -> bool:
        """Whether a key has components."""
        return self.variant.is_mixture

    def baseline(self, heads: int) -> "ModelSpec":
        """The baseline of a mixture's family, with so many heads."""
        return ModelSpec(self.variant.family, heads)

    def scaled(self, factor: float) -> Self:
        """The same model with ``factor`` times the heads, of each kind."""
        groups = self.key_value_heads
        scaled = None if groups is None else max(1, round(factor * groups))
        return replace(self, heads=max(1, round(factor * self.heads)), key_value_heads=scaled)

    @property
    def _options(self) -> dict[str, Any]:
        """The options that are not the default."""
        default = ModelSpec(self.attention, self.heads)
        return {name: value for name, value in asdict(self).items() if value != getattr(default, name)}

    @property
    def _variant(self) -> str:
        return self.attention + "".join(
            _OPTION_TITLES.get((name, value), f", {_SYMBOLS.get(name)} = {value}")
            for name, value in self._options.items()
            if name != "key_value_heads"
        )

    @property
    def _heads(self) -> str:
        return f"{self._numbers} head{'' if self.heads == 1 else 's'}"

    @property
    def _numbers(self) -> str:
        return f"{self.heads}" if self.key_value_heads is None else f"{self.heads}/{self.key_value_heads}"


def sizes_of(recipe: Recipe, **options: Any) -> Sizes:
    """The sizes of a recipe's model for inputs of full length."""
    model = recipe.model
    task = find_task(recipe.task)
    head = HEAD_OF_KIND[task.kind]
    hidden = model.hidden_size or ModelOptions.hidden_size
    is_sample = recipe.data.name.startswith(SYNTHETIC)
    given: dict[str, Any] = {
        "mixtures": model.num_mixtures,
        "cutoff_divisor": model.adaptive_div_value,
        **{name: getattr(model, name) for name in ("e_step", "prior", "variance", "feature_map", "position")},
    }
    return Sizes(
        attention=model.attention,
        heads=model.num_attention_heads,
        key_heads=model.num_key_value_heads,
        head_dim=model.head_dim or hidden // model.num_attention_heads,
        hidden=hidden,
        layers=model.num_hidden_layers or ModelOptions.num_hidden_layers,
        intermediate=model.intermediate_size or ModelOptions.intermediate_size,
        length=recipe.data.max_length or 1024,
        vocab=64 if is_sample and head == "language" else _VOCABULARIES.get(recipe.task, _BYTES),
        labels=task.num_labels,
        head=head,
        causal=head == "language",
        cutoffs=() if is_sample else tuple(model.adaptive_cutoffs or ()),
        **{name: value for name, value in given.items() if value is not None},
        **options,
    )


def sizes_of_paper(model: ModelSpec, *, fused: bool = True) -> Sizes:
    """The sizes of a model of the paper on Retrieval."""
    return sizes_of(load_recipe("retrieval", "paper", overrides=model.overrides), fused=fused)
