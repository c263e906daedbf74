"""Recipes: everything that determines a run, as YAML. Free of torch: the command line checks a recipe at once.

The file ``recipes/TASK.yaml`` has a section for each preset. ``paper`` comes first and the others change what they
name in it; a file may stand on another one (``extends``), whose presets come before its own.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mgk.training.errors import RecipeError

FORMAT = 1
TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "wikitext-2", "wikitext-103")
PRESETS = ("paper", "laptop", "smoke")

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSection(_Section):
    """Fields of ``MgkConfig``; what is None follows from the data or is the configuration's default."""

    attention: Literal["softmax", "linear", "mgk", "smgk", "mlk", "smlk"] = "mgk"
    num_attention_heads: Count = 4
    head_dim: Count | None = None
    hidden_size: Count | None = None
    num_hidden_layers: Count | None = None
    intermediate_size: Count | None = None
    num_mixtures: Count | None = None
    e_step: Literal["soft", "hard"] | None = None
    prior: Literal["learned", "em", "uniform"] | None = None
    prior_momentum: Probability | None = None
    variance: Literal["constant", "learned", "em"] | None = None
    feature_map: Literal["elu", "favor", "dpfp"] | None = None
    backend: str | None = None
    position: Literal["learned", "sinusoidal", "rotary", "none"] | None = None
    max_position_embeddings: Count | None = None
    hidden_dropout_prob: Probability | None = None
    attention_probs_dropout_prob: Probability | None = None
    hidden_act: str | None = None
    layer_norm_eps: Positive | None = None
    initializer_range: Positive | None = None
    pooling: Literal["mean", "cls"] | None = None
    classifier_hidden_size: Count | None = None
    adaptive_cutoffs: list[Count] | None = None
    adaptive_div_value: Positive | None = None
    tie_word_embeddings: bool | None = None
    image_size: Count | None = None
    patch_size: Count | None = None
    num_channels: Count | None = None
    is_decoder: bool | None = None
    use_cache: bool | None = None
    vocab_size: Count | None = None
    num_labels: Count | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __getitem__(self, name: str) -> Any:
        return self.given()[name]

    def given(self) -> dict[str, Any]:
        """The fields that have a value."""
        return self.model_dump(exclude_none=True)


class DataSection(_Section):
    """What to train on.

    Attributes:
        name: of the data set, as ``mgk data list`` shows it.
        folder: of all sets; the data folder if None.
        options: of a set that is generated: given here, it is made on first use, beside a set prepared by hand.
        max_length: tokens that an example keeps; of running text, the length of a segment.
        colour: of images, pixels in colour, for a model of patches.
        group_by_length: whether to put rows of similar length into one batch, which saves padding.
        train_examples: how many to use, the same random ones always; of running text, the first. All if None.
        validation_examples: likewise.
        test_examples: likewise.
    """

    name: str
    folder: Path | None = None
    options: dict[str, int | str] = {}
    max_length: Count | None = None
    colour: bool = False
    group_by_length: bool = False
    train_examples: Count | None = None
    validation_examples: Count | None = None
    test_examples: Count | None = None


class TrainingSection(_Section):
    """How to train.

    Attributes:
        max_steps: of the optimizer.
        batch_size: examples of one step, over all ranks and accumulated parts.
        accumulation: parts of a rank's batch that go through the model one after another.
        learning_rate: the highest.
        warmup_steps: steps up to it, from 0; below 1 a share of ``max_steps``.
        schedule: after it: down to 0 in a line or half a cosine, or as it is.
        weight_decay: of AdamW.
        adam_epsilon: of AdamW.
        max_grad_norm: longer gradients are shortened to it; 0 for never.
        precision: bfloat16 is autocast, on devices that have it.
        device: "auto" takes an accelerator if there is one.
        threads: of the CPU; torch's choice if None.
        workers: processes that load data; 0 loads in the run's own.
        gradient_checkpointing: trade time for memory.
        log_every: steps between two lines of metrics.
        save_every: steps between two checkpoints.
        keep: how many checkpoints to keep.
    """

    max_steps: Count
    batch_size: Count
    accumulation: Count = 1
    learning_rate: Positive
    warmup_steps: Annotated[int, Field(ge=0)] | Annotated[float, Field(ge=0, lt=1)] = 0
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_epsilon: Positive = 1e-8
    max_grad_norm: Annotated[float, Field(ge=0)] = 0.0
    precision: Literal["float32", "bfloat16"] = "float32"
    device: Literal["auto", "cpu"] = "auto"
    threads: Count | None = None
    workers: Annotated[int, Field(ge=0)] = 0
    gradient_checkpointing: bool = False
    log_every: Count = 10
    save_every: Count = 500
    keep: Count = 2

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup > self.max_steps:
            raise ValueError(f"warmup_steps of {self.warmup} exceed max_steps of {self.max_steps}: set both")
        if self.batch_size % self.accumulation:
            raise ValueError(f"batch_size of {self.batch_size} does not divide by accumulation of {self.accumulation}")
        return self

    @property
    def warmup(self) -> int:
        """The warm-up in steps."""
        share = self.warmup_steps
        return share if isinstance(share, int) else round(share * self.max_steps)


class EvaluationSection(_Section):
    """How to measure.

    Attributes:
        every: steps between two evaluations; only at the end if None.
        split: looked at while the run goes on.
        select: which weights are tested and kept: the best on ``split``, or the last.
        batch_size: examples at a time, which results do not depend on; a rank's part of a training step if None.
        test: whether to measure on the test split at the end.
        window: of the sliding window of language models; the segment's length if None.
        stride: tokens between two windows: 1 is the paper's. None leaves the sliding window out, as it is costly.
        max_tokens: of the text that the window slides over; all if None.
    """

    every: Count | None = None
    split: Literal["validation", "test"] = "validation"
    select: Literal["best", "last"] = "best"
    batch_size: Count | None = None
    test: bool = True
    window: Count | None = None
    stride: Count | None = None
    max_tokens: Annotated[int, Field(ge=2)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.select == "best" and self.split == "test":
            raise ValueError("select must be 'last' where split is 'test': the best on it would flatter the test")
        return self


class Recipe(_Section):
    """Everything that determines a run.

    Attributes:
        format: of the file.
        task: whose recipe it is.
        preset: "paper", "laptop" or "smoke", before any change.
        seed: of weights, order and dropout.
        model: the model.
        data: the data.
        training: the training.
        evaluation: the evaluation.
    """

    format: int = FORMAT
    task: str
    preset: str = "laptop"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    model: ModelSection
    data: DataSection
    training: TrainingSection
    evaluation: EvaluationSection

    def to_yaml(self) -> str:
        """The text of its file; it reads back to an equal recipe."""
        values = self.model_dump(mode="json")
        values["model"] = self.model.given()
        return yaml.safe_dump(values, sort_keys=False)


def load_recipe(task: str, preset: str = "laptop", *, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a task at a preset.

    Args:
        task: one of ``TASKS``.
        preset: "paper", "laptop" or "smoke".
        overrides: values by the path of their field, such as ``{"model.attention": "smgk"}``.

    Returns:
        The recipe, checked.
    """
    _check_name("task", task, TASKS)
    _check_name("preset", preset, PRESETS)
    values: dict[str, Any] = {"format": FORMAT, "task": task, "preset": preset, "seed": 0}
    for part in PRESETS[:1] if preset == "paper" else (PRESETS[0], preset):
        for document in reversed(list(_documents(task))):
            values = _merged(values, document.get(part) or {})
    values["data"] = {"name": task if preset != "smoke" else f"synthetic-{task}", **values.get("data", {})}
    return _checked(values, overrides or {}, f"the recipe of {task}")


def read_recipe(path: Path, *, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a file, such as RUN/recipe.yaml."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise RecipeError(f"{path}: cannot be read ({reason})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise RecipeError(f"{path}{where}: this is not YAML ({getattr(error, 'problem', None) or error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("format"), int):
        raise RecipeError(f"{path}: this is not a recipe: it has no 'format'")
    if values["format"] > FORMAT:
        raise RecipeError(
            f"{path}: a recipe of format {values['format']}, from a newer mgk; this one reads format {FORMAT}:"
            " upgrade it"
        )
    return _checked(values, overrides or {}, str(path))


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the recipe to a file, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(recipe.to_yaml(), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def parse_overrides(assignments: list[str]) -> dict[str, Any]:
    """Values by path from ``a.b=c``, the value being YAML."""
    values = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise RecipeError(f"{assignment!r} is not of the form FIELD=VALUE, such as training.max_steps=100")
        try:
            values[path.strip()] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise RecipeError(f"the value of {assignment!r} is not YAML") from None
    return values


def differences(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """The fields in which two recipes differ, by path."""
    first, second = (dict(_leaves(recipe.model_dump(mode="json"))) for recipe in (one, other))
    paths = dict.fromkeys([*first, *second])
    return {path: (first.get(path), second.get(path)) for path in paths if first.get(path) != second.get(path)}


def _documents(name: str) -> Iterator[dict[str, Any]]:
    """The file of a task, then the one that it stands on."""
    text = (resources.files("mgk.training") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    yield document
    if "extends" in document:
        yield from _documents(document["extends"])


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _replaced(values: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    name, *rest = path
    if rest:
        old = values.get(name)
        value = _replaced(old if isinstance(old, dict) else {}, rest, value)
    return {**values, name: value}


def _checked(values: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> Recipe:
    for path, value in overrides.items():
        if path in ("format", "task", "preset"):
            raise RecipeError(f"{path} is not a field to set: choose the task and the preset themselves")
        values = _replaced(values, path.split("."), value)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(f"{where}: {_sentence(error)}") from None
    _check_name("task", recipe.task, TASKS)
    _check_name("preset", recipe.preset, PRESETS)
    return recipe


def _sentence(error: ValidationError) -> str:
    """The first thing that is wrong, with its path."""
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"there is no field {path!r}{_hint(path)}"
    if first["type"] == "missing":
        return f"the field {path!r} is missing"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{path}: {message}"
    hint = ""
    if first["type"] == "literal_error":
        hint = _nearest(str(first["input"]), re.findall("'([^']+)'", first["ctx"]["expected"]))
    return f"{path}: {message[0].lower()}{message[1:]}, got {first['input']!r}{hint}"


def _hint(path: str) -> str:
    """The nearest field: by its whole path, or by its name alone where the section is wrong or left out."""
    known = _paths(Recipe)
    by_name = {name.rpartition(".")[2]: name for name in known}
    names = get_close_matches(path.rpartition(".")[2], by_name, n=1)
    return _nearest(path, known) or (f"; did you mean {by_name[names[0]]!r}?" if names else "")


def _nearest(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _paths(section: type[BaseModel], prefix: str = "") -> list[str]:
    paths = []
    for name, field in section.model_fields.items():
        paths.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            paths.extend(_paths(field.annotation, f"{prefix}{name}."))
    return paths


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _check_name(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        hint = _nearest(name, known) or f": choose one of {', '.join(known)}"
        raise RecipeError(f"there is no {what} {name!r}{hint}")
