"""Loading of weights: what is missing, left over or corrupt raises, and nothing is unpickled."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError

from mgk.models.private_names import LOAD_REPORT

_SHOWN = 3
_log = logging.getLogger("transformers").getChild("mgk")


def checked_from_pretrained(
    cls: Any, load: Callable[..., Any], name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
) -> Any:
    """The result of ``load``, transformers' ``from_pretrained``, where the weights fit the model.

    Raises:
        ValueError: when weights of the transformer, or of the head in a checkpoint of this class, are missing, left
            over or of another shape, or when the file is corrupt.
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
    if new := check_weights(cls, model, info, name_or_path, may_mismatch):
        _log.warning("%s: %s are new, not from %s: train them before use", cls.__name__, _some(new), name_or_path)
    return (model, info) if wants_info else model


def check_weights(cls: Any, model: Any, info: dict[str, Any], place: object, may_mismatch: bool) -> set[str]:
    """Raise where the weights do not fit; return the names of those that are newly initialised."""
    prefix = f"{cls.base_model_prefix}."
    parts = {name for name, _ in model.base_model.named_children()}

    def is_of_transformer(name: str) -> bool:
        return name.removeprefix(prefix).partition(".")[0] in parts

    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    mismatched = {name: f"{name} {tuple(theirs)}" for name, theirs, _ in info["mismatched_keys"]}
    new: set[str] = set(mismatched)
    if model.config.architectures is not None and cls.__name__ not in model.config.architectures:
        head = {name for name in model.state_dict() if not is_of_transformer(name)}
        if head <= missing:  # an incomplete head is an error
            missing, new = missing - head, new | head
        unexpected = set(filter(is_of_transformer, unexpected))
    for names, what in (
        (missing, "missing are"),
        (unexpected, "unexpected are"),
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
    """Hide transformers' table of missing weights, which an error or one line of the log replaces."""
    name, text = LOAD_REPORT

    def keep(record: logging.LogRecord) -> bool:
        return text not in str(record.msg)

    logger = logging.getLogger(name)
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
