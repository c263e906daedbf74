"""The self-check of a device: small calls against the equations.

It runs at the first use on a kind of device that has no record, and its verdict is kept in the user's cache folder.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk._util.files import read_json, write_json
from mgk._util.version import __version__
from mgk.functional.validation import is_plain, without_autocast

_logger = logging.getLogger("mgk")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Of outputs and gradients, relative to their norms.
TOLERANCES = {F16: 1e-2, BF16: 4e-2, F32: 1e-4}
_verdicts: dict[str, str] = {}  # by device; "" where the kernels agree with the equations


class Check(NamedTuple):
    """A call, and the largest relative error of its output and gradients."""

    name: str
    dtype: torch.dtype
    error: float

    @property
    def passes(self) -> bool:
        """Whether it agrees with the equations; NaN does not."""
        return self.error <= TOLERANCES[self.dtype]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name} in {dtype}: error {self.error:.1e}, limit {TOLERANCES[self.dtype]:.0e}"


def failure(query: Tensor) -> str | None:
    """What the check of this kind of device found wrong; the first call runs it."""
    device, name = query.device, str(query.device)
    if name not in _verdicts:
        if not is_plain(query) or torch.cuda.is_current_stream_capturing():
            return None  # a check has no place in a graph; the next call outside makes it
        kind = kind_of(device)
        recorded = _read().get(kind)
        if recorded is None:
            _verdicts[name] = ""  # the check's own calls are not checked
            recorded = _run(device, kind)
        _verdicts[name] = recorded
    return _verdicts[name] or None


def kind_of(device: torch.device) -> str:
    """The device and versions that a verdict holds for."""
    import triton

    properties = torch.cuda.get_device_properties(device)
    architecture = getattr(properties, "gcnArchName", f"sm_{properties.major}{properties.minor}")
    versions = f"torch {torch.__version__}, triton {triton.__version__}, mgk {__version__}"
    return f"{properties.name}, {architecture}, {versions}"


def record_path() -> Path:
    """The file of verdicts in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "mgk" / "triton-self-check.json"


def _read() -> dict[str, str]:
    try:
        found = read_json(record_path())
    except (OSError, RuntimeError, ValueError):  # RuntimeError: there is no home folder
        return {}
    return found if isinstance(found, dict) else {}


def _run(device: torch.device, kind: str) -> str:
    _logger.warning("backend 'triton' checks its kernels on %s, once: compiling takes a minute or so", kind)
    try:
        wrong = [str(check) for check in checks(device, quick=True) if not check.passes]
    except Exception as error:  # whatever a compiler or a driver raises, another backend can serve the call
        wrong = [f"{type(error).__name__}: {error}"]
    verdict = f"its self-check failed on this device ({'; '.join(wrong)})" if wrong else ""
    if wrong:
        advice = f"Please report this text with the output of 'mgk doctor': {kind}"
        warnings.warn(f"backend 'triton' is not used: {verdict}. {advice}", stacklevel=2)
    try:
        write_json(record_path(), {**_read(), kind: verdict})
    except (OSError, RuntimeError):
        _logger.warning("the verdict of the self-check cannot be kept")
    return verdict


# By name: the options of a call, and the dtypes that the quick form takes.
_QUICK: dict[str, tuple[dict[str, Any], tuple[torch.dtype, ...]]] = {
    "mgk causal": ({"prior": True, "is_causal": True}, (F16, BF16, F32)),
    "mgk hard": ({"e_step": "hard"}, (BF16,)),
    "smgk": ({"shifted": True, "prior": True}, (F16,)),
    "mlk causal": ({"linear": True, "prior": True, "is_causal": True}, (BF16,)),
}
_LONG: dict[str, dict[str, Any]] = {
    "softmax": {"mixtures": 1, "kernel": "dot"},
    "mgk": {"prior": True},
    "mgk M=4": {"mixtures": 4, "prior": True},
    "mgk D=128": {"width": 128},
    "mgk variance": {"prior": True, "variance": True},
    "mgk mask": {"mask": True, "is_causal": True},
    "mgk window, grouped heads": {"window": (40, 3), "group": 2},
    "mgk segments": {"segments": True, "is_causal": True},
    "mgk decoding": {"num_queries": 1},
    "smgk causal": {"shifted": True, "is_causal": True},
    "smgk hard": {"shifted": True, "e_step": "hard"},
    "smgk M=4": {"shifted": True, "mixtures": 4, "is_causal": True},
    "smgk far": {"shifted": True, "scale": 8.0},
    "smgk decoding": {"shifted": True, "num_queries": 1},
    "mlk": {"linear": True, "width": 128},
    "mlk segments, grouped heads": {"linear": True, "segments": True, "group": 2, "is_causal": True},
    "mlk step": {"linear": True, "num_queries": 1, "num_keys": 1},
}


def checks(device: torch.device, *, quick: bool) -> Iterator[Check]:
    """Small calls at odd sizes; the long form has more options, each in every dtype."""
    calls = [(name, options, dtypes) for name, (options, dtypes) in _QUICK.items()]
    if not quick:
        every = {name: options for name, options, _ in calls} | _LONG
        calls = [(name, options, tuple(TOLERANCES)) for name, options in every.items()]
    for name, options, dtypes in calls:
        for dtype in dtypes:
            with torch.inference_mode(False):
                yield Check(name, dtype, _error(device, dtype, **options))


def _error(
    device: torch.device,
    dtype: torch.dtype,
    *,
    mixtures: int = 2,
    width: int = 64,
    num_queries: int = 150,
    num_keys: int = 200,
    group: int = 1,
    scale: float = 1.0,
    shifted: bool = False,
    prior: bool = False,
    variance: bool = False,
    mask: bool = False,
    segments: bool = False,
    linear: bool = False,
    **options: Any,
) -> float:
    """The largest relative error of output and gradients."""
    generator = torch.Generator("cpu").manual_seed(0)
    batch, heads = 2, 2

    def normal(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return x.to(dtype).to(device)

    inputs = {
        "query": normal(batch, heads * group, num_queries, width) * scale,
        "keys": normal(batch, heads, 1 if shifted else mixtures, num_keys, width),
        "value": normal(batch, heads, num_keys, width),
    }
    if shifted:
        inputs["key"] = inputs.pop("keys").squeeze(2)
        inputs["shifts"] = normal(heads, mixtures, width) * scale
    if prior:
        inputs["log_prior"] = normal(1, heads, mixtures, 1).log_softmax(2)
    if variance:
        inputs["variance"] = normal(1, heads, mixtures, 1).exp() * width**0.5
    if mask:
        inputs["attn_mask"] = normal(batch, 1, num_queries, num_keys)
    if segments:
        ids = torch.arange(num_keys, device=device) // 60
        options["segment_ids"] = ids.expand(batch, -1)
    grad = normal(batch, heads * group, num_queries, width)
    function = "linear" if linear else "shifted" if shifted else "mixture"
    results = [_call(function, inputs, grad, name, options) for name in ("triton", "reference")]
    errors = [(x.double() - y).norm() / y.norm() for x, y in zip(*results, strict=True)]
    return float(torch.stack(errors).max())


def _call(
    name: str, inputs: dict[str, Tensor], grad: Tensor, backend: str, options: dict[str, Any]
) -> list[Tensor]:
    """The output and the gradients of one call; those of the reference from float64."""
    from mgk.functional.linear.api import linear_mixture_attention
    from mgk.functional.mixture.api import mixture_attention, shifted_mixture_attention

    functions: dict[str, Any] = {
        "linear": linear_mixture_attention,
        "mixture": mixture_attention,
        "shifted": shifted_mixture_attention,
    }
    dtype = torch.float64 if backend == "reference" else grad.dtype
    is_decoding = grad.shape[2] == 1
    leaves = {name: x.to(dtype).requires_grad_(not is_decoding) for name, x in inputs.items()}
    with torch.enable_grad(), without_autocast(grad):
        out = functions[name](**leaves, **options, backend=backend)
        if is_decoding:
            return [out]
        return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad.to(dtype))]
