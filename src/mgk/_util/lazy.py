"""Packages whose public names load on first use."""

import ast
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_exports(
    package: str, file: str, submodules: Sequence[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a package.

    The public names are its submodules and what it imports ``if TYPE_CHECKING``.
    """
    blocks = (node for node in ast.parse(Path(file).read_bytes()).body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    home = {alias.name: str(node.module) for node in imports for alias in node.names}
    public = sorted([*home, *submodules])

    def load(name: str) -> Any:
        if name in home:
            value = getattr(import_module(home[name]), name)
        elif name in submodules:
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # for the next access
        return value

    return public, load, lambda: public
