"""Loading weights so that nothing is filled in silently, and nothing is unpickled."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError

_SHOWN = 3
_log = logging.getLogger("transformers").getChild("mgk")


def checked_from_pretrained(
    cls: Any, load: Callable[..., Any], name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
) -> Any:
    """What transformers' ``from_pretrained``, ``load``, gives, unless the weights do not fit the model.

    Raises:
        ValueError: when weights of the transformer, or of a head that the checkpoint is said to have, are missing or
            left over, have another shape, or when the file is corrupt.
    """
    wants_info = kwargs.pop("output_loading_info", False)
    may_mismatch = kwargs.pop("ignore_mismatched_sizes", False)
    if kwargs.setdefault("use_safetensors", True) is not True:
        raise ValueError("use_safetensors must be True: weights are read from safetensors only, never unpickled")
    try:
        with _without_report():
            model, info = load(name_or_path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs)
    except SafetensorError as error:
        raise ValueError(f"the weights of {name_or_path} are corrupt: {error}") from None
    new = _check(cls, model, info, name_or_path, may_mismatch)
    if new:
        _log.warning("%s: %s are new, not from %s: train them before use", cls.__name__, _some(new), name_or_path)
    return (model, info) if wants_info else model


def _check(cls: Any, model: Any, info: dict[str, Any], place: object, may_mismatch: bool) -> set[str]:
    """Raise where the weights do not fit; else the names of those that are new."""
    prefix = f"{cls.base_model_prefix}."
    parts = {name for name, _ in model.base_model.named_children()}

    def is_of_transformer(name: str) -> bool:
        return name.removeprefix(prefix).partition(".")[0] in parts

    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    mismatched = {name: f"{name} {tuple(theirs)}" for name, theirs, _ in info["mismatched_keys"]}
    new: set[str] = set(mismatched)
    if model.config.architectures is not None and cls.__name__ not in model.config.architectures:
        head = {name for name in model.state_dict() if not is_of_transformer(name)}
        if head <= missing:  # a head that is there in part is a broken one
            missing, new = missing - head, new | head
        unexpected = set(filter(is_of_transformer, unexpected))
    for names, what in (
        (missing, "they lack"),
        (unexpected, "they have, beyond what the model knows,"),
        ([] if may_mismatch else mismatched.values(), "of another shape are"),
    ):
        if names:
            raise ValueError(
                f"the weights of {place} do not fit {cls.__name__} with attention={model.config.attention!r}:"
                f" {what} {_some(names)}"
            )
    return new


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@contextmanager
def _without_report() -> Iterator[None]:
    """Leave out transformers' table of missing weights: an error, or one line, says it."""

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in str(record.msg)

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
