"""Packages whose public names load on first use, so that importing one imports neither torch nor anything heavier."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, names: Mapping[str, Sequence[str]], submodules: Sequence[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its ``__name__``.
        names: the public names, by the module that defines them.
        submodules: public modules below the package.
    """
    home = {name: module for module, exported in names.items() for name in exported}
    public = sorted([*home, *submodules])

    def load(name: str) -> Any:
        if name in home:
            value = getattr(import_module(home[name]), name)
        elif name in submodules:
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)  # the next access does not call this function
        return value

    return public, load, lambda: public
