"""Which backend serves a call: the one that is named, or with ``auto`` the fastest one that is exact for it."""

from types import ModuleType

from torch import Tensor

from mgk.functional import reference
from mgk.functional.backends import blockwise, sdpa
from mgk.functional.call import Call

BACKENDS: dict[str, ModuleType] = {module.NAME: module for module in (reference, blockwise, sdpa)}

# Below this many scores (B * H * M * L * S) the set-up of the other backends costs more than the scores themselves.
FEW_SCORES = 2**16


def available_backends() -> dict[str, str]:
    """The backends by name, each "ready" or why it is not."""
    return dict.fromkeys(BACKENDS, "ready")


def choose(call: Call) -> str:
    """The backend that ``auto`` takes, by the first row that holds.

    ==============================================================  =============
    few scores (2^16 at most), or a single query: decoding           ``reference``
    sdpa can serve it (soft, no dropout, no gradient of a mask)      ``sdpa``
    anything else                                                    ``blockwise``
    ==============================================================  =============
    """
    batch, heads, num_queries, _ = call.query.shape
    per_query = batch * heads * call.num_mixtures * call.num_keys
    if num_queries == 1 or per_query * num_queries <= FEW_SCORES:
        return reference.NAME
    return sdpa.NAME if sdpa.refusal(call) is None else blockwise.NAME


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
