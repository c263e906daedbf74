"""Docstrings as the site shows them: references in Sphinx's manner become links, formulas stay as they are typed."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`([\w.]+)`")


class Roles(griffe.Extension):
    """``:func:`name``` becomes a link to what the name means where it stands."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(lambda match: _link(obj, match[1]), obj.docstring.value)


def _link(obj: griffe.Object, name: str) -> str:
    first, dot, rest = name.partition(".")
    try:
        full = obj.resolve(first) + dot + rest
    except griffe.NameResolutionError:
        full = name
    return f"[`{name}`][{full}]"
