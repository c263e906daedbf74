"""Ring attention: each rank holds its part of the sequence, and keys travel round.

Rank r computes the attention of its queries over the keys that it holds, sends them to
rank r + 1 and merges the pieces by their log-sum-exp (``merge_attention``). The backward
sends the keys round once more, with the sums of their gradients. Memory: two parts of
keys and values. Traffic of a rank, during the attention of the part before: P - 1 parts
forward, P - 1 parts and P of their gradients backward.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from mgk.functional import merge_attention, mixture_attention, shifted_mixture_attention, validation
from mgk.functional.mixture.inputs import compute_dtype, validate_inputs
from mgk.parallel.sharding import place
from mgk.variants import EStep, Kernel


def ring_attention(
    query: Tensor,
    keys: Tensor,
    value: Tensor,
    log_prior: Tensor | None = None,
    *,
    shifts: Tensor | None = None,
    variance: float | Tensor | None = None,
    kernel: Kernel = "gaussian",
    e_step: EStep = "soft",
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    r"""h_i = sum_j A_ij v_j (Eq. 9, 10) over the keys of all ranks.

    Every rank calls it with equal sizes. The result and, in the sum over ranks, every
    gradient are those of one process with the whole sequence. There are no windows,
    segments, masks of pairs and dropout.

    Args:
        query: (B, Hq, L, D), this rank's part, as all tensors of positions.
        keys: (B, H, M, S, D); with ``shifts`` (B, H, S, D).
        shifts: b_r (H, M, D), the same on every rank: k_jr = k_j + b_r.
        is_causal: of the whole sequence; the parts, of even length L = S, are those of
            :func:`shard_sequence` with ``zigzag=True``.
        key_mask: bool (B, S), True takes part.
        group: of the ranks; None: all processes.

    Returns:
        (B, Hq, L, E); other arguments: :func:`mgk.mixture_attention`.
    """
    has_one_key = shifts is not None and isinstance(keys, Tensor) and keys.ndim == 4
    key = keys.unsqueeze(2) if has_one_key else keys
    options: dict[str, Any] = {"kernel": kernel, "e_step": e_step, "shifts": shifts}
    options["is_causal"] = is_causal
    validation.tensor("value", value, "BHSE")
    if shifts is None:
        validate_inputs(query, key, value, log_prior=log_prior, variance=variance, **options)
    mask = validation.token_mask("key_mask", key_mask, query, key.shape[3], "BS")
    rank, ranks = place(group)
    if is_causal and ranks > 1 and (query.shape[2] != key.shape[3] or query.shape[2] % 2):
        sizes = f"{query.shape[2]} queries and {key.shape[3]} keys"
        wanted = "parts of one even length, as shard_sequence gives them"
        raise ValueError(f"is_causal needs {wanted}, got {sizes}")
    ring = _Ring(rank, ranks, group, kernel, e_step, is_causal)
    number, of_keys = (None, variance) if isinstance(variance, Tensor) else (variance, None)
    held = _Held(keys, value, log_prior, shifts, of_keys, mask)
    if ranks == 1:
        return ring.attend(_Piece(slice(None), slice(None), is_causal), query, held, number)[0]
    out: Tensor = _RingAttention.apply(ring, number, query, *held)
    return out


class _Held(NamedTuple):
    """What travels round; None where it is not given."""

    keys: Tensor
    value: Tensor
    log_prior: Tensor | None
    shifts: Tensor | None
    variance: Tensor | None
    mask: Tensor | None  # bool (B, S)

    def part(self, positions: slice) -> "_Held":
        """The part at some positions."""

        def cut(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.ndim < 4 or x.shape[3] == 1 else x[..., positions]

        mask = None if self.mask is None else self.mask[:, positions]
        rest = (cut(self.log_prior), self.shifts, cut(self.variance), mask)
        return _Held(self.keys[..., positions, :], self.value[:, :, positions], *rest)


class _Piece(NamedTuple):
    """The pairs with another rank's keys that causality leaves."""

    queries: slice
    keys: slice
    is_causal: bool


class _Ring(NamedTuple):
    """This rank's place, and the options of the call."""

    rank: int
    ranks: int
    group: ProcessGroup | None
    kernel: Kernel
    e_step: EStep
    is_causal: bool

    def piece(self, owner: int, length: int) -> _Piece:
        """Rank r has the chunks r and 2 P - 1 - r."""
        whole, half = slice(None), length // 2
        if not self.is_causal or owner == self.rank:
            return _Piece(whole, whole, self.is_causal)
        if owner < self.rank:
            return _Piece(whole, slice(0, half), False)
        return _Piece(slice(half, None), whole, False)

    def attend(self, piece: _Piece, query: Tensor, held: _Held, number: float | None) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a piece."""
        keys, value, log_prior, shifts, variance, mask = held.part(piece.keys)
        options: dict[str, Any] = {"kernel": self.kernel, "e_step": self.e_step}
        options |= {"is_causal": piece.is_causal, "return_lse": True}
        options["variance"] = number if variance is None else variance
        options["attn_mask"] = None if mask is None else mask[:, None, None]
        query = query[:, :, piece.queries]
        if shifts is None:
            return mixture_attention(query, keys, value, log_prior, **options)
        return shifted_mixture_attention(query, keys, shifts, value, log_prior, **options)

    def send(self, tensors: Sequence[Tensor | None]) -> "_Transfer":
        """Hand tensors to the next rank; receive those of the one before."""
        return _Transfer(self, tensors)


class _Transfer:
    """Tensors under way round the ring."""

    def __init__(self, ring: _Ring, tensors: Sequence[Tensor | None]) -> None:
        sent = [None if x is None else x.contiguous() for x in tensors]
        self._received = [None if x is None else torch.empty_like(x) for x in sent]
        peers = [(ring.rank + step) % ring.ranks for step in (1, -1)]
        if ring.group is not None:
            peers = [distributed.get_global_rank(ring.group, peer) for peer in peers]
        pairs = ((distributed.isend, sent, peers[0]), (distributed.irecv, self._received, peers[1]))
        operations = [
            distributed.P2POp(function, _as_bytes(x), peer, ring.group)
            for function, some, peer in pairs
            for x in some
            if x is not None
        ]
        self._sent = sent  # alive until it has arrived
        self._requests = distributed.batch_isend_irecv(operations)

    def wait(self) -> list[Tensor | None]:
        """What the rank before has sent."""
        for request in self._requests:
            request.wait()
        return self._received


def _as_bytes(x: Tensor) -> Tensor:
    """A mask as whole numbers: not every transport knows bool."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


class _RingAttention(torch.autograd.Function):
    """The loop round the ring, and the one back with gradients."""

    @staticmethod
    def forward(ctx: Any, ring: _Ring, number: float | None, query: Tensor, *tensors: Any) -> Tensor:
        out = query.new_zeros(*query.shape[:3], tensors[1].shape[-1], dtype=compute_dtype(query))
        lse = out.new_full(query.shape[:3], -torch.inf)
        held = _Held(*tensors)
        for step in range(ring.ranks):
            transfer = ring.send(held) if step < ring.ranks - 1 else None
            piece = ring.piece((ring.rank - step) % ring.ranks, query.shape[2])
            rows = piece.queries
            part, part_lse = ring.attend(piece, query, held, number)
            earlier = out[:, :, rows], lse[:, :, rows]
            merged = merge_attention([earlier, (part.to(out.dtype), part_lse)])
            out[:, :, rows], lse[:, :, rows] = merged
            if transfer is not None:
                held = _Held(*transfer.wait())  # type: ignore[arg-type]
        ctx.ring, ctx.number = ring, number
        ctx.save_for_backward(query, out, lse, *tensors)
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ring: _Ring = ctx.ring
        query, out, lse, *tensors = ctx.saved_tensors
        grad, d_query = grad.to(out.dtype), torch.zeros_like(query, dtype=out.dtype)
        held: list[Tensor | None] = list(tensors)
        sums = [
            x if x is None or not x.is_floating_point() else torch.zeros_like(x, dtype=out.dtype) for x in held
        ]
        sums[5] = None  # a mask has no gradient
        for step in range(ring.ranks):
            transfer = ring.send(held) if step < ring.ranks - 1 else None
            piece = ring.piece((ring.rank - step) % ring.ranks, query.shape[2])
            rows = piece.queries
            with torch.enable_grad():
                leaves = [None if x is None else x.detach().requires_grad_(x.is_floating_point()) for x in held]
                leaf = query.detach().requires_grad_()
                part = ring.attend(piece, leaf, _Held(*leaves), ctx.number)  # type: ignore[arg-type]
            gradients = _piece_gradients(part, grad[:, :, rows], out[:, :, rows], lse[:, :, rows])
            wanted = [leaf, *(x for x in leaves if x is not None and x.requires_grad)]
            found = list(torch.autograd.grad(part, wanted, gradients, allow_unused=True))
            d_query += found.pop(0)
            for at, x in enumerate(leaves):
                if x is not None and x.requires_grad and (of_x := found.pop(0)) is not None:
                    sums[at] = sums[at] + of_x.to(out.dtype)  # type: ignore[operator]
            if transfer is not None:
                held = transfer.wait()
            sums = ring.send(sums).wait()
        d_held = (None if x is None else x.to(t.dtype) for x, t in zip(sums, tensors, strict=True))
        return None, None, d_query.to(query.dtype), *d_held


def _piece_gradients(
    part: tuple[Tensor, Tensor], grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """w_c g and w_c g . (h_c - h), w_c = exp(lse_c - lse).

    They are the gradients of h_c and lse_c in h = sum_c w_c h_c.
    """
    part_out, part_lse = (x.detach().to(out.dtype) for x in part)
    is_empty = part_lse == -torch.inf
    exponent = part_lse.masked_fill(is_empty, 0.0) - lse.masked_fill(is_empty, 0.0)
    weight = exponent.exp().masked_fill(is_empty, 0.0)
    d_lse = weight * (grad * (part_out - out)).sum(-1)
    return (weight.unsqueeze(-1) * grad).to(part[0].dtype), d_lse.to(part[1].dtype)
