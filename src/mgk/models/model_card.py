"""The model card: a README.md beside the weights."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

import mgk
from mgk._util.files import write_file
from mgk.models.configuration import AUTO_CLASSES, MgkConfig
from mgk.variants import VARIANTS

FILE_NAME = "README.md"
MARK = "<!-- written by mgk: edit this line away to keep changes -->"

_PIPELINES = {
    "MgkForSequenceClassification": "text-classification",
    "MgkForCausalLM": "text-generation",
    "MgkForImageClassification": "image-classification",
    "MgkForTokenClassification": "token-classification",
    "MgkForMaskedLM": "fill-mask",
    "MgkForQuestionAnswering": "question-answering",
}
_FIELDS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "intermediate_size"),
    *("num_mixtures", "e_step", "prior", "variance", "position"),
    *("max_position_embeddings", "vocab_size"),
)
_CARD = """---
{front_matter}---
{mark}

# {name} with {attention} attention

{about}

## Training

{training}
{recipe}
## Results

{metrics}

## Model

{fields}

## Use

```python
from mgk.models import {name}

model = {name}.from_pretrained("path/to/this/folder")
```
{auto}
Saved by mgk {version}.
"""
_AUTO = """
Where mgk is installed, `{auto}.from_pretrained(..., trust_remote_code=True)` does the
same: `config.json` has an `auto_map`.
"""
# The one command that makes the model again.
_RECIPE = """
<details>
<summary>The recipe: save it as recipe.yaml, then <code>mgk train --recipe recipe.yaml --out RUN</code></summary>

```yaml
{recipe}```

</details>
"""


def write_card(
    folder: str | os.PathLike[str],
    config: MgkConfig,
    training: Mapping[str, Any] | None = None,
    *,
    tags: Iterable[str] = (),
) -> Path | None:
    """Write ``README.md`` beside a model; None if one was edited by hand.

    Args:
        training: "task", "data", "steps", "seed", "metrics" (a mapping), "recipe"
            (the text of a file) and other facts; None: ``config.training``.
        tags: More tags, such as those of ``model.add_model_tags``.
    """
    path = Path(folder) / FILE_NAME
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return None
    if training is None:
        training = config.training
    facts = dict(training or {})
    recipe = facts.pop("recipe", None)
    metrics = facts.pop("metrics", None) or {}
    name = (config.architectures or ["MgkModel"])[0]
    all_tags = dict.fromkeys(["mgk", config.attention, "transformers", *tags])
    front: dict[str, Any] = {"library_name": "mgk", "tags": list(all_tags)}
    if name in _PIPELINES:
        front["pipeline_tag"] = _PIPELINES[name]
    about = f"A transformer with {config.attention} attention, the baseline of the mixtures of keys."
    if VARIANTS[config.attention].is_mixture:
        about = (
            f"A transformer in which every key is a mixture of {config.num_mixtures} components"
            " (Nguyen et al., Improving Transformers with Probabilistic Attention Keys, ICML 2022)."
        )
    card = _CARD.format(
        front_matter=yaml.safe_dump(front, sort_keys=False),
        mark=MARK,
        name=name,
        attention=config.attention,
        about=about,
        training=_table(facts) or "Nothing is recorded: the weights may be untrained.",
        recipe=_RECIPE.format(recipe=recipe) if recipe else "",
        metrics=_table(metrics) or "None are recorded.",
        fields=_table({field: getattr(config, field) for field in _FIELDS}),
        auto="".join(_AUTO.format(auto=auto) for auto, own in AUTO_CLASSES.items() if own == name),
        version=mgk.__version__,
    )
    write_file(path, card)
    return path


def _table(values: Mapping[str, Any]) -> str:
    rows = (f"| {_cell(key)} | {_cell(value)} |" for key, value in values.items())
    return "\n".join(["| | |", "| --- | --- |", *rows]) if values else ""


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
