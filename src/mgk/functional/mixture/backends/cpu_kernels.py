"""The compiled kernels of ``mgk/csrc``, through ctypes."""

import ctypes
import functools
import itertools
import os
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk.functional.mixture.features import Options, ScoreFeatures
from mgk.functional.mixture.inputs import SMALL_SCORE

# Selects an instruction set; read once. One that the processor lacks is an error.
INSTRUCTION_SET_VARIABLE = "MGK_INSTRUCTION_SET"
# Names a folder with another build of the library, such as the one of ``make sanitize``.
FOLDER_VARIABLE = "MGK_KERNELS_FOLDER"
# The order of the enum Dtype in csrc/params.h.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# The order of the enum Part in csrc/params.h.
PARTS = ("multiply-add", "score product", "softmax", "value product")
# Below this many multiplications the work is done before other threads have started.
WORK_PER_THREAD = 2**20

# By the number in the enum Status of csrc/library.cpp; the last is out of memory.
_ERRORS = (
    "",
    "a size is out of range",
    "a tensor is missing",
    "the processor lacks the instruction set",
    "d_score_affine needs a soft E-step",
)


def _fields(names: str, kind: type) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names.split())


class AttentionParams(ctypes.Structure):
    """The struct of the same name in csrc/params.h."""

    _fields_ = (
        *_fields("batch_size num_heads group num_components first_row first_key", ctypes.c_int64),
        *_fields("num_queries num_keys num_features value_width", ctypes.c_int64),
        *_fields("is_shared is_hard left right is_double num_threads", ctypes.c_int64),
        *_fields("query keys query_bias key_bias value mask", ctypes.c_void_p),
        ("mask_is_bool", ctypes.c_int64),
        ("mask_strides", ctypes.c_int64 * 4),
        *_fields("segment_starts segment_ends", ctypes.c_void_p),
        ("dropout_seed", ctypes.c_uint64),
        ("dropout_threshold", ctypes.c_int64),
        *_fields("out row_max row_sum lse grad d_lse", ctypes.c_void_p),
        *_fields("d_query d_keys d_query_bias d_key_bias d_score_affine d_value", ctypes.c_void_p),
        *_fields("query_weight counts", ctypes.c_void_p),
    )


_RESULTS = "out row_max row_sum lse grad d_lse d_query d_keys d_shifts d_value d_log_prior"


class MixtureParams(ctypes.Structure):
    """The struct of the same name in csrc/params.h."""

    _fields_ = (
        *_fields("batch_size num_heads group num_components num_queries num_keys key_width", ctypes.c_int64),
        *_fields("value_width is_dot is_hard left right dtype num_threads", ctypes.c_int64),
        *_fields("variance near_zero", ctypes.c_double),
        ("query", ctypes.c_void_p),
        ("query_strides", ctypes.c_int64 * 3),
        ("keys", ctypes.c_void_p),
        ("key_strides", ctypes.c_int64 * 4),
        *_fields("shifts value", ctypes.c_void_p),
        ("value_strides", ctypes.c_int64 * 3),
        ("log_prior", ctypes.c_void_p),
        ("log_prior_strides", ctypes.c_int64 * 4),
        ("normalises_prior", ctypes.c_int64),
        ("mask", ctypes.c_void_p),
        *_fields("mask_is_bool is_key_mask", ctypes.c_int64),
        ("mask_strides", ctypes.c_int64 * 4),
        *_fields("segment_starts segment_ends", ctypes.c_void_p),
        ("dropout_seed", ctypes.c_uint64),
        ("dropout_threshold", ctypes.c_int64),
        *_fields(_RESULTS, ctypes.c_void_p),
    )


class DecodeParams(ctypes.Structure):
    """The struct of the same name in csrc/params.h."""

    _fields_ = (
        *_fields("batch_size num_heads group num_components num_keys key_width value_width", ctypes.c_int64),
        *_fields("is_dot is_hard is_double num_threads", ctypes.c_int64),
        *_fields("query shifts keys", ctypes.c_void_p),
        ("key_strides", ctypes.c_int64 * 4),
        ("value", ctypes.c_void_p),
        ("value_strides", ctypes.c_int64 * 3),
        ("log_prior", ctypes.c_void_p),
        ("log_prior_strides", ctypes.c_int64 * 4),
        ("variance", ctypes.c_void_p),
        ("variance_strides", ctypes.c_int64 * 4),
        ("mask", ctypes.c_void_p),
        ("mask_is_bool", ctypes.c_int64),
        ("mask_strides", ctypes.c_int64 * 3),
        *_fields("out lse", ctypes.c_void_p),
    )


class DropoutParams(ctypes.Structure):
    """The struct of the same name in csrc/params.h."""

    _fields_ = (
        *_fields("size num_threads seed threshold", ctypes.c_int64),
        *_fields("x residual out", ctypes.c_void_p),
    )


def _struct_layout(*structures: type[ctypes.Structure]) -> list[str]:
    """A line "struct.field offset size" for each field, and "struct 0 size" for each struct."""
    lines = []
    for structure in structures:
        for name, *_ in structure._fields_:
            field = getattr(structure, name)
            lines.append(f"{structure.__name__}.{name} {field.offset} {field.size}")
        lines.append(f"{structure.__name__} 0 {ctypes.sizeof(structure)}")
    return lines


def _load(folder: Path) -> ctypes.CDLL | str:
    """The library in the folder, or a sentence that says why there is none and what to do."""
    files = sorted(folder.glob("_kernels*.so"))
    advice = (
        "install a C++ compiler such as g++, then pip install --force-reinstall --no-deps --no-cache-dir mgk"
    )
    if not files and sys.platform == "win32":
        return "not built: there are none for Windows; they run in WSL"
    if not files:
        return f"not built: there was no C++ compiler when mgk was installed; {advice}"
    try:
        library = ctypes.CDLL(str(files[0]))
    except OSError as error:
        return f"not loadable ({error}); {advice}"
    other_version = "built for another version of mgk"
    try:
        library.mgk_struct_layout.restype = library.mgk_supported_sets.restype = ctypes.c_char_p
        library.mgk_max_components.restype = library.mgk_reads_float16.restype = ctypes.c_int64
        library.mgk_run_part.restype = ctypes.c_double
    except AttributeError as error:
        return f"{other_version} ({error}); {advice}"
    wanted, built = (
        _struct_layout(AttentionParams, MixtureParams, DecodeParams, DropoutParams),
        library.mgk_struct_layout().decode().splitlines(),
    )
    for ours, theirs in itertools.zip_longest(wanted, built, fillvalue="nothing"):
        if ours != theirs:
            return f"{other_version} (it has {theirs} in place of {ours}); {advice}"
    return library


_library = _load(Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).parents[3]))
# A string constant, which torch.compile can read: "ready", or why not.
STATUS = _library if isinstance(_library, str) else "ready"
# The largest number of components that the kernels have room for; 0 without them.
MAX_COMPONENTS: int = 0 if isinstance(_library, str) else _library.mgk_max_components()
# What the kernels read where it lies; a compiler may lack float16.
READABLE_DTYPES = _DTYPES if not isinstance(_library, str) and _library.mgk_reads_float16() else _DTYPES[:3]


@functools.cache
def supported_instruction_sets() -> tuple[str, ...]:
    """What this processor and this build can run, the best last."""
    return () if isinstance(_library, str) else tuple(_library.mgk_supported_sets().decode().split())


@functools.cache
def instruction_set() -> str:
    """The set that runs: the best that is supported, or the one that the environment asks for."""
    supported = supported_instruction_sets()
    wanted = os.environ.get(INSTRUCTION_SET_VARIABLE) or supported[-1]
    if wanted not in supported:
        raise ValueError(
            f"{INSTRUCTION_SET_VARIABLE} must be one of {', '.join(supported)} here, got {wanted!r}"
        )
    return wanted


def run(name: str, features: ScoreFeatures, options: Options, **fields: Any) -> None:
    """Call ``mgk_{name}``; tensors among the fields are contiguous and alive until it returns."""
    if (segments := fields.get("segments")) is not None:
        fields["segments"] = segments.contiguous()  # vmap gives views
    query, keys, query_bias, key_bias, _ = features
    batch, heads, components, num_keys = key_bias.shape
    num_queries, num_features = query.shape[2:]
    fields |= {"query": query, "keys": keys, "query_bias": query_bias, "key_bias": key_bias}
    fields |= _segment_fields(fields.pop("segments"))
    params = AttentionParams(
        batch_size=batch,
        num_heads=heads,
        group=features.group,
        num_components=components,
        num_queries=num_queries,
        num_keys=num_keys,
        num_features=num_features,
        is_shared=query_bias is not None,
        is_hard=options.is_hard,
        left=-1 if options.left is None else options.left,
        right=-1 if options.right is None else options.right,
        is_double=query.dtype == torch.float64,
        num_threads=_num_threads(features.group * key_bias.numel() * num_queries * num_features),
        **_pointers(fields),
    )
    _call(name, bytes(params))


class Mixture(NamedTuple):
    """The arguments of a call by its own tensors."""

    query: Tensor  # (B, Hq, L, D)
    keys: Tensor  # (B, H, M or 1, S, D)
    shifts: Tensor | None  # (H, M, D)
    value: Tensor  # (B, H, S, E)
    log_prior: Tensor | None  # broadcastable to (B, H, M, S), at full precision
    mask: Tensor | None  # broadcastable to (B, Hq, L, S), bool or at full precision
    seed: Tensor | None  # of dropout (1,)
    segments: Tensor | None  # of a ``KeyRange`` (2, B, S)
    variance: float
    is_dot: bool
    is_hard: bool
    left: int | None
    right: int | None
    dropout_p: float
    normalises_prior: bool
    with_lse: bool


def run_mixture(name: str, x: Mixture, tensors: dict[str, Tensor]) -> None:
    """Call ``mgk_mixture_{name}`` with the results and gradients in ``tensors``, contiguous."""
    query, keys, value = map(_with_dense_rows, (x.query, x.keys, x.value))
    shifts = None if x.shifts is None else x.shifts.contiguous()
    batch, query_heads, num_queries, width = query.shape
    heads, num_keys = keys.shape[1], keys.shape[3]
    components = keys.shape[2] if shifts is None else shifts.shape[1]
    mask = x.mask
    is_key_mask = mask is not None and mask.shape[2] == 1 and (heads == query_heads or mask.shape[1] == 1)
    starts, ends = (None, None) if x.segments is None else x.segments.unbind()
    results = map(tensors.get, _RESULTS.split())
    values = (  # in the order of the struct
        *(batch, heads, query_heads // heads, components, num_queries, num_keys, width, value.shape[-1]),
        *(x.is_dot, x.is_hard, -1 if x.left is None else x.left, -1 if x.right is None else x.right),
        _DTYPES.index(query.dtype),
        _num_threads(batch * query_heads * components * num_keys * num_queries * width),
        *(x.variance, 2 * SMALL_SCORE * x.variance),
        *(query.data_ptr(), *query.stride()[:3]),
        *(keys.data_ptr(), *keys.stride()[:4]),
        *(_address(shifts), value.data_ptr(), *value.stride()[:3]),
        *(_address(x.log_prior), *_strides(x.log_prior), x.normalises_prior),
        *(_address(mask), mask is not None and mask.dtype == torch.bool, is_key_mask, *_strides(mask)),
        *map(_address, (starts, ends)),
        *dropout_fields(x.seed, x.dropout_p).values(),
        *map(_address, results),
    )
    _call(f"mixture_{name}", _pack(MixtureParams, values))


def counts(
    features: ScoreFeatures,
    mask: Tensor | None,
    query_mask: Tensor | None,
    segments: Tensor | None,
    options: Options,
) -> Tensor:
    """N_jr = sum_i gamma_ijr (B, H, M, S), over the queries of ``query_mask`` (B, L)."""
    features = contiguous(features)
    out = torch.empty_like(features.key_bias)
    weight = None if query_mask is None else query_mask.to(out.dtype).contiguous()
    fields = mask_fields(mask, (*features.query.shape[:3], features.key_bias.shape[3]))
    run("count", features, options, **fields, segments=segments, query_weight=weight, counts=out)
    return out


def contiguous(features: ScoreFeatures) -> ScoreFeatures:
    """The features as the kernels read them."""
    return ScoreFeatures._make(x if x is None else x.contiguous() for x in features)


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
    with_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The output (B, Hq, 1, E) and, if wanted, the log-sum-exp (B, Hq, 1) of one query."""
    batch, heads, _, num_keys, width = keys.shape
    keys, value, query = _with_dense_rows(keys), _with_dense_rows(value), query.contiguous()
    shifts = None if shifts is None else shifts.contiguous()
    query_heads, value_width = query.shape[1], value.shape[-1]
    shape = (batch, query_heads, 1, value_width)
    out = torch.empty_like(query) if width == value_width else query.new_empty(shape)  # the first is faster
    lse = value.new_empty((batch, query_heads, 1)) if with_lse else None
    mask = None if mask is None else mask.select(2, 0)
    values = (  # in the order of the struct
        *(batch, heads, query_heads // heads, keys.shape[2] if shifts is None else shifts.shape[1]),
        *(num_keys, width, value_width, is_dot, is_hard, query.dtype == torch.float64),
        _num_threads(keys.numel()),
        *(query.data_ptr(), _address(shifts), keys.data_ptr(), *keys.stride()[:4]),
        *(value.data_ptr(), *value.stride()[:3]),
        *(_address(log_prior), *_strides(log_prior)),
        *(variance.data_ptr(), *_strides(variance)),
        *(_address(mask), mask is not None and mask.dtype == torch.bool, *_strides(mask, 3)),
        *(out.data_ptr(), _address(lse)),
    )
    _call("decode", _pack(DecodeParams, values))
    return out, lse


def dropout(x: Tensor, residual: Tensor | None, seed: int, p: float) -> Tensor:
    """``residual + x m / (1 - p)``, float32, the mask m a hash of the seed."""
    out = torch.empty_like(x)
    size = x.numel()
    sizes = (size, _num_threads(16 * size), seed, round(p * 2**32))
    if size:
        _call("dropout", _pack(DropoutParams, (*sizes, *map(_address, (x, residual, out)))))
    return out


def run_part(part: str, rounds: int, width: int) -> float:
    """Run one of PARTS on tiles in the cache; the number of operations, or of scores."""
    assert not isinstance(_library, str)
    sizes = (PARTS.index(part), rounds, torch.get_num_threads(), width)
    return float(_library.mgk_run_part(*map(ctypes.c_int64, sizes), instruction_set().encode()))


def _pointers(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are given, tensors by their address."""
    return {name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in fields.items() if x is not None}


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _with_dense_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor | None, dims: int = 4) -> Sequence[int]:
    """The strides with which x is expanded, without the time that ``expand`` takes."""
    if x is None or x.ndim == 0:
        return (0,) * dims
    return [stride * (size > 1) for size, stride in zip(x.shape, x.stride())]  # noqa: B905  as many


def _num_threads(work: int) -> int:
    return max(1, min(torch.get_num_threads(), work // WORK_PER_THREAD))


@functools.cache
def _packer(structure: type[ctypes.Structure]) -> struct.Struct:
    kinds = []
    for name, kind, *_ in structure._fields_:
        kinds.append(("d" if kind is ctypes.c_double else "q") * (getattr(structure, name).size // 8))
    return struct.Struct("".join(kinds))


def _pack(structure: type[ctypes.Structure], values: Sequence[Any]) -> bytes:
    """The struct of these values: ctypes takes ten times as long to fill one."""
    return _packer(structure).pack(*values)


@functools.cache
def _function(name: str) -> Callable[[bytes, bytes], int]:
    function: Callable[[bytes, bytes], int] = getattr(_library, f"mgk_{name}")
    return function


_encoded = functools.cache(str.encode)


def _call(name: str, params: bytes) -> None:
    status = _function(name)(params, _encoded(instruction_set()))
    if status == len(_ERRORS):
        raise MemoryError("backend 'cpu' ran out of memory")
    if status:
        raise RuntimeError(f"backend 'cpu' cannot run the call: {_ERRORS[status]}")


def mask_fields(mask: Tensor | None, shape: tuple[int, ...]) -> dict[str, Any]:
    """The mask's fields: expanded by strides of 0, so that it is never copied."""
    if mask is None:
        return {}
    expanded = mask.expand(shape)
    return {"mask": expanded, "mask_is_bool": mask.dtype == torch.bool, "mask_strides": expanded.stride()}


def _segment_fields(segments: Tensor | None) -> dict[str, Tensor]:
    return {} if segments is None else {"segment_starts": segments[0], "segment_ends": segments[1]}


def dropout_fields(seed: Tensor | None, dropout_p: float) -> dict[str, Any]:
    """The seed, and p as a fraction of 2^32."""
    number = 0 if seed is None else int(seed.item())
    return {"dropout_seed": number, "dropout_threshold": round(dropout_p * 2**32)}
