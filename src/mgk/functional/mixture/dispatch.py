"""Which backend serves a call: the one that is named, or with ``auto`` the fastest one that is exact for it."""

from types import ModuleType

from torch import Tensor

from mgk.functional.mixture import reference
from mgk.functional.mixture.backends import blockwise, cpu, cpu_kernels, sdpa
from mgk.functional.mixture.inputs import Call

BACKENDS: dict[str, ModuleType] = {module.NAME: module for module in (reference, blockwise, sdpa, cpu)}

# Below this many scores (B * H * M * L * S) the set-up of the other backends costs more than the scores themselves.
FEW_SCORES = 2**16


def available_backends() -> dict[str, str]:
    """The backends by name, each "ready" or why it is not."""
    return {name: cpu_kernels.STATUS if name == cpu.NAME else "ready" for name in BACKENDS}


def choose(call: Call) -> str:
    """The backend that ``auto`` takes: the first of these that can serve the call.

    - a single query without gradients (decoding), where ``cpu`` can: ``cpu``
    - few scores (2^16 at most): ``reference``
    - on the CPU, when the kernels are built and no mask needs a gradient: ``cpu``
    - a single query: ``reference``
    - a soft E-step without dropout, no mask needs a gradient, and on the CPU no variance does: ``sdpa``
    - anything else: ``blockwise``
    """
    if cpu.can_decode(call):
        return cpu.NAME
    batch, heads, num_queries, _ = call.query.shape
    per_query = batch * heads * call.num_mixtures * call.num_keys
    if per_query * num_queries <= FEW_SCORES:
        return reference.NAME
    if cpu.refusal(call) is None:
        return cpu.NAME
    if num_queries == 1:
        return reference.NAME
    return sdpa.NAME if sdpa.refusal(call) is None and not sdpa.takes_float64(call) else blockwise.NAME


def attention(call: Call, backend: str) -> Tensor:
    """The call served by the named backend, in the dtype of its query."""
    if backend == "auto":
        backend = choose(call)
    module = BACKENDS.get(backend)
    if module is None:
        raise ValueError(f"backend must be one of {', '.join(map(repr, ('auto', *BACKENDS)))}, got {backend!r}")
    reason = module.refusal(call)
    if reason is not None:
        raise ValueError(f"backend {backend!r} cannot serve this call: {reason}; use backend='auto'")
    if 0 in call.query.shape or 0 in call.value.shape:
        return _empty(call)
    return module.attention(call).to(call.query.dtype)


def _empty(call: Call) -> Tensor:
    """Without queries, keys or a batch there is nothing to attend to: zeros."""
    return call.query.sum(-1, keepdim=True).mul(0.0).expand(*call.query.shape[:3], call.value.shape[-1])
