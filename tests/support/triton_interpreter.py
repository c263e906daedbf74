"""Triton's interpreter, quicker and with bfloat16.

Its own bfloat16 is declared unsupported: products and sums act on the bits. Here products and casts are right, and any
other arithmetic on bfloat16 raises. Its patches of the language, made anew at every call of a function, are made once
for a kernel.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Change the interpreter of this process."""
    builder = interpreter.InterpreterBuilder
    plain_dot, plain_cast, plain_binary = builder.create_dot, builder.cast_impl, builder.binary_op

    def dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return plain_dot(self, _as_float32(a), _as_float32(b), d, *options)

    def cast(self: Any, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar == tl.bfloat16:
            return plain_cast(self, _as_float32(source), dtype)
        if dtype.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_to_bfloat16(source.data.astype(np.float32)), tl.bfloat16)
        return plain_cast(self, source, dtype)

    def binary(self: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar == tl.bfloat16:
            raise TypeError(f"{operation} of bfloat16 in the interpreter")
        return plain_binary(self, left, right, operation)

    builder.create_dot, builder.cast_impl, builder.binary_op = dot, cast, binary
    _patch_once()


def _as_float32(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    bits = x.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    """The upper half of the bits, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def _patch_once() -> None:
    plain_patch, plain_run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[frozenset[str]] = set()
    modules: dict[Any, frozenset[str]] = {}

    def patch(function: Any) -> Any:
        if function not in modules:
            names = {x.__name__ for x in function.__globals__.values() if x is tl or x is tl.core}
            modules[function] = frozenset(names)
        if modules[function] in done:
            return interpreter._LangPatchScope()
        done.add(modules[function])
        return plain_patch(function)

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        done.clear()
        try:
            return plain_run(self, *arguments, **options)
        finally:
            done.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch, run
