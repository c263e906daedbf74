"""What is compared: a variant of attention, its heads and its options. Does not import torch."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from mgk import variants
from mgk._util.suggestions import did_you_mean
from mgk.analysis.cost_model import Head, Sizes
from mgk.data.task_registry import Kind, find_task
from mgk.training.recipe import Recipe, load_recipe
from mgk.variants import VARIANTS

_RECIPE_FIELDS = {
    "attention": "model.attention",
    "heads": "model.num_attention_heads",
    "mixtures": "model.num_mixtures",
    "e_step": "model.e_step",
    "prior": "model.prior",
    "variance": "model.variance",
    "feature_map": "model.feature_map",
}
# The additions of Table 4 as the paper has them.
_OPTION_TITLES = {
    ("e_step", "hard"): " + Hard-E",
    ("prior", "em"): " + Soft-E",
    ("prior", "uniform"): " + uniform prior",
    ("variance", "learned"): " + learned variance",
    ("variance", "em"): " + M-step variance",
    ("feature_map", "favor"): " + Performer features",
    ("feature_map", "dpfp"): " + DPFP features",
}

# Heads of the mixtures in Figures 3 and 7; their baselines have twice as many.
HALVED = (4, 2, 1)
HEAD_OF_KIND: dict[Kind, Head] = {
    "sequence": "classification",
    "image": "classification",
    "pair": "retrieval",
    "language": "language",
}
# Words of tasks whose data may not be there; texts are bytes.
_BYTES = 257
_VOCABULARIES = {"listops": 16, "image": 256, "pathfinder": 256, "wikitext-2": 33_278, "wikitext-103": 267_735}


@dataclass(frozen=True)
class ModelSpec:
    """A variant of attention and its options; everything else follows from the recipe.

    Attributes:
        mixtures: M; softmax and linear attention have one key and ignore it.
        e_step: "soft" (settings A and B of Section 3.3) or "hard" (C).
        prior: "learned" (A and C), "em" (B) or "uniform".
    """

    attention: str
    heads: int
    mixtures: int = variants.DEFAULT_NUM_MIXTURES
    e_step: str = variants.DEFAULT_E_STEP
    prior: str = variants.DEFAULT_PRIOR
    variance: str = variants.DEFAULT_VARIANCE
    feature_map: str = variants.DEFAULT_FEATURE_MAP

    @classmethod
    def parse(cls, text: str) -> Self:
        """``mgk:4`` is mgk with 4 heads; ``ValueError`` suggests the nearest variant otherwise."""
        attention, colon, heads = text.strip().partition(":")
        if attention not in VARIANTS:
            raise ValueError(f"there is no attention {attention!r}; {did_you_mean(attention, VARIANTS)}")
        if not colon or not heads.isdecimal() or int(heads) < 1:
            raise ValueError(f"{text!r} must name the attention and its heads, as in {attention}:4")
        return cls(attention, int(heads))

    @classmethod
    def of_recipe(cls, recipe: Recipe) -> Self:
        """The model of a recipe."""
        given = recipe.model.given()
        chosen = {name: given.get(path.partition(".")[2]) for name, path in _RECIPE_FIELDS.items()}
        model = cls(**{name: value for name, value in chosen.items() if value is not None})
        return model if model.is_mixture else replace(model, mixtures=variants.DEFAULT_NUM_MIXTURES)

    @property
    def name(self) -> str:
        """As the command line has it: ``mgk:4``."""
        return f"{self.attention}:{self.heads}"

    @property
    def slug(self) -> str:
        """For file names: ``mgk-1h``, ``smgk-1h-e_step-hard``."""
        options = (f"{name}-{value}" for name, value in self._options.items())
        return "-".join([self.attention, f"{self.heads}h", *options])

    @property
    def title(self) -> str:
        """For tables: ``mgk, 1 head``, ``smgk + Hard-E, 1 head``."""
        return f"{self._variant}, {self._heads}"

    @property
    def phrase(self) -> str:
        """For sentences: ``mgk with 1 head``."""
        return f"{self._variant} with {self._heads}"

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields of a recipe that make it this model's."""
        chosen = {"attention": self.attention, "heads": self.heads, **self._options}
        return {_RECIPE_FIELDS[name]: value for name, value in chosen.items()}

    @property
    def is_mixture(self) -> bool:
        """Whether a key has components."""
        return VARIANTS[self.attention].is_mixture

    def baseline(self, heads: int) -> "ModelSpec":
        """Softmax or linear attention with so many heads: the baseline of a mixture's family."""
        return ModelSpec(VARIANTS[self.attention].family, heads)

    def scaled(self, factor: float) -> Self:
        """The same model with ``factor`` times the heads."""
        return replace(self, heads=max(1, round(factor * self.heads)))

    @property
    def _options(self) -> dict[str, Any]:
        """The options that are not the default."""
        default = ModelSpec(self.attention, self.heads)
        return {name: value for name, value in asdict(self).items() if value != getattr(default, name)}

    @property
    def _variant(self) -> str:
        return self.attention + "".join(_OPTION_TITLES.get(item, f", M = {item[1]}") for item in self._options.items())

    @property
    def _heads(self) -> str:
        return f"{self.heads} head{'' if self.heads == 1 else 's'}"


def sizes_of(recipe: Recipe, **options: Any) -> Sizes:
    """The sizes of a recipe's model for inputs of full length, without its data; ``options`` are further sizes."""
    model = recipe.model
    task = find_task(recipe.task)
    head = HEAD_OF_KIND[task.kind]
    hidden = model.hidden_size or 128
    is_sample = recipe.data.name.startswith("synthetic-")
    given: dict[str, Any] = {
        "mixtures": model.num_mixtures,
        **{name: getattr(model, name) for name in ("e_step", "prior", "variance", "feature_map", "position")},
    }
    return Sizes(
        attention=model.attention,
        heads=model.num_attention_heads,
        head_dim=model.head_dim or hidden // model.num_attention_heads,
        hidden=hidden,
        layers=model.num_hidden_layers or 4,
        intermediate=model.intermediate_size or 4 * hidden,
        length=recipe.data.max_length or 1024,
        vocab=64 if is_sample and head == "language" else _VOCABULARIES.get(recipe.task, _BYTES),
        labels=task.num_labels,
        head=head,
        causal=head == "language",
        cutoffs=() if is_sample else tuple(model.adaptive_cutoffs or ()),
        cutoff_divisor=model.adaptive_div_value or 4.0,
        **{name: value for name, value in given.items() if value is not None},
        **options,
    )


def sizes_of_paper(model: ModelSpec, *, fused: bool = True) -> Sizes:
    """The sizes of a model of the paper on Retrieval, an example of two documents of 4,000 bytes."""
    return sizes_of(load_recipe("retrieval", "paper", overrides=model.overrides), fused=fused)
