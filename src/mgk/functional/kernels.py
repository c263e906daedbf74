"""The compiled kernels of ``mgk/csrc``, through ctypes: where they are, and which instruction set runs."""

import ctypes
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgk.functional.bilinear import Bilinear
from mgk.functional.operators import Options

# In the order of the enum Set in csrc/library.cpp, the best last.
INSTRUCTION_SETS = ("plain", "avx2", "avx512")
# Asks for one of them; a set that the processor lacks is an error.
INSTRUCTION_SET_VARIABLE = "MGK_INSTRUCTION_SET"
MOST_MIXTURES = 8
# Below this many multiplications the work is done before other threads have started.
WORK_PER_THREAD = 2**20

_ERRORS = {1: "a size is out of range", 2: "a tensor is missing", 3: "the processor lacks the instruction set"}
_OUT_OF_MEMORY = 4


class _Problem(ctypes.Structure):
    """The struct of csrc/problem.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "mixtures", "num_queries", "num_keys", "width")),
        *((name, ctypes.c_int64) for name in ("value_width", "shared", "hard", "causal", "is_double", "threads")),
        *((name, ctypes.c_void_p) for name in ("query", "keys", "row", "column", "value", "mask")),
        ("mask_is_bool", ctypes.c_int64),
        ("mask_strides", ctypes.c_int64 * 4),
        ("seed", ctypes.c_uint64),
        ("drop_below", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("out", "lse", "grad")),
        *((name, ctypes.c_void_p) for name in ("d_query", "d_keys", "d_row", "d_column", "d_value")),
        *((name, ctypes.c_void_p) for name in ("query_weight", "counts")),
    )


def _load() -> ctypes.CDLL | str:
    """The library, or a sentence that says why there is none and what to do."""
    files = sorted(Path(__file__).parent.parent.glob("_kernels*.so"))
    advice = "install a C++ compiler such as g++, then reinstall mgk"
    if not files:
        return f"not built: there was no C++ compiler when mgk was installed; {advice}"
    try:
        loaded = ctypes.CDLL(str(files[0]))
        loaded.mgk_problem_size.restype = ctypes.c_int64
        size = loaded.mgk_problem_size()
    except (OSError, AttributeError) as error:
        return f"not loadable ({error}); {advice}"
    return loaded if size == ctypes.sizeof(_Problem) else f"built for another version of mgk; {advice}"


_library = _load()
# A plain string, which torch.compile can look at: "ready", or why not.
STATUS = _library if isinstance(_library, str) else "ready"


def supported_instruction_sets() -> list[str]:
    """What this processor and this build can run, the best last."""
    if isinstance(_library, str):
        return []
    return [name for number, name in enumerate(INSTRUCTION_SETS) if _library.mgk_supports(number)]


def instruction_set() -> str:
    """The set that runs: the best that is supported, or the one that the environment asks for."""
    supported = supported_instruction_sets()
    wanted = os.environ.get(INSTRUCTION_SET_VARIABLE) or supported[-1]
    if wanted not in supported:
        raise ValueError(f"{INSTRUCTION_SET_VARIABLE} must be one of {', '.join(supported)} here, got {wanted!r}")
    return wanted


def run(name: str, form: Bilinear, options: Options, **fields: Any) -> None:
    """Call ``mgk_{name}``; tensors among the fields are contiguous and alive until it returns."""
    assert not isinstance(_library, str)
    batch, heads, mixtures, num_keys = form.column.shape
    num_queries, width = form.query.shape[2:]
    tensors = {"query": form.query, "keys": form.keys, "row": form.row, "column": form.column}
    tensors |= {key: x for key, x in fields.items() if isinstance(x, Tensor)}
    work = batch * heads * mixtures * num_queries * num_keys * width
    problem = _Problem(
        batch=batch,
        heads=heads,
        mixtures=mixtures,
        num_queries=num_queries,
        num_keys=num_keys,
        width=width,
        shared=form.row is not None,
        hard=options.is_hard,
        causal=options.is_causal,
        is_double=form.query.dtype == torch.float64,
        threads=max(1, min(torch.get_num_threads(), work // WORK_PER_THREAD)),
        **{key: x.data_ptr() for key, x in tensors.items() if x is not None},
        **{key: x for key, x in fields.items() if not isinstance(x, Tensor) and x is not None},
    )
    code = getattr(_library, f"mgk_{name}")(ctypes.byref(problem), INSTRUCTION_SETS.index(instruction_set()))
    if code == _OUT_OF_MEMORY:
        raise MemoryError("backend 'cpu' ran out of memory")
    if code:
        raise RuntimeError(f"backend 'cpu' refused the call: {_ERRORS[code]}")


def mask_fields(mask: Tensor | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """The mask's fields: expanded by strides of 0, so that it is never copied."""
    if mask is None:
        return {}
    expanded = mask.expand(shape)
    strides = (ctypes.c_int64 * 4)(*expanded.stride())
    return {"mask": expanded, "mask_is_bool": mask.dtype == torch.bool, "mask_strides": strides}


def dropout_fields(seed: Tensor | None, dropout_p: float) -> dict[str, Any]:
    """The seed, and p as a fraction of 2^32."""
    return {} if seed is None else {"seed": int(seed.item()), "drop_below": round(dropout_p * 2**32)}
