"""The compiled kernels of ``mgk/csrc``, through ctypes: where they are, and which instruction set runs."""

import ctypes
import functools
import itertools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgk.functional.mixture.features import Options, ScoreFeatures

# Selects an instruction set; one that the processor lacks is an error. Read once, at the first call.
INSTRUCTION_SET_VARIABLE = "MGK_INSTRUCTION_SET"
# Names a folder with another build of the library, such as the one of ``make sanitize``.
FOLDER_VARIABLE = "MGK_KERNELS_FOLDER"
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
        *_fields("batch_size num_heads num_components num_queries num_keys num_features value_width", ctypes.c_int64),
        *_fields("is_shared is_hard is_causal is_double num_threads", ctypes.c_int64),
        *_fields("query keys query_bias key_bias value mask", ctypes.c_void_p),
        ("mask_is_bool", ctypes.c_int64),
        ("mask_strides", ctypes.c_int64 * 4),
        ("dropout_seed", ctypes.c_uint64),
        ("dropout_threshold", ctypes.c_int64),
        *_fields("out row_max row_sum grad", ctypes.c_void_p),
        *_fields("d_query d_keys d_query_bias d_key_bias d_score_affine d_value", ctypes.c_void_p),
        *_fields("query_weight counts", ctypes.c_void_p),
    )


class DecodeParams(ctypes.Structure):
    """The struct of the same name in csrc/params.h."""

    _fields_ = (
        *_fields("batch_size num_heads num_components num_keys key_width value_width", ctypes.c_int64),
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
        ("out", ctypes.c_void_p),
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
    advice = "install a C++ compiler such as g++, then reinstall mgk"
    if not files:
        return f"not built: there was no C++ compiler when mgk was installed; {advice}"
    try:
        library = ctypes.CDLL(str(files[0]))
    except OSError as error:
        return f"not loadable ({error}); {advice}"
    other_version = "built for another version of mgk"
    try:
        library.mgk_struct_layout.restype = library.mgk_supported_sets.restype = ctypes.c_char_p
        library.mgk_max_components.restype = ctypes.c_int64
    except AttributeError as error:
        return f"{other_version} ({error}); {advice}"
    wanted, built = _struct_layout(AttentionParams, DecodeParams), library.mgk_struct_layout().decode().splitlines()
    for ours, theirs in itertools.zip_longest(wanted, built, fillvalue="nothing"):
        if ours != theirs:
            return f"{other_version} (it has {theirs} in place of {ours}); {advice}"
    return library


_library = _load(Path(os.environ.get(FOLDER_VARIABLE) or Path(__file__).parents[3]))
# A string constant, which torch.compile can read: "ready", or why not.
STATUS = _library if isinstance(_library, str) else "ready"
# The largest number of components that the kernels have room for; 0 without them.
MAX_COMPONENTS: int = 0 if isinstance(_library, str) else _library.mgk_max_components()


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
        raise ValueError(f"{INSTRUCTION_SET_VARIABLE} must be one of {', '.join(supported)} here, got {wanted!r}")
    return wanted


def run(name: str, features: ScoreFeatures, options: Options, **fields: Any) -> None:
    """Call ``mgk_{name}``; tensors among the fields are contiguous and alive until it returns."""
    query, keys, query_bias, key_bias, _ = features
    batch, heads, components, num_keys = key_bias.shape
    num_queries, num_features = query.shape[2:]
    fields |= {"query": query, "keys": keys, "query_bias": query_bias, "key_bias": key_bias}
    params = AttentionParams(
        batch_size=batch,
        num_heads=heads,
        num_components=components,
        num_queries=num_queries,
        num_keys=num_keys,
        num_features=num_features,
        is_shared=query_bias is not None,
        is_hard=options.is_hard,
        is_causal=options.is_causal,
        is_double=query.dtype == torch.float64,
        num_threads=_num_threads(key_bias.numel() * num_queries * num_features),
        **_pointers(fields),
    )
    _call(name, params)


def counts(
    features: ScoreFeatures, mask: Tensor | None, query_mask: Tensor | None, is_hard: bool, is_causal: bool
) -> Tensor:
    """N_jr = sum_i gamma_ijr (B, H, M, S), over the queries of ``query_mask`` (B, L)."""
    features = contiguous(features)
    out = torch.empty_like(features.key_bias)
    weight = None if query_mask is None else query_mask.to(out.dtype).contiguous()
    fields = mask_fields(mask, (*features.query.shape[:3], features.key_bias.shape[3]))
    run("count", features, Options(is_hard, is_causal, 0.0), **fields, query_weight=weight, counts=out)
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
) -> Tensor:
    """The output (B, H, 1, E) of one query, reading keys and values in place."""
    batch, heads, _, num_keys, width = keys.shape
    components = keys.shape[2] if shifts is None else shifts.shape[1]
    scores = (batch, heads, components, num_keys)
    keys, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (keys, value))
    out = value.new_empty(batch, heads, 1, value.shape[-1])
    tensors = {
        "query": query.contiguous(),
        "shifts": None if shifts is None else shifts.contiguous(),
        "keys": keys,
        "value": value,
        "log_prior": None if log_prior is None else log_prior.expand(scores),
        "variance": variance.expand(scores),
        "mask": None if mask is None else mask.expand(batch, heads, 1, num_keys)[:, :, 0],
        "out": out,
    }
    strides = {"key_strides": keys.stride()[:4], "value_strides": value.stride()[:3]}
    for name in ("log_prior", "variance", "mask"):
        if (tensor := tensors[name]) is not None:
            strides[f"{name}_strides"] = tensor.stride()
    params = DecodeParams(
        batch_size=batch,
        num_heads=heads,
        num_components=components,
        num_keys=num_keys,
        key_width=width,
        value_width=value.shape[-1],
        is_dot=is_dot,
        is_hard=is_hard,
        is_double=query.dtype == torch.float64,
        num_threads=_num_threads(keys.numel()),
        mask_is_bool=mask is not None and mask.dtype == torch.bool,
        **strides,
        **_pointers(tensors),
    )
    _call("decode", params)
    return out


def _pointers(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are given, tensors by their address."""
    return {name: x.data_ptr() if isinstance(x, Tensor) else x for name, x in fields.items() if x is not None}


def _num_threads(work: int) -> int:
    return max(1, min(torch.get_num_threads(), work // WORK_PER_THREAD))


def _call(name: str, params: ctypes.Structure) -> None:
    assert not isinstance(_library, str)
    status = getattr(_library, f"mgk_{name}")(ctypes.byref(params), instruction_set().encode())
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


def dropout_fields(seed: Tensor | None, dropout_p: float) -> dict[str, Any]:
    """The seed, and p as a fraction of 2^32."""
    return {} if seed is None else {"dropout_seed": int(seed.item()), "dropout_threshold": round(dropout_p * 2**32)}
