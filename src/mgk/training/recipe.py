"""Recipes: everything that determines a run, as YAML. Does not import torch.

``recipes/TASK.yaml`` has a section for each preset; ``paper`` comes first and the
others override it. A file may extend another one (``extends``).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from mgk._util.files import write_file
from mgk._util.limits import MAX_THREADS
from mgk._util.suggestions import closest, did_you_mean
from mgk.data import task_registry
from mgk.training.errors import RecipeError
from mgk.variants import Count, ModelOptions, Positive, Probability

_RECIPES = resources.files("mgk.training") / "recipes"

FORMAT = 2
TASKS = tuple(name for name in task_registry.TASKS if (_RECIPES / f"{name}.yaml").is_file())
PRESETS = ("paper", "workstation", "laptop", "smoke")
_SHOWN = 80  # characters of a wrong value
_MAX_BYTES = 2**26  # a trial's file has every outcome

BatchSize = Annotated[int, Field(ge=1, le=2**20)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Fields of the model that always have a value.
_ALWAYS = ("attention", "num_attention_heads")


class _Loader(yaml.SafeLoader):
    """YAML whose keys occur once: else the last one would win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key.value, str):
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark
                )
            seen.add(key.value if isinstance(key.value, str) else None)
        return super().construct_mapping(node, deep)


def _load_yaml(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


# None: the value follows from the data, or is the default.
_FIELDS: dict[str, Any] = {
    name: (kind, getattr(ModelOptions, name)) if name in _ALWAYS else (kind | None, None)
    for name, kind in get_type_hints(ModelOptions, include_extras=True).items()
}
_ModelFields: Any = create_model("_ModelFields", __base__=_Section, **_FIELDS)


class ModelSection(_ModelFields):
    """Fields of ``MgkConfig``; None: by the data, or its default."""

    num_labels: Count | None = None

    def __getitem__(self, name: str) -> Any:
        return self.given()[name]

    def given(self) -> dict[str, Any]:
        """The fields that have a value."""
        values: dict[str, Any] = self.model_dump(exclude_none=True)
        return values


class DataSection(_Section):
    """What to train on."""

    name: str  # of the data set, as in ``mgk data list``
    folder: Path | None = None  # of all data sets; None: the data folder
    options: dict[str, int | str] = {}  # of a set that is generated on first use
    max_length: Count | None = None  # tokens of an example, or of a segment
    colour: bool = False  # images as coloured pixels, for patches
    group_by_length: bool = False  # batches of similar lengths, with less padding
    packing: bool = False  # a batch in one row, without padding
    # Always the same random ones; of running text, the first.
    train_examples: Count | None = None
    validation_examples: Count | None = None
    test_examples: Count | None = None

    def check(self) -> None:
        """Raise where the data are absent and not generated on first use."""
        from mgk.data.preparation import prepared  # imports NumPy

        if not self.options and not task_registry.find_task(self.name).is_synthetic:
            prepared(self.name, self.folder)


class TrainingSection(_Section):
    """How to train."""

    max_steps: Count  # of the optimizer
    batch_size: BatchSize  # examples of an optimizer step
    accumulation: Count = 1  # batches of a rank in an optimizer step
    learning_rate: Positive  # after the warm-up
    warmup_steps: Annotated[int, Field(ge=0)] | Probability = 0  # below 1: a fraction
    schedule: Literal["linear", "cosine", "constant"] = "linear"  # after the warm-up
    weight_decay: NotNegative = 0.0
    adam_epsilon: Positive = 1e-8
    max_grad_norm: NotNegative = 0.0  # for clipping; 0: none
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16 by autocast
    device: Literal["auto", "cpu"] = "auto"  # an accelerator if there is one
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] | None = None  # None: torch's default
    workers: Annotated[int, Field(ge=0, le=MAX_THREADS)] = 0  # processes that load data
    gradient_checkpointing: bool = False
    log_every: Count = 10  # steps between two lines of metrics
    save_every: Count = 500  # steps between two checkpoints
    keep: Count = 2  # checkpoints

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup > self.max_steps:
            limit = f"max_steps of {self.max_steps}"
            raise ValueError(f"warmup_steps of {self.warmup} exceed {limit}: set both")
        if self.batch_size % self.accumulation:
            parts = f"accumulation of {self.accumulation}"
            raise ValueError(f"batch_size of {self.batch_size} does not divide by {parts}")
        return self

    @property
    def warmup(self) -> int:
        """The warm-up in steps."""
        steps = self.warmup_steps
        return steps if isinstance(steps, int) else round(steps * self.max_steps)


class EvaluationSection(_Section):
    """How to evaluate."""

    every: Count | None = None  # steps; None: at the end only
    split: Literal["validation", "test"] = "validation"  # in training
    select: Literal["best", "last"] = "best"  # weights to test and keep
    batch_size: BatchSize | None = None  # examples at a time; None: at most 32
    test: bool = True  # evaluate on the test split at the end
    # Perplexity by a sliding window:
    window: Count | None = None  # tokens; None: the length of a segment
    stride: Count | None = None  # tokens between windows; None: no sliding window
    max_tokens: Annotated[int, Field(ge=2)] | None = None  # of the text; None: all

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.select == "best" and self.split == "test":
            why = "the best on it would flatter the test"
            raise ValueError(f"select must be 'last' where split is 'test': {why}")
        return self


class Recipe(_Section):
    """Everything that determines a run."""

    format: int = FORMAT
    task: str
    preset: str = "laptop"  # before any override
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0  # of weights, batches and dropout
    model: ModelSection
    data: DataSection
    training: TrainingSection
    evaluation: EvaluationSection

    @model_validator(mode="before")
    @classmethod
    def _upgrade(cls, values: Any) -> Any:
        """Format 1 had one initialisation, the paper's."""
        if isinstance(values, dict) and values.get("format") == 1:
            match values.get("model"):
                case dict(model):
                    values = {**values, "format": FORMAT, "model": {"init": "paper", **model}}
        return values

    def evaluation_options(self, **changes: Any) -> EvaluationSection:
        """The evaluation with its batch size chosen and other changes."""
        trained = self.training.batch_size // self.training.accumulation
        size = self.evaluation.batch_size or min(32, trained)
        return self.evaluation.model_copy(update={"batch_size": size, **changes})

    def to_yaml(self) -> str:
        """The text of its file; it reads back to an equal recipe."""
        values = self.model_dump(mode="json")
        values["model"] = self.model.given()
        return yaml.safe_dump(values, sort_keys=False)


def load_recipe(task: str, preset: str = "laptop", *, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a task at a preset.

    ``overrides`` are values by path, such as ``{"model.attention": "smgk"}``.
    """
    check_name("task", task, TASKS)
    check_name("preset", preset, PRESETS)
    values: dict[str, Any] = {"format": FORMAT, "task": task, "preset": preset, "seed": 0}
    documents = list(_documents(task))
    for part in dict.fromkeys(("paper", preset)):
        for document in reversed(documents):
            values = _merge(values, document.get(part) or {})
    name = f"{task_registry.SYNTHETIC}{task}" if preset == "smoke" else task
    values["data"] = {"name": name, **values.get("data", {})}
    return _validated(values, overrides or {}, f"the recipe of {task}")


def read_recipe(path: Path, *, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a file: RUN/recipe.yaml, or the result of a trial."""
    try:
        with path.open("rb") as file:  # which may have no end
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise RecipeError(f"{path}: this is not a recipe: it has more than {_MAX_BYTES:,} bytes")
        values = _load_yaml(content.decode())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise RecipeError(f"{path}: cannot be read ({reason})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise RecipeError(f"{path}{where}: this is not YAML ({problem})") from None
    if isinstance(values, dict) and isinstance(values.get("recipe"), dict):
        values = values["recipe"]
    if not isinstance(values, dict) or not isinstance(values.get("format"), int):
        raise RecipeError(f"{path}: this is not a recipe: it has no 'format'")
    if values["format"] > FORMAT:
        newer = f"a recipe of format {values['format']}, from a newer mgk"
        raise RecipeError(f"{path}: {newer}; this one reads format {FORMAT}: upgrade it")
    return _validated(values, overrides or {}, str(path))


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the recipe to a file, atomically."""
    write_file(path, recipe.to_yaml())


def parse_overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """Values by path from ``a.b=c``, the value being YAML."""
    values = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            form = "FIELD=VALUE, such as training.max_steps=100"
            raise RecipeError(f"{assignment!r} is not of the form {form}")
        try:
            values[path.strip()] = _load_yaml(text)
        except yaml.YAMLError as error:
            reason = getattr(error, "problem", None) or error
            raise RecipeError(f"the value of {assignment[:80]!r} is not YAML ({reason})") from None
    return values


def differences(one: Recipe, other: Recipe) -> dict[str, tuple[Any, Any]]:
    """The fields in which two recipes differ, by path."""
    first, second = (dict(_leaves(recipe.model_dump(mode="json"))) for recipe in (one, other))
    pairs = {path: (first.get(path), second.get(path)) for path in [*first, *second]}
    return {path: (a, b) for path, (a, b) in pairs.items() if a != b}


def _documents(name: str) -> Iterator[dict[str, Any]]:
    """The file of a task, then the one that it extends."""
    document = _load_yaml((_RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    yield document
    if "extends" in document:
        yield from _documents(document["extends"])


def _merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _replace(values: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    if rest:
        old = values.get(name)
        value = _replace(old if isinstance(old, dict) else {}, rest, value)
    return {**values, name: value}


def _validated(values: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> Recipe:
    for path, value in overrides.items():
        if path in ("format", "task", "preset"):
            advice = "choose the task and the preset themselves"
            raise RecipeError(f"{path} is not a field to set: {advice}")
        values = _replace(values, path, value)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError(f"{where}: {_first_error(error)}") from None
    check_name("task", recipe.task, TASKS)
    check_name("preset", recipe.preset, PRESETS)
    return recipe


def _first_error(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"there is no field {path!r}{_suggest(_closest_field(path))}"
    if first["type"] == "missing":
        return f"the field {path!r} is missing"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{path}: {message}"
    near = None
    if first["type"] == "literal_error":
        near = closest(str(first["input"]), re.findall("'([^']+)'", first["ctx"]["expected"]))
    got = repr(first["input"])
    got = got if len(got) <= _SHOWN else f"{got[:_SHOWN]}..."
    return f"{path}: {message[0].lower()}{message[1:]}, got {got}{_suggest(near)}"


def _suggest(near: str | None) -> str:
    return f"; did you mean {near!r}?" if near else ""


def _closest_field(path: str) -> str | None:
    """The most similar field: by its path, or by its name in another section."""
    known = _field_paths(Recipe)
    by_name = {name.rpartition(".")[2]: name for name in known}
    return closest(path, known) or by_name.get(closest(path.rpartition(".")[2], by_name) or "")


def _field_paths(section: type[BaseModel], prefix: str = "") -> list[str]:
    paths = []
    for name, field in section.model_fields.items():
        paths.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            paths.extend(_field_paths(field.annotation, f"{prefix}{name}."))
    return paths


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def check_name(what: str, name: str, known: Sequence[str]) -> None:
    """Raise, with a suggestion, for a name that is not known."""
    if name not in known:
        raise RecipeError(f"there is no {what} {name!r}; {did_you_mean(name.lower(), known)}")
