"""Prepares a data set once; the same files and options need nothing more."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mgk.data.errors import DataError, UsageError
from mgk.data.manifest import Manifest, data_folder, read_manifest, read_record, verify
from mgk.data.sources import Source
from mgk.data.task_registry import Task, find_task
from mgk.data.writer import writing

OnStep = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """One preparation; without ``given`` files the set is to be generated."""

    task: Task
    given: Source | None
    options: Mapping[str, Any]
    workers: int
    on_step: OnStep

    @property
    def source(self) -> Source:
        """The files of a task that is not generated."""
        assert self.given is not None
        return self.given


@dataclass(frozen=True)
class Prepared:
    """A set that is ready, and why it was prepared anew, if it was."""

    folder: Path
    manifest: Manifest
    is_new: bool
    reasons: list[str]


def prepare(
    name: str,
    source: Path | str | None = None,
    *,
    out: Path | str | None = None,
    options: Mapping[str, Any] | None = None,
    workers: int = 1,
    on_step: OnStep = lambda done, total: None,
) -> Prepared:
    """Make the set of a task ready in ``out``/``name``.

    ``source`` is a folder or archive with the official files; without it the set is
    generated, or made from the task's default source. ``out`` is by default the data
    folder. The result does not depend on ``workers``.
    """
    task = find_task(name)
    if source is not None and task.is_synthetic:
        raise UsageError(f"{name} is generated and takes no source")
    module = import_module(f"mgk.data.{task.module}")
    if source is None and hasattr(module, "default_source"):
        source = module.default_source()
    chosen = checked_options(task, source is not None, options or {})
    files = Source(Path(source), on_step) if source is not None else None
    folder = set_folder(name, out)
    manifest, reasons = _state(folder, task, chosen, files)
    if manifest is not None and not reasons:
        return Prepared(folder, manifest, False, [])
    if files is None and not task.is_generated:
        raise UsageError("; ".join([*reasons, f"{name} is not prepared: {task.how_to_get()}"]))
    with writing(folder, name, chosen, synthetic=task.is_synthetic) as writer:
        try:
            module.prepare(writer, Job(task, files, chosen, workers, on_step))
            if files is not None:
                writer.record = files.record()
        except OSError as error:
            raise DataError(f"{error.filename or folder}: {error.strerror or error}") from None
    done = read_manifest(folder)
    assert done is not None
    return Prepared(folder, done, True, reasons)


def set_folder(name: str, parent: Path | str | None) -> Path:
    """The folder of a task's set; by default in the data folder."""
    return (data_folder() if parent is None else Path(parent)) / name


def prepared(name: str, folder: Path | str | None = None) -> tuple[Path, Manifest]:
    """Folder and manifest of a set; a synthetic one is generated if absent."""
    task = find_task(name)
    place = set_folder(name, folder)
    manifest = read_manifest(place)
    if manifest is None and task.is_synthetic:
        manifest = prepare(name, out=folder).manifest
    if manifest is None:
        raise DataError(f"{name} is not prepared in {str(place.parent)!r}: {task.how_to_get()}")
    if errors := verify(place, manifest):
        raise DataError(f"{errors[0]}; prepare {name} anew")
    return place, manifest


def present(
    name: str, *, out: Path | str | None = None, options: Mapping[str, Any] | None = None
) -> Prepared | None:
    """The set, if it was prepared from files with these options and is whole."""
    task = find_task(name)
    folder = set_folder(name, out)
    manifest, reasons = _state(folder, task, checked_options(task, True, options or {}), None)
    if manifest is None or reasons:
        return None
    return Prepared(folder, manifest, False, [])


def checked_options(task: Task, has_source: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the task: as given, or its default."""
    names: Sequence[str] = tuple(task.options)
    if has_source and task.source_options is not None:
        names = task.source_options
    for name, value in given.items():
        if name not in names:
            kind = " read from files" if name in task.options else ""
            known = f"it has {', '.join(names)}" if names else "it has none"
            raise UsageError(f"{task.name}{kind} has no option {name!r}; {known}")
        default = task.options[name]
        if type(value) is not type(default) or (isinstance(value, int) and value < 0):
            wanted = "a whole number, 0 or more" if isinstance(default, int) else "a word"
            raise UsageError(f"the option {name!r} of {task.name} must be {wanted}, got {value!r}")
    return {name: given.get(name, task.options[name]) for name in names}


def _state(
    folder: Path, task: Task, options: dict[str, Any], files: Source | None
) -> tuple[Manifest | None, list[str]]:
    """The manifest, if it can be read, and why to prepare the set anew."""
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            return None, []
        reasons = verify(folder, manifest)
        was_read = bool(manifest.sources["files"])
        is_other_kind = task.is_generated and was_read != (files is not None)
        if not reasons and (manifest.options != options or is_other_kind):
            reasons = [f"{folder}: prepared with other options"]
        if not reasons and files is not None:
            reasons = list(read_record(folder, manifest).changes(files.path))
        return manifest, reasons
    except DataError as error:
        return None, [str(error)]
