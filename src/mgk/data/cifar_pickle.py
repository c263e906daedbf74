"""Reads the pickled batches of CIFAR-10 without unpickling.

A pickle is a program, and ``pickle.load`` runs it. Here ``pickletools.genops`` only splits it into instructions, which
never executes anything, and the interpreter below knows just those that build dictionaries, lists, strings, numbers
and arrays of bytes. No instruction imports: the three names that NumPy's arrays need stand for a word each, any other
name is refused, and so is any instruction that is not in the official files. The worst that a hostile file can do is
to be refused.
"""

import pickletools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.data.errors import fail

_MARK = object()
_NAMES = {
    "numpy.core.multiarray _reconstruct": "reconstruct",
    "numpy._core.multiarray _reconstruct": "reconstruct",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
}
_PUSH = {"BININT", "BININT1", "BININT2", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES", "BINUNICODE"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Global:
    """One of the three names."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Call:
    """``reconstruct(...)`` or ``dtype(...)`` as written, with the state that BUILD gives it; nothing is called."""

    def __init__(self, name: str, arguments: Any) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None


def read_batch(data: bytes, where: str) -> tuple[NDArray[np.uint8], list[int]]:
    """The pixels (n, 3072) and labels of one batch."""
    try:
        content = _interpret(data, where)
        pixels, labels = content["data"], content["labels"]
        array = _as_array(pixels)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, UnicodeError) as error:
        fail(where, f"this is not a batch of CIFAR-10 in the Python layout ({type(error).__name__}: {error})")
    if array.ndim != 2 or array.shape[1] != 3072:
        fail(where, f"images of shape {array.shape[1:]} instead of (3072,)")
    if not isinstance(labels, list) or len(labels) != len(array):
        fail(where, f"{len(array)} images, but not as many labels")
    for number, label in enumerate(labels):
        if type(label) is not int or not 0 <= label <= 9:
            # Not the repr of anything else: that of a hostile nest of tuples would overflow Python's stack.
            shown = label if type(label) is int else type(label).__name__
            fail(where, f"the label of image {number} must be from 0 to 9, got {shown}")
    return array, labels


def _as_array(value: Any) -> NDArray[np.uint8]:
    """An array from the state that NumPy pickles: version, shape, type, whether by columns, bytes."""
    if not isinstance(value, _Call) or value.name != "reconstruct":
        raise ValueError("'data' is not an array")
    _, shape, dtype, by_columns, content = value.state
    if not isinstance(dtype, _Call) or dtype.name != "dtype" or dtype.arguments[0] not in ("u1", b"u1"):
        raise ValueError("'data' is not of bytes")
    if not isinstance(content, str | bytes):  # bytes(n) of a number would take n bytes of memory
        raise ValueError("'data' has no content")
    raw = content.encode("latin-1") if isinstance(content, str) else content
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if by_columns else "C")


def _interpret(data: bytes, where: str) -> dict[str, Any]:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, position in pickletools.genops(data):
        name = opcode.name
        if name in _PUSH:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in ("EMPTY_DICT", "EMPTY_LIST"):
            stack.append({} if name == "EMPTY_DICT" else [])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _TUPLES:
            count = _TUPLES[name]
            items = tuple(stack[len(stack) - count :])
            del stack[len(stack) - count :]
            stack.append(items)
        elif name == "TUPLE":
            stack.append(tuple(_since_mark(stack)))
        elif name in ("APPENDS", "SETITEMS"):
            items = tuple(_since_mark(stack))
            if name == "APPENDS":
                stack[-1].extend(items)
            else:
                stack[-1].update(zip(map(_key, items[::2]), items[1::2], strict=True))
        elif name in ("APPEND", "SETITEM"):
            item = stack.pop()
            if name == "APPEND":
                stack[-1].append(item)
            else:
                key = _key(stack.pop())
                stack[-1][key] = item
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL" and argument in _NAMES:
            stack.append(_Global(_NAMES[str(argument)]))
        elif name == "REDUCE" and isinstance(stack[-2], _Global):
            arguments = stack.pop()
            stack.append(_Call(stack.pop().name, arguments))
        elif name == "BUILD" and isinstance(stack[-2], _Call):
            state = stack.pop()
            stack[-1].state = state
        elif name not in ("PROTO", "STOP"):
            shown = f"{name} {argument}" if argument is not None else name
            fail(where, f"byte {position}: the instruction {shown[:60]!r} has no place in a batch of CIFAR-10")
    if len(stack) != 1 or not isinstance(stack[0], dict):
        raise ValueError("the pickle does not hold one dictionary")
    return stack[0]


def _since_mark(stack: list[Any]) -> list[Any]:
    place = len(stack) - 1 - stack[::-1].index(_MARK)
    items = stack[place + 1 :]
    del stack[place:]
    return items


def _key(key: Any) -> str:
    if isinstance(key, bytes):
        return key.decode("latin-1")
    if not isinstance(key, str):
        raise TypeError(f"a key of type {type(key).__name__}")
    return key
