"""Suggestions for mistyped names."""

from collections.abc import Iterable
from difflib import get_close_matches


def closest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The most similar known name; None where none reaches the cutoff."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean 'listops'?`` or ``choose one of ...``."""
    known = list(known)
    near = closest(name, known)
    return f"did you mean {near!r}?" if near else f"choose one of {', '.join(known)}"
