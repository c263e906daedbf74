"""Loading: missing, unexpected or corrupt weights raise; nothing is unpickled."""

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
    """The result of ``load``, a ``from_pretrained``; ValueError for a misfit."""
    wants_info = kwargs.pop("output_loading_info", False)
    may_mismatch = kwargs.pop("ignore_mismatched_sizes", False)
    if kwargs.setdefault("use_safetensors", True) is not True:
        raise ValueError("use_safetensors must be True: weights are never unpickled")
    kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        with _without_report():
            model, info = load(name_or_path, *args, **kwargs)
    except SafetensorError as error:
        raise ValueError(f"the weights of {name_or_path} are corrupt: {error}") from None
    if new := check_weights(cls, model, info, name_or_path, may_mismatch):
        parts = (cls.__name__, _some(new), name_or_path)
        _log.warning("%s: %s are new, not from %s: train them before use", *parts)
    return (model, info) if wants_info else model


def check_weights(cls: Any, model: Any, info: dict[str, Any], place: object, may_mismatch: bool) -> set[str]:
    """Raise where weights do not fit; return the names of new ones."""
    prefix = f"{cls.base_model_prefix}."
    parts = {name for name, _ in model.base_model.named_children()}

    def is_of_transformer(name: str) -> bool:
        return name.removeprefix(prefix).partition(".")[0] in parts

    missing, unexpected = set(info["missing_keys"]), set(info["unexpected_keys"])
    mismatched = {name: f"{name} {tuple(size)}" for name, size, _ in info["mismatched_keys"]}
    new: set[str] = set(mismatched)
    architectures = model.config.architectures
    if architectures is not None and cls.__name__ not in architectures:
        head = {name for name in model.state_dict() if not is_of_transformer(name)}
        if head <= missing:  # an incomplete head is an error
            missing, new = missing - head, new | head
        unexpected = set(filter(is_of_transformer, unexpected))
    misfits: dict[str, Iterable[str]] = {
        "missing": missing,
        "unexpected": unexpected,
        "of another shape": [] if may_mismatch else mismatched.values(),
    }
    for kind, names in misfits.items():
        if names:
            model_name = f"{cls.__name__} with attention={model.config.attention!r}"
            raise ValueError(f"the weights of {place} do not fit {model_name}: {kind} are {_some(names)}")
    return new


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@contextmanager
def _without_report() -> Iterator[None]:
    """Hide transformers' table of missing weights: ours replaces it."""
    name, text = LOAD_REPORT

    def keep(record: logging.LogRecord) -> bool:
        return text not in str(record.msg)

    logger = logging.getLogger(name)
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
