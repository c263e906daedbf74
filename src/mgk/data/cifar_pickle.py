"""Reads the pickled batches of CIFAR-10 without calling anything they name.

A pickle is a program: only the instructions and names of the official files
pass, and a name becomes a record that stores the arguments of its calls.
"""

import io
import pickle
import pickletools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.data.errors import fail

_NAMES = {
    "numpy.core.multiarray _reconstruct": "reconstruct",
    "numpy._core.multiarray _reconstruct": "reconstruct",
    "numpy ndarray": "ndarray",
    "numpy dtype": "dtype",
}
_INSTRUCTIONS = """
    PROTO STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2
    SHORT_BINSTRING BINSTRING SHORT_BINBYTES BINBYTES BINUNICODE
    EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3
    APPEND APPENDS SETITEM SETITEMS BINPUT LONG_BINPUT BINGET LONG_BINGET
    GLOBAL REDUCE BUILD
"""
_MALFORMED = (
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
)


class _Record:
    """A name, or a call of it, with the state that BUILD gives it."""

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None

    def __call__(self, *arguments: Any) -> "_Record":
        return _Record(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Record(_NAMES[f"{module} {name}"])


def read_batch(data: bytes, where: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The pixels (n, 3072) and labels (n,) of one batch."""
    try:
        _check_instructions(data, where)
        content = _Unpickler(io.BytesIO(data), fix_imports=False, encoding="latin-1").load()
        # The keys are bytes in the files of Python 2.
        fields = {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
        labels, array = fields["labels"], _as_array(fields["data"])
    except _MALFORMED as error:
        reason = f"{type(error).__name__}: {error}"
        fail(where, f"this is not a batch of CIFAR-10 in the Python layout ({reason})")
    if array.ndim != 2 or array.shape[1] != 3072:
        fail(where, f"images of shape {array.shape[1:]} instead of (3072,)")
    if not isinstance(labels, list) or len(labels) != len(array):
        fail(where, f"{len(array)} images, but not as many labels")
    for number, label in enumerate(labels):
        if type(label) is not int or not 0 <= label <= 9:
            # No repr of others: that of nested tuples may overflow the stack.
            shown = label if type(label) is int else type(label).__name__
            fail(where, f"the label of image {number} must be from 0 to 9, got {shown}")
    return array, np.array(labels, np.uint8)


def _check_instructions(data: bytes, where: str) -> None:
    known = set(_INSTRUCTIONS.split())
    for opcode, argument, position in pickletools.genops(data):
        is_known = opcode.name in known and (opcode.name != "GLOBAL" or argument in _NAMES)
        # The unpickler's memo is as long as its highest place.
        if not is_known or (opcode.name == "LONG_BINPUT" and (argument or 0) > len(data)):
            shown = opcode.name if argument is None else f"{opcode.name} {argument}"
            what = f"byte {position}: the instruction {shown[:60]!r}"
            fail(where, f"{what} has no place in a batch of CIFAR-10")


def _as_array(value: Any) -> NDArray[np.uint8]:
    """An array from NumPy's state: version, shape, type, by columns, bytes."""
    if not isinstance(value, _Record) or value.name != "reconstruct" or value.state is None:
        raise ValueError("'data' is not an array")
    _, shape, dtype, by_columns, content = value.state
    if not isinstance(dtype, _Record) or dtype.name != "dtype" or dtype.arguments[0] not in ("u1", b"u1"):
        raise ValueError("'data' is not of bytes")
    if not isinstance(content, str | bytes):  # bytes(n) takes n bytes
        raise ValueError("'data' has no content")
    raw = content.encode("latin-1") if isinstance(content, str) else content
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if by_columns else "C")
