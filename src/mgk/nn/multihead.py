"""Mixture attention in place of ``torch.nn.MultiheadAttention``."""

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from mgk.functional import masks, validation
from mgk.functional.linear.feature_maps import FeatureMap
from mgk.nn.attention import MixtureAttention
from mgk.variants import EStep, Kernel, Variant


class MixtureOptions(TypedDict, total=False):
    """Options that ``nn.MultiheadAttention`` does not have."""

    variant: Variant
    head_dim: int | None
    num_mixtures: int
    kernel: Kernel
    e_step: EStep
    prior: str | nn.Module
    variance: str | nn.Module
    feature_map: FeatureMap
    init: str | float
    backend: str


class _NoFastPath:
    """Takes the place of a weight, so that ``nn.TransformerEncoderLayer`` does not fuse."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented


class MultiheadMixtureAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(H_1, ..., H_H) W_O (Eq. 3), as ``nn.MultiheadAttention``.

    Arguments, shapes, the polarity of masks (True is left out) and the returned pair are
    those of ``nn.MultiheadAttention``. Three things differ: a query with no key left gets
    zeros, not NaN; weights are those before dropout; ``is_causal`` needs no ``attn_mask``.
    New code is better served by :class:`MixtureAttention`, which is its ``attention``.

    Args:
        dropout: Of attention weights; not for the linear variants.
        options: Of :class:`MixtureAttention`: those of :class:`MixtureOptions`.
    """

    # nn.TransformerEncoder's fused path would bypass this module
    _qkv_same_embed_dim = False
    in_proj_weight = in_proj_bias = _NoFastPath()

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[MixtureOptions],
    ) -> None:
        super().__init__()
        for name in options.keys() - MixtureOptions.__annotations__.keys():
            raise TypeError(f"{name} is no option of MultiheadMixtureAttention")
        validation.flag("add_bias_kv", add_bias_kv)
        validation.flag("add_zero_attn", add_zero_attn)
        validation.flag("batch_first", batch_first)
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        validation.positive_ints(kdim=self.kdim, vdim=self.vdim)
        self.batch_first, self.add_zero_attn = batch_first, add_zero_attn
        self.attention = MixtureAttention(embed_dim, num_heads, dropout=dropout, bias=bias, **options)
        inner = self.attention
        self.head_dim = inner.head_dim
        if self.kdim != embed_dim:
            inner.k_proj = nn.Linear(self.kdim, inner.k_proj.out_features, bias=bias)
        if self.vdim != embed_dim:
            inner.v_proj = nn.Linear(self.vdim, inner.v_proj.out_features, bias=bias)
        self.bias_k: nn.Parameter | None = None
        self.bias_v: nn.Parameter | None = None
        if add_bias_kv:
            sizes = (num_heads, inner.keys_per_token, 1, self.head_dim)
            self.bias_k = nn.Parameter(torch.empty(sizes))
            self.bias_v = nn.Parameter(torch.empty(num_heads, 1, self.head_dim))
        self.reset_parameters()
        self.to(device=device, dtype=dtype)

    @property
    def out_proj(self) -> nn.Linear:
        """W_O."""
        return self.attention.o_proj

    def reset_parameters(self) -> None:
        """As :class:`MixtureAttention`; an added key and value are normal."""
        self.attention.reset_parameters()
        for parameter in (self.bias_k, self.bias_v):
            if parameter is not None:
                nn.init.normal_(parameter, std=self.embed_dim**-0.5)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, shaped as ``query``, and the weights or None.

        Args:
            query: (L, B, embed_dim), (L, embed_dim), or with ``batch_first`` (B, L, embed_dim).
            key: (S, B, kdim), likewise.
            value: (S, B, vdim), likewise.
            key_padding_mask: (B, S) or (S,): bool, **True is left out**, or additive.
            need_weights: Return the weights too.
            attn_mask: (L, S) or (B * H, L, S): bool, **True is left out**, or additive. The linear
                variants take a causal one only, named so by ``is_causal``.
            average_attn_weights: Return (B, L, S), the mean over heads, not (B, H, L, S).
            is_causal: ``attn_mask``, if there is one, is the causal mask.
        """
        is_self = key is query
        is_batched = isinstance(query, Tensor) and query.ndim == 3
        given = {"query": query, "key": key, "value": value}
        query, key, value = (self._batch_first(name, x) for name, x in given.items())
        inner = self.attention
        batch, length, size = query.shape[0], query.shape[1], key.shape[1]
        key_mask, bias = self._key_mask(key_padding_mask, batch, size)
        if key_mask is not None:
            key, value = (masks.without_dead(x, key_mask) for x in (key, value))
            query = key if is_self else query
        heads = inner.project(query, context=key, values=value)
        mask = self._attn_mask(attn_mask, batch, length, size)
        if is_causal and length == size:
            mask = None  # the kernels know this one
        elif is_causal and mask is None:
            wanted = "as many keys as queries"
            raise ValueError(f"is_causal without attn_mask needs {wanted}, got {size} and {length}")
        else:
            is_causal = False
        if bias is not None:
            mask = bias if mask is None else _add(mask, bias)
        query_mask = key_mask if is_self else None
        heads, key_mask, mask, is_causal = self._append(heads, key_mask, mask, is_causal)
        out, weights = inner.attend(
            *heads,
            key_mask=key_mask,
            query_mask=query_mask,
            attn_mask=mask,
            is_causal=is_causal,
            need_weights=need_weights,
        )
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not is_batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def extra_repr(self) -> str:
        """The options that the module inside does not have."""
        return f"batch_first={self.batch_first}, kdim={self.kdim}, vdim={self.vdim}"

    def _batch_first(self, name: str, x: Any) -> Tensor:
        """(B, L, C), of the query, key or value."""
        widths = {"query": "embed_dim", "key": "kdim", "value": "vdim"}
        dims = "BLC" if self.batch_first else "LBC"
        if isinstance(x, Tensor) and x.ndim == 2:
            x, dims = x.unsqueeze(0), "BLC"
        validation.tensor(name, x, dims)
        validation.size(name, x, 2, getattr(self, widths[name]), widths[name])
        self.attention.check_dtype(name, x)
        return x if dims == "BLC" else x.transpose(0, 1)

    def _key_mask(self, mask: Any, batch: int, size: int) -> tuple[Tensor | None, Tensor | None]:
        """The keys that take part (B, S), and their addend (B, 1, 1, S)."""
        if mask is None:
            return None, None
        mask = mask.unsqueeze(0) if isinstance(mask, Tensor) and mask.ndim == 1 else mask
        name, wanted = "key_padding_mask", (batch, size)
        if not isinstance(mask, Tensor) or tuple(mask.shape) != wanted:
            got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(f"{name} must be a tensor of shape (B, S) = {wanted}, got {got}")
        if mask.dtype == torch.bool:
            return ~mask, None
        if not mask.is_floating_point():
            kinds = "bool (True is left out) or an additive float"
            raise TypeError(f"{name} must be {kinds}, got {mask.dtype}")
        # nn.TransformerEncoderLayer turns every bool mask into 0 and -inf
        key_mask = masks.admitted(mask)
        bias = mask.masked_fill(~key_mask, 0.0)
        if torch.compiler.is_compiling():
            return key_mask, None if self.attention.is_linear else bias[:, None, None]
        if not bool(bias.any()):
            return key_mask, None
        if self.attention.is_linear:
            variant = f"variant={self.attention.variant!r}"
            kinds = f"bool, or 0 and -inf, for {variant}"
            raise ValueError(f"{name} must be {kinds}: it has no scores to add to")
        return key_mask, bias[:, None, None]

    def _attn_mask(self, mask: Any, batch: int, length: int, size: int) -> Tensor | None:
        """The mask (B or 1, H or 1, L, S), in which True takes part."""
        if mask is None:
            return None
        wanted = {2: (length, size), 3: (batch * self.num_heads, length, size)}
        if not isinstance(mask, Tensor) or tuple(mask.shape) != wanted.get(mask.ndim):
            got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            shapes = f"(L, S) = {wanted[2]} or (B * H, L, S) = {wanted[3]}"
            raise ValueError(f"attn_mask must be a tensor of shape {shapes}, got {got}")
        mask = mask.unflatten(0, (batch, -1)) if mask.ndim == 3 else mask[None, None]
        return ~mask if mask.dtype == torch.bool else mask

    def _append(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        key_mask: Tensor | None,
        mask: Tensor | None,
        is_causal: bool,
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None, bool]:
        """Keys, values and masks with the added positions, which every query sees."""
        query, keys, value = heads
        added = int(self.bias_k is not None) + int(self.add_zero_attn)
        if not added:
            return heads, key_mask, mask, is_causal
        if is_causal:
            if self.attention.is_linear:
                variant = self.attention.variant
                raise ValueError(f"is_causal cannot be used with added keys for variant={variant!r}")
            causal = masks.KeyRange(right=0).mask(query.shape[2], keys.shape[3], query.device)
            mask = masks.join(mask, causal)
        if self.bias_k is not None and self.bias_v is not None:
            key, last = (x.to(keys.dtype).expand(len(keys), *x.shape) for x in (self.bias_k, self.bias_v))
            keys, value = torch.cat([keys, key], 3), torch.cat([value, last], 2)
        if self.add_zero_attn:
            keys, value = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (keys, value))
        if key_mask is not None:
            key_mask = nn.functional.pad(key_mask, (0, added), value=True)
        if mask is not None:
            sees = True if mask.dtype == torch.bool else 0.0
            mask = nn.functional.pad(mask.expand(-1, -1, query.shape[2], -1), (0, added), value=sees)
        return (query, keys, value), key_mask, mask, False


def _add(mask: Tensor, bias: Tensor) -> Tensor:
    """An additive mask of both."""
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, -torch.inf)
    dtype = torch.promote_types(torch.promote_types(mask.dtype, bias.dtype), torch.float32)
    return masks.add(mask.to(dtype), bias.to(dtype))
