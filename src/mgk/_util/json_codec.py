"""Dataclasses as checked JSON data and back; compact JSON files."""

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from mgk._util.files import with_hash, write_file

_T = TypeVar("_T")
_adapter: Any = lru_cache(TypeAdapter)  # mypy: "a type cannot be hashed"


def dump(value: Any) -> Any:
    """A dataclass as JSON data."""
    return _adapter(type(value)).dump_python(value, mode="json")


def load(kind: type[_T], data: Any) -> _T:
    """The dataclass ``kind`` from JSON data, or ``ValueError``."""
    try:
        value: _T = _adapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, first["loc"])) or kind.__name__
        raise ValueError(f"{path}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
    return value


def write(path: Path, value: Any) -> None:
    """Write a dataclass as JSON with the SHA-256 of its content."""
    write_compact(path, with_hash(dump(value)))


def write_compact(path: Path, data: Any) -> None:
    """Write indented JSON whose lists of numbers are on one line."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    # lists of numbers, then lists of such lists
    text = re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", _on_one_line, text)
    write_file(path, re.sub(r"\[\s+(\[[^{}]*?\])\s+\]", _on_one_line, text) + "\n")


def _on_one_line(match: re.Match[str]) -> str:
    return f"[{' '.join(match[1].split())}]"
