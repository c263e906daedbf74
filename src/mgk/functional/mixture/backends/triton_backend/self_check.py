"""The self-check of the kernels on a device: outputs and gradients of small calls against the equations.

It runs at the first use on a kind of device that has no record, and its verdict is kept in the user's cache folder.
"""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk._util.files import write_json

_logger = logging.getLogger("mgk")
# Of outputs and gradients, relative to their norms.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
_verdicts: dict[str, str] = {}  # by device; "" where the kernels agree with the equations


class Check(NamedTuple):
    """One call of the self-check, and the largest relative error of its output and gradients."""

    name: str
    dtype: torch.dtype
    error: float

    @property
    def passes(self) -> bool:
        """Whether it agrees with the equations; NaN does not."""
        return self.error <= TOLERANCES[self.dtype]


def failure(device: torch.device) -> str | None:
    """What the check of this kind of device found wrong, or None; the first time it runs the check."""
    name = str(device)
    if name not in _verdicts:
        if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
            return None  # a check has no place in a graph; the next call outside makes it
        kind = kind_of(device)
        recorded = _read().get(kind)
        if recorded is None:
            _verdicts[name] = ""  # the check's own calls are not checked
            recorded = _run(device, kind)
        _verdicts[name] = recorded
    return _verdicts[name] or None


def kind_of(device: torch.device) -> str:
    """The device, and the versions that made its code: what a verdict holds for."""
    from importlib.metadata import version

    import triton

    properties = torch.cuda.get_device_properties(device)
    architecture = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
    versions = f"torch {torch.__version__}, triton {triton.__version__}, mgk {version('mgk')}"
    return f"{properties.name}, {architecture}, {versions}"


def record_path() -> Path:
    """The file of verdicts in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mgk" / "triton-self-check.json"


def _read() -> dict[str, str]:
    try:
        found = json.loads(record_path().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _run(device: torch.device, kind: str) -> str:
    _logger.info("backend 'triton': checking its kernels on %s, once", kind)
    try:
        wrong = [
            f"{x.name} in {x.dtype}: error {x.error:.1e}" for x in checks(device, quick=True) if not x.passes
        ]
    except Exception as error:  # whatever a compiler or a driver raises, another backend can serve the call
        wrong = [f"{type(error).__name__}: {error}"]
    verdict = f"its self-check failed on this device ({'; '.join(wrong)})" if wrong else ""
    if wrong:
        warnings.warn(
            f"backend 'triton' is not used: {verdict}. Please report this text with the output of 'mgk doctor': {kind}",
            stacklevel=2,
        )
    try:
        write_json(record_path(), {**_read(), kind: verdict})
    except OSError:
        _logger.info("the verdict cannot be kept in %s", record_path())
    return verdict


_QUICK: dict[str, dict[str, Any]] = {
    "softmax": {"mixtures": 1, "kernel": "dot"},
    "mgk": {"prior": True},
    "mgk causal": {"prior": True, "is_causal": True},
    "mgk hard": {"e_step": "hard"},
    "smgk": {"shifted": True, "prior": True, "is_causal": True},
}
_LONG: dict[str, dict[str, Any]] = {
    "mgk M=4": {"mixtures": 4, "prior": True},
    "mgk D=128": {"width": 128},
    "mgk variance": {"prior": True, "variance": True},
    "mgk mask": {"mask": True, "is_causal": True},
    "smgk hard": {"shifted": True, "e_step": "hard"},
    "smgk M=4": {"shifted": True, "mixtures": 4, "is_causal": True},
}


def checks(device: torch.device, *, quick: bool) -> Iterator[Check]:
    """Small calls at odd sizes in every dtype; the long form has more options."""
    for name, options in (_QUICK if quick else _QUICK | _LONG).items():
        for dtype in TOLERANCES:
            yield Check(name, dtype, _error(device, dtype, **options))


def _error(
    device: torch.device,
    dtype: torch.dtype,
    *,
    mixtures: int = 2,
    width: int = 64,
    shifted: bool = False,
    prior: bool = False,
    variance: bool = False,
    mask: bool = False,
    **options: Any,
) -> float:
    """The largest relative error of output and gradients."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, num_queries, num_keys = 2, 2, 150, 200

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    components = (batch, heads, 1 if shifted else mixtures, num_keys, width)
    inputs = {
        "query": normal(batch, heads, num_queries, width),
        "keys": normal(*components),
        "value": normal(batch, heads, num_keys, width),
    }
    if shifted:
        inputs["key"] = inputs.pop("keys").squeeze(2)
        inputs["shifts"] = normal(heads, mixtures, width)
    if prior:
        inputs["log_prior"] = normal(1, heads, mixtures, 1).log_softmax(2)
    if variance:
        inputs["variance"] = normal(1, heads, mixtures, 1).exp() * width**0.5
    if mask:
        inputs["attn_mask"] = normal(batch, 1, num_queries, num_keys)
    grad = normal(batch, heads, num_queries, width)
    results = [_call(inputs, grad, name, options) for name in ("triton", "reference")]
    return max(float((x.double() - y).norm() / y.norm()) for x, y in zip(*results, strict=True))


def _call(inputs: dict[str, Tensor], grad: Tensor, backend: str, options: dict[str, Any]) -> list[Tensor]:
    """The output and the gradients of one call; those of the reference from float64."""
    from mgk.functional.mixture.api import mixture_attention, shifted_mixture_attention

    dtype = torch.float64 if backend == "reference" else grad.dtype
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    function: Any = shifted_mixture_attention if "shifts" in leaves else mixture_attention
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        out = function(**leaves, **options, backend=backend)
        gradients = torch.autograd.grad(out, list(leaves.values()), grad.to(dtype))
    return [out.detach(), *gradients]
