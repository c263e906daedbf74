"""The model card: a README.md beside the weights that says what was trained on what."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import mgk
from mgk.models.configuration import MgkConfig

FILE_NAME = "README.md"
MARK = "<!-- written by mgk: edit this line away to keep changes -->"

_PIPELINES = {
    "MgkForSequenceClassification": "text-classification",
    "MgkForCausalLM": "text-generation",
    "MgkForImageClassification": "image-classification",
}
_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "head_dim",
    "intermediate_size",
    "num_mixtures",
    "e_step",
    "prior",
    "variance",
    "position",
    "max_position_embeddings",
    "vocab_size",
)


def write_card(
    folder: str | os.PathLike[str], config: MgkConfig, training: Mapping[str, Any] | None = None
) -> Path | None:
    """Write ``README.md`` into a folder with a saved model.

    Args:
        folder: Where ``config.json`` and the weights are.
        config: The model's.
        training: What was trained on what: any of "task", "data", "steps", "seed", "metrics" (a mapping from name to
            value) and whatever else is worth telling; ``config.training`` if not given. Without either the card says
            that nothing is known.

    Returns:
        The card's path, or None where the folder has a card that was written or edited by hand, which stays.
    """
    path = Path(folder) / FILE_NAME
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return None
    known = training if training is not None else getattr(config, "training", None)
    temporary = path.with_name(f".{FILE_NAME}.{os.getpid()}.tmp")
    try:
        temporary.write_text(_card(config, dict(known or {})), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _card(config: MgkConfig, training: dict[str, Any]) -> str:
    name = (config.architectures or ["MgkModel"])[0]
    front: dict[str, Any] = {"library_name": "mgk", "tags": ["mgk", config.attention, "transformers"]}
    if name in _PIPELINES:
        front["pipeline_tag"] = _PIPELINES[name]
    metrics = dict(training.pop("metrics", None) or {})
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False).rstrip(),
        "---",
        MARK,
        "",
        f"# {name} with {config.attention} attention",
        "",
        _about(config),
        "",
        "## Training",
        "",
        *(_table(training) if training else ["Nothing is recorded: the weights may be untrained."]),
        "",
        "## Results",
        "",
        *(_table(metrics) if metrics else ["None are recorded."]),
        "",
        "## Model",
        "",
        *_table({field: getattr(config, field) for field in _FIELDS}),
        "",
        "## Use",
        "",
        "```python",
        f"from mgk.models import {name}",
        "",
        f'model = {name}.from_pretrained("path/to/this/folder")',
        "```",
        "",
        f"Saved by mgk {mgk.__version__}.",
        "",
    ]
    return "\n".join(lines)


def _about(config: MgkConfig) -> str:
    if config.attention in ("softmax", "linear"):
        return f"A transformer with {config.attention} attention, the baseline of the mixtures of keys."
    return (
        f"A transformer in which every key is a mixture of {config.num_mixtures} components (Nguyen et al., Improving"
        " Transformers with Probabilistic Attention Keys, ICML 2022)."
    )


def _table(values: Mapping[str, Any]) -> list[str]:
    rows = [f"| {_cell(key)} | {_cell(value)} |" for key, value in values.items()]
    return ["| | |", "| --- | --- |", *rows]


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
