"""A pytest plugin that sends every kernel call to a build for AArch64, run by an emulator: see ``make neon``."""

import ctypes
import os
import struct
import subprocess

import torch

from mgk.functional.mixture.backends import cpu_kernels

STRUCTURES = {
    **dict.fromkeys(("forward", "backward", "count"), cpu_kernels.AttentionParams),
    "decode": cpu_kernels.DecodeParams,
    **dict.fromkeys(("mixture_forward", "mixture_backward"), cpu_kernels.MixtureParams),
    "dropout": cpu_kernels.DropoutParams,
}
FUNCTIONS = tuple(STRUCTURES)
_worker = subprocess.Popen(os.environ["MGK_NEON_WORKER"].split(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
_original_data_ptr = torch.Tensor.data_ptr
# By the address that a struct will hold: the memory around it.
_storages: dict[int, torch.UntypedStorage] = {}


def _data_ptr(tensor: torch.Tensor) -> int:
    address = _original_data_ptr(tensor)
    _storages[address] = tensor.untyped_storage()
    return address


def _call(name: str, packed: bytes) -> None:
    assert _worker.stdin is not None
    assert _worker.stdout is not None
    params = STRUCTURES[name].from_buffer_copy(packed)
    size = ctypes.sizeof(params)
    pointers = {
        getattr(type(params), field).offset: getattr(params, field)
        for field, kind in type(params)._fields_
        if kind is ctypes.c_void_p and getattr(params, field)
    }
    storages = {field: _storages[address] for field, address in pointers.items()}
    _worker.stdin.write(
        struct.pack("qq", FUNCTIONS.index(name), size) + bytes(params) + struct.pack("q", len(pointers))
    )
    for field, address in pointers.items():
        start, length = storages[field].data_ptr(), storages[field].nbytes()
        _worker.stdin.write(
            struct.pack("qqq", field, address - start, length) + ctypes.string_at(start, length)
        )
    _worker.stdin.flush()
    (status,) = struct.unpack("q", _worker.stdout.read(8))
    for storage in storages.values():
        ctypes.memmove(storage.data_ptr(), _worker.stdout.read(storage.nbytes()), storage.nbytes())
    _storages.clear()
    assert status == 0, f"mgk_{name} returned {status}"


cpu_kernels._call = _call
torch.Tensor.data_ptr = _data_ptr  # type: ignore[method-assign]
