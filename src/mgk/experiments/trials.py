"""The unit of every table and figure: one model on one task with one seed, at a preset. Free of torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from mgk.training.recipe import Recipe, differences, load_recipe
from mgk.variants import VARIANTS

_FIELDS = {
    "attention": "model.attention",
    "heads": "model.num_attention_heads",
    "mixtures": "model.num_mixtures",
    "e_step": "model.e_step",
    "prior": "model.prior",
    "variance": "model.variance",
    "feature_map": "model.feature_map",
}

# A table is many trials, so on the laptop a trial should take about three minutes on 2 cores. The recipes of the Long
# Range Arena do; a language model that does is a quarter as deep and as wide inside, its first class of words smaller.
_SMALLER: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("laptop", "wikitext-2"): {
        "model.num_hidden_layers": 4,
        "model.intermediate_size": 512,
        "model.adaptive_cutoffs": [2000, 10000],
        "training.max_steps": 800,
        "training.learning_rate": 2.0e-3,
        "evaluation.every": 100,
        "evaluation.max_tokens": None,
    },
}


@dataclass(frozen=True)
class ModelSpec:
    """What is compared: a variant of attention and its options; all the rest is the recipe's.

    Attributes:
        attention: the variant.
        heads: how many.
        mixtures: M; softmax and linear have one key whatever is said here.
        e_step: "soft" (settings A and B of Section 3.3) or "hard" (C).
        prior: "learned" (A and C) or "em" (B).
        variance: "constant", "learned" or "em".
        feature_map: "elu", "favor" or "dpfp", of the linear variants.
    """

    attention: str
    heads: int
    mixtures: int = 2
    e_step: str = "soft"
    prior: str = "learned"
    variance: str = "constant"
    feature_map: str = "elu"

    @property
    def _options(self) -> dict[str, Any]:
        """The options that are not the default."""
        default = ModelSpec(self.attention, self.heads)
        return {name: value for name, value in asdict(self).items() if value != getattr(default, name)}

    @property
    def slug(self) -> str:
        """For file names: ``mgk-1h``, ``smgk-1h-e_step-hard``."""
        return "-".join(
            [self.attention, f"{self.heads}h", *(f"{name}-{value}" for name, value in self._options.items())]
        )

    @property
    def title(self) -> str:
        """For people: ``mgk, 1 head``, ``smgk + Hard-E, 1 head``; the additions of Table 4 as the paper has them."""
        words = {
            ("e_step", "hard"): " + Hard-E",
            ("prior", "em"): " + Soft-E",
            ("prior", "uniform"): " + uniform prior",
            ("variance", "learned"): " + learned variance",
            ("variance", "em"): " + M-step variance",
            ("feature_map", "favor"): " + Performer features",
            ("feature_map", "dpfp"): " + DPFP features",
        }
        added = "".join(words.get(item, f", M = {item[1]}") for item in self._options.items())
        return f"{self.attention}{added}, {self.heads} head{'' if self.heads == 1 else 's'}"

    @property
    def overrides(self) -> dict[str, Any]:
        """The fields of a recipe that make it this model's."""
        chosen = {"attention": self.attention, "heads": self.heads, **self._options}
        return {_FIELDS[name]: value for name, value in chosen.items()}

    @property
    def is_mixture(self) -> bool:
        """Whether a key has components."""
        return VARIANTS[self.attention].is_mixture

    def baseline(self, heads: int) -> "ModelSpec":
        """What a mixture replaces, with so many heads: softmax or linear attention."""
        return ModelSpec(VARIANTS[self.attention].family, heads)

    def scaled(self, factor: float) -> Self:
        """The same with more or fewer heads."""
        return replace(self, heads=max(1, round(factor * self.heads)))

    @classmethod
    def of_recipe(cls, recipe: Recipe) -> Self:
        """The model of a recipe."""
        given = recipe.model.given()
        chosen = {name: given.get(path.partition(".")[2]) for name, path in _FIELDS.items()}
        model = cls(**{name: value for name, value in chosen.items() if value is not None})
        return model if model.is_mixture else replace(model, mixtures=2)


@dataclass(frozen=True)
class Trial:
    """One model on one task with one seed; its recipe is what determines it."""

    preset: str
    task: str
    model: ModelSpec
    seed: int

    @property
    def name(self) -> str:
        """Unique within all trials, for people and for paths."""
        return f"{self.preset}/{self.task}/{self.model.slug}-seed-{self.seed}"

    def place(self, folder: Path, ending: str = "") -> Path:
        """Its place in a folder of trials."""
        return folder / self.preset / self.task / f"{self.model.slug}-seed-{self.seed}{ending}"

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of its task and preset, with this model and seed; a smaller one where that takes too long."""
        smaller = _SMALLER.get((self.preset, self.task), {})
        return load_recipe(self.task, self.preset, overrides={**smaller, **self.model.overrides, "seed": self.seed})


def changes(recipe: Recipe, other: Recipe) -> Mapping[str, tuple[Any, Any]]:
    """The fields that differ and that results depend on: where the data lie and how many threads run do not count."""
    ignored = ("data.folder", "training.threads", "training.workers")
    return {path: pair for path, pair in differences(recipe, other).items() if path not in ignored}
