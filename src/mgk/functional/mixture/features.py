"""The score of a pair as a product of features, and the operators that use them.

    s_ijr = query_i . keys_jr + query_bias_ir + key_bias_jr

up to a term of i alone, which cancels in the softmax. Gaussian kernel, expanded about
the mean key c (identity 1), x = q - c, y = k - c:

    -|q - k|^2 / (2 sigma^2) = (x.y - |y|^2 / 2 - |x|^2 / 2) / sigma^2

The last term is of i alone if sigma is common; otherwise the part that components do
not share is one more feature. Shifts enter the two biases (identity 2).

A variance and a prior shared by the positions of a component are a factor and an
addend of its scores, a_ir s_ijr + b_ir with a = 1, b = 0. Their gradients are sums
over the scores, more precise than through the features, which nearly cancel.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mgk.functional.backends import Backend, define_operator, library
from mgk.functional.masks import KeyRange
from mgk.functional.mixture.inputs import LOG_ZERO, AttentionInputs, finest_dtype
from mgk.functional.validation import needs_grad, without_autocast


class ScoreFeatures(NamedTuple):
    """s_ijr = query_i . keys_jr + query_bias_ir + key_bias_jr."""

    query: Tensor  # (B, Hq, L, F)
    keys: Tensor  # (B, H, M, S, F), or (B, H, 1, S, F) if all components share the product
    query_bias: Tensor | None  # (B, Hq, M, L)
    key_bias: Tensor  # (B, H, M, S)
    # a = 1 and b = 0 (2, B, Hq, M, L), for their gradients, where a variance is learned
    score_affine: Tensor | None = None

    @property
    def group(self) -> int:
        """Hq / H."""
        return self.query.shape[1] // self.key_bias.shape[1]


def score_features(inputs: AttentionInputs, with_affine: bool = False) -> ScoreFeatures:
    """The features at full precision, with ``score_affine`` if it is needed.

    Then they are made in float64: the gradient of sigma^2 sums what flows back through
    them, so their rounding must not add to that of the scores.
    """
    folded = inputs.with_folded_groups()
    if not needs_grad(inputs.variance):
        return _unfolded(_features(folded), inputs)
    exact = folded.in_dtype(finest_dtype(inputs.query))
    features = _with_affine(exact) if with_affine and _is_affine(inputs) else _features(exact)
    rounded = ScoreFeatures._make(x if x is None else x.to(inputs.query.dtype) for x in features)
    return _unfolded(rounded._replace(score_affine=features.score_affine), inputs)


def _unfolded(features: ScoreFeatures, inputs: AttentionInputs) -> ScoreFeatures:
    """The features of folded groups with Hq query heads (B, Hq, L, ...)."""
    if inputs.group == 1:
        return features

    def unfolded(x: Tensor) -> Tensor:  # (..., H, M, G L) -> (..., Hq, M, L)
        return x.unflatten(-1, (inputs.group, -1)).movedim(-2, -3).flatten(-4, -3)

    bias, affine = features.query_bias, features.score_affine
    return features._replace(
        query=features.query.reshape(*inputs.query.shape[:3], -1),
        query_bias=None if bias is None else unfolded(bias),
        score_affine=None if affine is None else unfolded(affine),
    )


def row_term(inputs: AttentionInputs) -> Tensor:
    """The term of i alone that the features leave out: (B, Hq, L)."""
    folded = inputs.with_folded_groups()
    if inputs.kernel == "dot":
        return inputs.query.new_zeros(inputs.query.shape[:3])
    if inputs.has_common_variance:
        variance = inputs.variance
        sigma2 = variance.squeeze(-1) if isinstance(variance, Tensor) else variance  # (B, H, 1)
        term = -_half_norms(folded) / sigma2
    else:
        term = -_half_norms(folded) * _common_inverse(folded).squeeze(-1)
    return term.reshape(inputs.query.shape[:3])


def _half_norms(inputs: AttentionInputs) -> Tensor:
    """|q_i - c|^2 / 2 (B, H, L), c the centre of the features."""
    if inputs.shifts is not None and inputs.has_common_variance:
        points = inputs.query - inputs.centre() - inputs.shifts.detach().mean(1, keepdim=True)
    else:
        expanded = inputs.with_expanded_keys()
        points = expanded.query - expanded.centre()
    return points.square().sum(-1) / 2


def _is_affine(inputs: AttentionInputs) -> bool:
    """Whether the variance divides all scores of a component and nothing else."""
    assert isinstance(inputs.variance, Tensor)
    adds_mask = inputs.attn_mask is not None and inputs.attn_mask.dtype != torch.bool
    return inputs.variance.shape[3] == 1 and not adds_mask and not inputs.is_hard


def _with_affine(inputs: AttentionInputs) -> ScoreFeatures:
    """The features of a constant variance and prior, s_0 = x / sigma_0^2 + log pi_0.

    a = sigma_0^2 / sigma^2 and b = log pi - a log pi_0 make a s_0 + b = x / sigma^2 +
    log pi. The features leave y_i out of s_0, so b takes (a - 1) y_i.
    """
    assert isinstance(inputs.variance, Tensor)
    constant = inputs._replace(variance=inputs.variance.detach())
    factor = constant.variance / inputs.variance  # (B, H, M or 1, 1)
    addend = (factor - 1) * _left_out(constant)  # (B, H, M or 1, L)
    if inputs.log_prior is None:
        features = _features(constant)
    else:
        constant_prior = inputs.log_prior.detach().clamp_min(LOG_ZERO)
        if inputs.log_prior.shape[3] == 1:
            features = _features(constant._replace(log_prior=inputs.log_prior.detach()))
            addend = addend + inputs.log_prior.clamp_min(LOG_ZERO) - factor * constant_prior
        else:
            features = _features(constant)
            features = features._replace(key_bias=features.key_bias + (1 - factor) * constant_prior)
    shape = (*features.key_bias.shape[:3], inputs.num_queries)
    return features._replace(score_affine=torch.stack([factor.expand(shape), addend.expand(shape)]))


def _features(inputs: AttentionInputs) -> ScoreFeatures:
    if inputs.shifts is not None and inputs.kernel == "gaussian" and inputs.has_common_variance:
        features = _shifted(inputs)
    else:
        inputs = inputs.with_expanded_keys()
        features = _dot(inputs) if inputs.kernel == "dot" else _gaussian(inputs)
    if inputs.log_prior is None:
        return features
    if features.query_bias is not None and inputs.log_prior.shape[3] == 1 and not inputs.is_hard:
        # the shorter sum as gradient; with a hard E-step it is a key mask
        return features._replace(query_bias=features.query_bias + inputs.log_prior)
    return features._replace(key_bias=features.key_bias + inputs.log_prior)


def _dot(inputs: AttentionInputs) -> ScoreFeatures:
    empty = inputs.query.new_zeros(inputs.keys.shape[:-1])
    if inputs.has_common_variance:
        return ScoreFeatures(inputs.query / inputs.variance, inputs.keys, None, empty)
    inverse = 1 / torch.as_tensor(inputs.variance)
    return ScoreFeatures(inputs.query, inputs.keys * inverse.unsqueeze(-1), None, empty)


def _gaussian(inputs: AttentionInputs) -> ScoreFeatures:
    centre = inputs.centre()
    query, keys = inputs.query - centre, inputs.keys - centre.unsqueeze(2)
    half_norm = keys.square().sum(-1) / 2  # (B, H, M, S)
    if inputs.has_common_variance:
        return ScoreFeatures(query / inputs.variance, keys, None, -half_norm / inputs.variance)
    inverse = 1 / torch.as_tensor(inputs.variance).expand(keys.shape[:-1])
    query = torch.cat([query, query.square().sum(-1, keepdim=True) / 2], -1)
    keys = torch.cat([keys * inverse.unsqueeze(-1), (_common_inverse(inputs) - inverse).unsqueeze(-1)], -1)
    return ScoreFeatures(query, keys, None, -half_norm * inverse)


def _common_inverse(inputs: AttentionInputs) -> Tensor:
    """min_r 1 / sigma_r^2 (B, H, 1, 1) where positions share the variance, else 0.

    No gradient flows through it: what it removes from the scores is of i alone.
    """
    variance = torch.as_tensor(inputs.variance).detach()
    return (
        1 / variance.amax(2, keepdim=True)
        if variance.shape[3] == 1
        else torch.zeros_like(variance[:, :, :1, :1])
    )


def _left_out(inputs: AttentionInputs) -> Tensor:
    """y_i = -|q_i - c|^2 / 2 min_r 1 / sigma_r^2, which the features leave out."""
    if inputs.kernel == "dot" or inputs.has_common_variance:
        return inputs.query.new_zeros(*inputs.query.shape[:2], 1, 1)
    return -_half_norms(inputs).unsqueeze(2) * _common_inverse(inputs)


def _shifted(inputs: AttentionInputs) -> ScoreFeatures:
    assert inputs.shifts is not None
    centre = inputs.centre()
    mean_shift = inputs.shifts.detach().mean(1, keepdim=True)  # (H, 1, D)
    keys = inputs.keys - centre.unsqueeze(2)
    shifts = inputs.shifts - mean_shift
    query = (inputs.query - centre - mean_shift) / inputs.variance
    along_keys = _along_shifts(keys.squeeze(2), shifts, inputs.is_hard)
    norms = keys.square().sum(-1) + shifts.square().sum(-1)[None, :, :, None]
    half_norm = norms / 2 + along_keys  # |k_j + b_r|^2 / 2
    return ScoreFeatures(
        query, keys, _along_shifts(query, shifts, inputs.is_hard), -half_norm / inputs.variance
    )


def _along_shifts(x: Tensor, shifts: Tensor, may_tie: bool) -> Tensor:
    """x_i . b_r (B, H, M, L), of x (B, H, L, D) and shifts (H, M, D)."""
    if (
        may_tie
    ):  # a product for each r: in one product equal shifts may round differently, and a tie would be lost
        return torch.stack([(x @ shifts[:, r, :, None]).squeeze(-1) for r in range(shifts.shape[1])], 2)
    return (x @ shifts.mT).transpose(2, 3)


class Options(NamedTuple):
    """The options of an operator; of a ``KeyRange`` left and right."""

    is_hard: bool
    left: int | None
    right: int | None
    dropout_p: float


class OperatorInputs(NamedTuple):
    """The arguments of a forward operator."""

    features: ScoreFeatures
    value: Tensor  # (B, H, S, E)
    mask: Tensor | None  # broadcastable to (B, Hq, L, S)
    seed: Tensor | None  # of dropout (1,)
    segments: Tensor | None  # of a ``KeyRange`` (2, B, S)
    options: Options

    @property
    def key_range(self) -> KeyRange:
        """Causality, window and segments."""
        return KeyRange(self.options.left, self.options.right, self.segments)


class ForwardResult(NamedTuple):
    """The output, and what recomputes P_ijr = exp(s_ijr - row_max_i) / row_sum_i.

    A float32 log-sum-exp would be less precise than the weights.
    """

    out: Tensor  # h (B, Hq, L, E)
    row_max: Tensor  # max_jr s_ijr (B, Hq, L), in own units; +inf with no key left
    row_sum: Tensor  # sum_jr exp(s_ijr - row_max_i) (B, Hq, L); 1 with no key left
    # log sum_jr exp(s_ijr) (B, Hq, L); -inf for a query with no key left
    lse: Tensor | None = None


# of features, values and mask; None: nothing to differentiate
Gradients = tuple[ScoreFeatures, Tensor, Tensor | None]

_FEATURES = "Tensor query, Tensor keys, Tensor? query_bias, Tensor key_bias"
_INPUTS = (
    f"{_FEATURES}, Tensor? score_affine, Tensor value, Tensor? mask, Tensor? seed,"
    " Tensor? segments, bool is_hard, int? left, int? right, float dropout_p"
)


class OperatorBackend(Backend[AttentionInputs]):
    """A backend with forward and backward operators of the features.

    ``torch.compile(fullgraph=True)`` sees one node for each.
    """

    is_transformable = False

    def __init__(self) -> None:
        """Define the operators ``mgk::{name}_forward`` and so on."""
        forward, backward = f"{self.name}_forward", f"{self.name}_backward"
        results = "Tensor out, Tensor row_max, Tensor row_sum"
        define_operator(
            f"{forward}({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)", self._flat_forward, _fake_forward
        )
        define_operator(
            f"{backward}(Tensor grad, Tensor? d_lse, {_INPUTS}, {results}, bool needs_mask_grad)"
            f" -> ({', '.join(['Tensor'] * 7)})",
            self._flat_backward,
            _fake_backward,
        )
        define_operator(
            f"{self.name}_statistics({_FEATURES}, Tensor? mask, Tensor? query_mask, Tensor? points,"
            " Tensor? segments, bool is_hard, int? left, int? right) -> Tensor[]",
            self.flat_statistics,
            fake_statistics,
        )
        torch.library.register_autograd(
            f"mgk::{forward}", self._autograd_backward, setup_context=_setup_context, lib=library
        )
        torch.library.register_autograd(f"mgk::{backward}", self.no_second_derivative, lib=library)

    def forward(self, inputs: OperatorInputs) -> ForwardResult:
        """h_i = sum_j A_ij v_j (Eq. 10)."""
        raise NotImplementedError

    def backward(
        self,
        grad: Tensor,
        d_lse: Tensor | None,
        inputs: OperatorInputs,
        result: ForwardResult,
        needs_mask_grad: bool,
    ) -> Gradients:
        """The gradients, from those of output and lse."""
        raise NotImplementedError

    def tangent(
        self, inputs: OperatorInputs, tangents: OperatorInputs, result: ForwardResult
    ) -> tuple[Tensor, Tensor]:
        """The tangents of output and lse, from those of the inputs."""
        raise NotImplementedError

    def flat_statistics(self, *arguments: Any) -> list[Tensor]:
        """The statistics from the flat arguments of the operator."""
        raise NotImplementedError

    def attention(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor | None]:
        """h_i = sum_j A_ij v_j (Eq. 10), and the lse where it is wanted."""
        uniform = inputs.log_uniform_prior
        adds_mask = inputs.attn_mask is not None and inputs.attn_mask.is_floating_point()
        inputs = inputs.with_normalised_prior().with_key_mask_in_prior().at_full_precision()
        features = score_features(inputs, with_affine=not adds_mask)
        # on the CPU, where reading it does not wait for a device
        seed = torch.randint(2**62, (1,), device="cpu") if inputs.dropout_p > 0 else None
        left, right, segments = inputs.key_range
        options = (segments, inputs.is_hard, left, right, inputs.dropout_p)
        arguments = (*features, inputs.value, inputs.attn_mask, seed, *options)
        if torch.compiler.is_compiling():  # which knows no jvp of a Function
            out, _, _, lse = getattr(torch.ops.mgk, f"{self.name}_forward")(*arguments)
        else:
            out, _, _, lse = _Forward.apply(self, *arguments)
        if not inputs.return_lse:
            return out, None
        return out, torch.where(lse == -torch.inf, lse, lse + row_term(inputs) + uniform)

    def statistics(
        self, inputs: AttentionInputs, query_mask: Tensor | None, points: Tensor | None
    ) -> list[Tensor]:
        """N_jr = sum_i gamma_ijr, and with points the moments."""
        left, right, segments = inputs.key_range
        tensors = (*score_features(inputs)[:4], inputs.attn_mask, query_mask, points, segments)
        operator = getattr(torch.ops.mgk, f"{self.name}_statistics")
        sums: list[Tensor] = operator(*tensors, inputs.is_hard, left, right)
        return sums

    def _flat_forward(self, *arguments: Any) -> ForwardResult:
        return self.forward(_from_flat(arguments))

    def _flat_backward(self, grad: Tensor, d_lse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
        inputs, result = _from_flat(arguments), ForwardResult(*arguments[13:16])
        d_features, d_value, d_mask = self.backward(grad, d_lse, inputs, result, arguments[16])
        # an operator has no optional results
        return tuple(grad.new_empty(0) if x is None else x for x in (*d_features, d_value, d_mask))

    def _autograd_backward(self, ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        *tensors, out, row_max, row_sum = ctx.saved_tensors
        needs_mask_grad = tensors[6] is not None and ctx.needs_input_grad[6]
        operator = getattr(torch.ops.mgk, f"{self.name}_backward")
        with without_autocast(out):
            gradients = operator(
                grad, unused[-1], *tensors, *ctx.options, out, row_max, row_sum, needs_mask_grad
            )
        is_given = [*(x is not None for x in tensors[:6]), needs_mask_grad]
        no_gradient = (None,) * (2 + len(ctx.options))  # seed, segments, options
        return *(x if given else None for x, given in zip(gradients, is_given, strict=True)), *no_gradient

    def no_second_derivative(self, *unused: Any) -> None:
        """The derivative of a backward, which there is not."""
        raise RuntimeError(
            f"backend {self.name!r} has first derivatives only; use backend='reference' for second ones"
        )


class _Forward(torch.autograd.Function):
    """The forward operator for torch.func and forward-mode differentiation.

    Its arguments are the backend and those of the operator.
    """

    @staticmethod
    def forward(backend: OperatorBackend, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(getattr(torch.ops.mgk, f"{backend.name}_forward")(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.backend = inputs[0]
        _setup_context(ctx, inputs[1:], output)
        ctx.save_for_forward(*inputs[1:10], *output)
        ctx.mark_non_differentiable(*output[1:3])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *others: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # which gradient checkpointing allows to be read once
        tensors, results = saved[:9], saved[9:]
        needs_mask_grad = tensors[6] is not None and ctx.needs_input_grad[7]
        with without_autocast(grad):
            arguments = (ctx.backend, grad, others[-1], *tensors, *ctx.options, *results, needs_mask_grad)
            gradients = _Backward.apply(*arguments)
        is_given = [*(x is not None for x in tensors[:6]), needs_mask_grad]
        grads = (x if given else None for x, given in zip(gradients, is_given, strict=True))
        return None, *grads, *[None] * (2 + len(ctx.options))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, result = _from_flat((*saved[:9], *ctx.options)), ForwardResult(*saved[9:])
        of_inputs = _from_flat((*tangents[1:8], None, None, *ctx.options))
        with without_autocast(result.out):
            out, lse = ctx.backend.tangent(inputs, of_inputs, result)
            return out, None, None, lse

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], backend: OperatorBackend, *arguments: Any) -> Any:
        size, dims = info.batch_size, in_dims[1:]
        if arguments[7] is not None:  # dropout: each call with its own draw, or all with one
            calls = (one_call(arguments, dims, i) for i in range(size))
            results = zip(*(_Forward.apply(backend, *call) for call in calls), strict=True)
            return tuple(map(torch.stack, results)), (0, 0, 0, 0)
        folded = _fold(arguments, dims, size, keeps_mask=dims[6] is None)
        results = _Forward.apply(backend, *folded)
        return tuple(x.unflatten(0, (size, -1)) for x in results), (0, 0, 0, 0)


class _Backward(torch.autograd.Function):
    """The backward operator, which is not differentiated again."""

    @staticmethod
    def forward(backend: OperatorBackend, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(getattr(torch.ops.mgk, f"{backend.name}_backward")(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.backend = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        ctx.backend.no_second_derivative()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        ctx.backend.no_second_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], backend: OperatorBackend, *arguments: Any) -> Any:
        size, dims = info.batch_size, in_dims[1:]
        if arguments[9] is not None:
            calls = (one_call(arguments, dims, i) for i in range(size))
            results = zip(*(_Backward.apply(backend, *call) for call in calls), strict=True)
            return tuple(map(torch.stack, results)), (0,) * 7
        grad, d_lse, *inputs, out, row_max, row_sum, needs_mask_grad = arguments
        flat = (grad, d_lse, out, row_max, row_sum)
        folded = [_fold_one(x, d, size) for x, d in zip(flat, (*dims[:2], *dims[15:18]), strict=True)]
        keeps_mask = dims[8] is None and not needs_mask_grad
        arguments = (*folded[:2], *_fold(inputs, dims[2:15], size, keeps_mask), *folded[2:], needs_mask_grad)
        gradients = _Backward.apply(backend, *arguments)
        batch_dims = [1 if at == 4 else 0 for at in range(7)]  # score_affine is (2, B, Hq, M, L)
        unfolded = [
            x if x.ndim == 1 else x.unflatten(dim, (size, -1))
            for x, dim in zip(gradients, batch_dims, strict=True)
        ]
        if needs_mask_grad:
            given = inputs[6].shape[0 if dims[8] is None or dims[8] > 0 else 1]
            unfolded[6] = unfolded[6].sum(1, keepdim=True) if given == 1 else unfolded[6]
        out_dims = [None if x.ndim == 1 else dim for x, dim in zip(gradients, batch_dims, strict=True)]
        return tuple(unfolded), tuple(out_dims)


def _fold(arguments: Any, dims: tuple[Any, ...], size: int, keeps_mask: bool) -> list[Any]:
    """A forward's arguments with vmap's dimension folded into the batch."""
    *features, affine, value, mask, seed, segments = arguments[:9]
    tensors = [_fold_one(x, dim, size) for x, dim in zip(features, dims[:4], strict=True)]
    affine, segments = (  # (2, B, Hq, M, L), (2, B, S)
        _fold_one(x, dim, size, at=1) for x, dim in ((affine, dims[4]), (segments, dims[8]))
    )
    value = _fold_one(value, dims[5], size)
    if mask is not None and not keeps_mask:
        mask = mask.movedim(dims[6], 0) if dims[6] is not None else _repeat(mask.unsqueeze(0), 0, size)
        mask = _repeat(mask, 1, value.shape[0] // size).flatten(0, 1)
    elif mask is not None and mask.shape[0] > 1:
        mask = _repeat(mask.unsqueeze(0), 0, size).flatten(0, 1)
    return [*tensors, affine, value, mask, seed, segments, *arguments[9:]]


def _fold_one(x: Any, dim: int | None, size: int, at: int = 0) -> Any:
    """A tensor whose batch is dimension ``at``."""
    if x is None:
        return None
    x = x.movedim(dim, at) if dim is not None else _repeat(x.unsqueeze(at), at, size)
    return x.flatten(at, at + 1)


def _repeat(x: Tensor, dim: int, size: int) -> Tensor:
    """A view whose dimension of size 1 is expanded."""
    return x.expand([size if at == dim else -1 for at in range(x.ndim)])


def one_call(arguments: tuple[Any, ...], dims: tuple[Any, ...], index: int) -> list[Any]:
    """The arguments of one of the calls that vmap makes one."""
    return [x if dim is None else x.select(dim, index) for x, dim in zip(arguments, dims, strict=True)]


def _from_flat(arguments: tuple[Any, ...]) -> OperatorInputs:
    value, mask, seed, segments = arguments[5:9]
    return OperatorInputs(ScoreFeatures(*arguments[:5]), value, mask, seed, segments, Options(*arguments[9:13]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:9], *output[:3])
    ctx.options = inputs[9:]


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    query, value = arguments[0], arguments[5]
    rows = (query.new_empty(query.shape[:3]) for _ in range(3))
    return query.new_empty(*query.shape[:3], value.shape[-1]), *rows


def _fake_backward(grad: Tensor, d_lse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    *tensors, mask = arguments[:7]
    wanted = (*tensors, mask if arguments[-1] else None)
    return tuple(grad.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


def fake_statistics(*arguments: Any) -> list[Tensor]:
    """Empty counts, and with points empty moments."""
    key_bias, points = arguments[3], arguments[6]
    widths: list[tuple[int, ...]] = [()] if points is None else [(), (points.shape[-1],), ()]
    dtype = key_bias.dtype if points is None else points.dtype
    return [key_bias.new_empty((*key_bias.shape, *width), dtype=dtype) for width in widths]
