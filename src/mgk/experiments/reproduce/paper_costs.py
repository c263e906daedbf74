"""What the models of the paper cost on its Retrieval task, by formula: the base of Figures 3 and 7. Free of torch."""

from typing import Any

from mgk.analysis.cost_model import Head, Sizes
from mgk.experiments.trials import ModelSpec
from mgk.training.recipe import Recipe, load_recipe

# Heads of the mixtures; their baselines have twice as many.
HALVED = (4, 2, 1)

_HEAD_OF_TASK: dict[str, Head] = {"retrieval": "retrieval", "wikitext-2": "language", "wikitext-103": "language"}
# Words, labels and positions of tasks whose data may not be there.
_BYTES = 257
_VOCABULARIES = {"listops": 16, "image": 256, "pathfinder": 256, "wikitext-2": 33_278, "wikitext-103": 267_735}
_LABELS = {"listops": 10, "image": 10}


def sizes_of(recipe: Recipe, *, batch: int = 1, length: int | None = None, **options: Any) -> Sizes:
    """The sizes of a recipe's model for inputs of full length, without its data."""
    model = recipe.model
    head = _HEAD_OF_TASK.get(recipe.task, "classification")
    length = length or recipe.data.max_length or 1024
    hidden = model.hidden_size or 128
    vocabulary = _VOCABULARIES.get(recipe.task, _BYTES)
    is_sample = recipe.data.name.startswith("synthetic-")
    given: dict[str, Any] = {
        "e_step": model.e_step,
        "prior": model.prior,
        "variance": model.variance,
        "feature_map": model.feature_map,
        "position": model.position,
        "mixtures": model.num_mixtures,
    }
    return Sizes(
        attention=model.attention,
        heads=model.num_attention_heads,
        head_dim=model.head_dim or hidden // model.num_attention_heads,
        hidden=hidden,
        layers=model.num_hidden_layers or 4,
        intermediate=model.intermediate_size or 4 * hidden,
        length=length,
        batch=batch,
        vocab=64 if is_sample and head == "language" else vocabulary,
        labels=0 if head == "language" else _LABELS.get(recipe.task, 2),
        head=head,
        causal=head == "language",
        cutoffs=() if is_sample else tuple(model.adaptive_cutoffs or ()),
        cutoff_divisor=model.adaptive_div_value or 4.0,
        **{name: value for name, value in given.items() if value is not None},
        **options,
    )


def sizes_of_paper(model: ModelSpec, *, fused: bool = True) -> Sizes:
    """The sizes of a model of the paper on Retrieval, an example of two documents of 4,000 bytes."""
    recipe = load_recipe("retrieval", "paper", overrides=model.overrides)
    return sizes_of(recipe, fused=fused)
