"""The compiled kernels of ``mgk/csrc``, through ctypes: where they are, and which instruction set runs."""

import ctypes
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgk.functional.mixture.features import Options, ScoreFeatures

# In the order of the enum Set in csrc/library.cpp, the best last.
INSTRUCTION_SETS = ("plain", "avx2", "avx512")
# Asks for one of them; a set that the processor lacks is an error.
INSTRUCTION_SET_VARIABLE = "MGK_INSTRUCTION_SET"
# Names a folder with another build of the library, such as the one of ``make sanitize``.
FOLDER_VARIABLE = "MGK_KERNELS_FOLDER"
MOST_MIXTURES = 8
# Below this many multiplications the work is done before other threads have started.
WORK_PER_THREAD = 2**20

_ERRORS = {1: "a size is out of range", 2: "a tensor is missing", 3: "the processor lacks the instruction set"}
_OUT_OF_MEMORY = 4


class _Problem(ctypes.Structure):
    """The struct of the same name in csrc/problem.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "mixtures", "num_queries", "num_keys", "width")),
        *((name, ctypes.c_int64) for name in ("value_width", "shared", "hard", "causal", "is_double", "threads")),
        *((name, ctypes.c_void_p) for name in ("query", "keys", "row", "column", "value", "mask")),
        ("mask_is_bool", ctypes.c_int64),
        ("mask_strides", ctypes.c_int64 * 4),
        ("seed", ctypes.c_uint64),
        ("drop_below", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("out", "peak", "total", "grad")),
        *((name, ctypes.c_void_p) for name in ("d_query", "d_keys", "d_row", "d_column", "d_affine", "d_value")),
        *((name, ctypes.c_void_p) for name in ("query_weight", "counts")),
    )


class _Decode(ctypes.Structure):
    """The struct of the same name in csrc/problem.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "heads", "mixtures", "num_keys", "width", "value_width")),
        *((name, ctypes.c_int64) for name in ("is_dot", "hard", "is_double", "threads")),
        *((name, ctypes.c_void_p) for name in ("query", "shifts", "keys")),
        ("key_strides", ctypes.c_int64 * 4),
        ("value", ctypes.c_void_p),
        ("value_strides", ctypes.c_int64 * 3),
        ("log_prior", ctypes.c_void_p),
        ("prior_strides", ctypes.c_int64 * 4),
        ("variance", ctypes.c_void_p),
        ("variance_strides", ctypes.c_int64 * 4),
        ("mask", ctypes.c_void_p),
        ("mask_is_bool", ctypes.c_int64),
        ("mask_strides", ctypes.c_int64 * 3),
        ("out", ctypes.c_void_p),
    )


def _load(folder: Path) -> ctypes.CDLL | str:
    """The library in the folder, or a sentence that says why there is none and what to do."""
    files = sorted(folder.glob("_kernels*.so"))
    advice = "install a C++ compiler such as g++, then reinstall mgk"
    if not files:
        return f"not built: there was no C++ compiler when mgk was installed; {advice}"
    try:
        loaded = ctypes.CDLL(str(files[0]))
        loaded.mgk_struct_sizes.restype = ctypes.c_int64
        sizes = loaded.mgk_struct_sizes()
    except (OSError, AttributeError) as error:
        return f"not loadable ({error}); {advice}"
    is_same = sizes == ctypes.sizeof(_Problem) * 1000 + ctypes.sizeof(_Decode)
    return loaded if is_same else f"built for another version of mgk; {advice}"


_library = _load(Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).parents[3]))
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


def run(name: str, form: ScoreFeatures, options: Options, **fields: Any) -> None:
    """Call ``mgk_{name}``; tensors among the fields are contiguous and alive until it returns."""
    batch, heads, mixtures, num_keys = form.key_bias.shape
    num_queries, width = form.query.shape[2:]
    tensors = {"query": form.query, "keys": form.keys, "row": form.query_bias, "column": form.key_bias}
    tensors |= {key: x for key, x in fields.items() if isinstance(x, Tensor)}
    work = batch * heads * mixtures * num_queries * num_keys * width
    problem = _Problem(
        batch=batch,
        heads=heads,
        mixtures=mixtures,
        num_queries=num_queries,
        num_keys=num_keys,
        width=width,
        shared=form.query_bias is not None,
        hard=options.is_hard,
        causal=options.is_causal,
        is_double=form.query.dtype == torch.float64,
        threads=_threads(work),
        **{key: x.data_ptr() for key, x in tensors.items() if x is not None},
        **{key: x for key, x in fields.items() if not isinstance(x, Tensor) and x is not None},
    )
    _call(name, problem)


def counts(
    form: ScoreFeatures, mask: Tensor | None, query_mask: Tensor | None, is_hard: bool, is_causal: bool
) -> Tensor:
    """N_jr = sum_i gamma_ijr (B, H, M, S), over the queries of ``query_mask`` (B, L)."""
    form = contiguous(form)
    out = torch.empty_like(form.key_bias)
    weight = None if query_mask is None else query_mask.to(out.dtype).contiguous()
    fields = mask_fields(mask, (*form.query.shape[:3], form.key_bias.shape[3]))
    run("count", form, Options(is_hard, is_causal, 0.0), **fields, query_weight=weight, counts=out)
    return out


def contiguous(form: ScoreFeatures) -> ScoreFeatures:
    """The form as the kernels read it."""
    return ScoreFeatures._make(x if x is None else x.contiguous() for x in form)


def decode(
    query: Tensor,
    keys: Tensor,
    shifts: Tensor | None,
    value: Tensor,
    log_prior: Tensor | None,
    variance: Tensor,
    mask: Tensor | None,
    is_dot: bool,
    is_hard: bool,
) -> Tensor:
    """The output (B, H, 1, E) of one query, reading keys and values where they lie; rows of both are contiguous."""
    batch, heads, _, num_keys, width = keys.shape
    mixtures = keys.shape[2] if shifts is None else shifts.shape[1]
    scores = (batch, heads, mixtures, num_keys)
    query, variance = query.contiguous(), variance.expand(scores)
    keys, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, value))
    out = value.new_empty(batch, heads, 1, value.shape[-1])
    problem = _Decode(
        batch=batch,
        heads=heads,
        mixtures=mixtures,
        num_keys=num_keys,
        width=width,
        value_width=value.shape[-1],
        is_dot=is_dot,
        hard=is_hard,
        is_double=query.dtype == torch.float64,
        threads=_threads(keys.numel()),
        query=query.data_ptr(),
        keys=keys.data_ptr(),
        key_strides=(ctypes.c_int64 * 4)(*keys.stride()[:4]),
        value=value.data_ptr(),
        value_strides=(ctypes.c_int64 * 3)(*value.stride()[:3]),
        variance=variance.data_ptr(),
        variance_strides=(ctypes.c_int64 * 4)(*variance.stride()),
        out=out.data_ptr(),
    )
    if shifts is not None:
        shifts = shifts.contiguous()
        problem.shifts = shifts.data_ptr()
    if log_prior is not None:
        log_prior = log_prior.expand(scores)
        problem.log_prior, problem.prior_strides = log_prior.data_ptr(), (ctypes.c_int64 * 4)(*log_prior.stride())
    if mask is not None:
        mask = mask.expand(batch, heads, 1, num_keys)
        problem.mask, problem.mask_is_bool = mask.data_ptr(), mask.dtype == torch.bool
        problem.mask_strides = (ctypes.c_int64 * 3)(mask.stride(0), mask.stride(1), mask.stride(3))
    _call("decode", problem)
    return out


def _threads(work: int) -> int:
    return max(1, min(torch.get_num_threads(), work // WORK_PER_THREAD))


def _call(name: str, problem: ctypes.Structure) -> None:
    assert not isinstance(_library, str)
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
