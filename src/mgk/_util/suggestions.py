"""Suggestions for mistyped names."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean 'listops'?`` where a known name is close, else ``choose one of ...``."""
    known = list(known)
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}"
