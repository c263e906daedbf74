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
from mgk.functional.mixture.inputs import LOG_ZERO, AttentionInputs, finest_dtype, needs_grad
from mgk.functional.validation import without_autocast


class ScoreFeatures(NamedTuple):
    """s_ijr = query_i . keys_jr + query_bias_ir + key_bias_jr."""

    query: Tensor  # (B, H, L, F)
    keys: Tensor  # (B, H, M, S, F), or (B, H, 1, S, F) if all components share the product
    query_bias: Tensor | None  # (B, H, M, L)
    key_bias: Tensor  # (B, H, M, S)
    # a = 1 and b = 0 (2, B, H, M, L), in the finest dtype: for their gradients, where a variance is learned
    score_affine: Tensor | None = None


def score_features(inputs: AttentionInputs, with_affine: bool = False) -> ScoreFeatures:
    """The features at full precision, with ``score_affine`` where a variance is learned.

    Then they are made in float64: the gradient of sigma^2 sums what flows back through
    them, so their rounding must not add to that of the scores.
    """
    if not needs_grad(inputs.variance):
        return _features(inputs)
    exact = inputs.in_dtype(finest_dtype(inputs.query))
    features = _with_affine(exact) if with_affine and _is_affine(inputs) else _features(exact)
    rounded = ScoreFeatures._make(x if x is None else x.to(inputs.query.dtype) for x in features)
    return rounded._replace(score_affine=features.score_affine)


def _is_affine(inputs: AttentionInputs) -> bool:
    """Whether the variance divides all scores of a component, but for the prior, and nothing else."""
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
        # the gradient of a query's bias is the shorter sum; with a hard E-step the prior is a key mask
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
    return 1 / variance.amax(2, keepdim=True) if variance.shape[3] == 1 else torch.zeros_like(variance[:, :, :1, :1])


def _left_out(inputs: AttentionInputs) -> Tensor:
    """y_i = -|q_i - c|^2 / 2 min_r 1 / sigma_r^2, of i alone, which the features leave out of the scores."""
    if inputs.kernel == "dot" or inputs.has_common_variance:
        return inputs.query.new_zeros(*inputs.query.shape[:2], 1, 1)
    half_norm = (inputs.query - inputs.with_expanded_keys().centre()).square().sum(-1) / 2  # (B, H, L)
    return -half_norm.unsqueeze(2) * _common_inverse(inputs)


def _shifted(inputs: AttentionInputs) -> ScoreFeatures:
    assert inputs.shifts is not None
    centre = inputs.centre()
    mean_shift = inputs.shifts.detach().mean(1, keepdim=True)  # (H, 1, D)
    keys = inputs.keys - centre.unsqueeze(2)
    shifts = inputs.shifts - mean_shift
    query = (inputs.query - (centre + mean_shift)) / inputs.variance
    along_keys = _along_shifts(keys.squeeze(2), shifts, inputs.is_hard)
    norms = keys.square().sum(-1) + shifts.square().sum(-1)[None, :, :, None]
    half_norm = norms / 2 + along_keys  # |k_j + b_r|^2 / 2
    return ScoreFeatures(query, keys, _along_shifts(query, shifts, inputs.is_hard), -half_norm / inputs.variance)


def _along_shifts(x: Tensor, shifts: Tensor, may_tie: bool) -> Tensor:
    """x_i . b_r (B, H, M, L), of x (B, H, L, D) and shifts (H, M, D)."""
    if may_tie:  # a product for each r: in one product equal shifts may round differently, and a tie would be lost
        return torch.stack([(x @ shifts[:, r, :, None]).squeeze(-1) for r in range(shifts.shape[1])], 2)
    return (x @ shifts.mT).transpose(2, 3)


class Options(NamedTuple):
    """The options of an operator."""

    is_hard: bool
    is_causal: bool
    dropout_p: float


class OperatorInputs(NamedTuple):
    """The arguments of a forward operator."""

    features: ScoreFeatures
    value: Tensor  # (B, H, S, E)
    mask: Tensor | None  # broadcastable to (B, H, L, S)
    seed: Tensor | None  # of dropout (1,)
    options: Options


class ForwardResult(NamedTuple):
    """The output, and what recomputes the weights in the backward, P_ijr = exp(s_ijr - row_max_i) / row_sum_i.

    The two are not joined to a log-sum-exp: rounded to float32 it would be less precise than the weights are.
    """

    out: Tensor  # h (B, H, L, E)
    row_max: Tensor  # max_jr s_ijr (B, H, L), in the backend's own units; +inf for a query with no key left
    row_sum: Tensor  # sum_jr exp(s_ijr - row_max_i) (B, H, L); 1 for a query with no key left


# of the features, the values and the mask; None where there is nothing to differentiate
Gradients = tuple[ScoreFeatures, Tensor, Tensor | None]

_FEATURES = "Tensor query, Tensor keys, Tensor? query_bias, Tensor key_bias"
_INPUTS = (
    f"{_FEATURES}, Tensor? score_affine, Tensor value, Tensor? mask, Tensor? seed,"
    " bool is_hard, bool is_causal, float dropout_p"
)


class OperatorBackend(Backend[AttentionInputs]):
    """A backend with its own forward and backward from the features, each a torch operator.

    ``torch.compile(fullgraph=True)`` sees one node for each; autograd calls the backward with what the forward saved.
    """

    def __init__(self) -> None:
        """Define the operators ``mgk::{name}_forward``, ``mgk::{name}_backward`` and ``mgk::{name}_statistics``."""
        forward, backward = f"{self.name}_forward", f"{self.name}_backward"
        results = "Tensor out, Tensor row_max, Tensor row_sum"
        define_operator(f"{forward}({_INPUTS}) -> (Tensor, Tensor, Tensor)", self._flat_forward, _fake_forward)
        define_operator(
            f"{backward}(Tensor grad, {_INPUTS}, {results}, bool needs_mask_grad) -> ({', '.join(['Tensor'] * 7)})",
            self._flat_backward,
            _fake_backward,
        )
        define_operator(
            f"{self.name}_statistics({_FEATURES}, Tensor? mask, Tensor? query_mask, Tensor? points, bool is_hard,"
            " bool is_causal) -> Tensor[]",
            self.flat_statistics,
            fake_statistics,
        )
        torch.library.register_autograd(
            f"mgk::{forward}", self._autograd_backward, setup_context=_setup_context, lib=library
        )
        torch.library.register_autograd(f"mgk::{backward}", self._no_second_derivative, lib=library)

    def forward(self, inputs: OperatorInputs) -> ForwardResult:
        """h_i = sum_j A_ij v_j (Eq. 10)."""
        raise NotImplementedError

    def backward(self, grad: Tensor, inputs: OperatorInputs, result: ForwardResult, needs_mask_grad: bool) -> Gradients:
        """The gradients from that of the output (B, H, L, E)."""
        raise NotImplementedError

    def flat_statistics(self, *arguments: Any) -> list[Tensor]:
        """The statistics from features, mask, query_mask, points, is_hard and is_causal."""
        raise NotImplementedError

    def attention(self, inputs: AttentionInputs) -> Tensor:
        """h_i = sum_j A_ij v_j (Eq. 10)."""
        inputs = inputs.with_normalised_prior().with_key_mask_in_prior().at_full_precision()
        features = score_features(inputs, with_affine=True)
        # on the CPU, where reading it does not wait for a device
        seed = torch.randint(2**62, (1,), device="cpu") if inputs.dropout_p > 0 else None
        options = (inputs.is_hard, inputs.is_causal, inputs.dropout_p)
        operator = getattr(torch.ops.mgk, f"{self.name}_forward")
        out: Tensor = operator(*features, inputs.value, inputs.attn_mask, seed, *options)[0]
        return out

    def statistics(self, inputs: AttentionInputs, query_mask: Tensor | None, points: Tensor | None) -> list[Tensor]:
        """N_jr = sum_i gamma_ijr, and with points the moments."""
        tensors = (*score_features(inputs)[:4], inputs.attn_mask, query_mask, points)
        operator = getattr(torch.ops.mgk, f"{self.name}_statistics")
        sums: list[Tensor] = operator(*tensors, inputs.is_hard, inputs.is_causal)
        return sums

    def _flat_forward(self, *arguments: Any) -> ForwardResult:
        return self.forward(_from_flat(arguments))

    def _flat_backward(self, grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        result = ForwardResult(*arguments[11:14])
        d_features, d_value, d_mask = self.backward(grad, _from_flat(arguments), result, arguments[14])
        # an operator has no optional results
        return tuple(grad.new_empty(0) if x is None else x for x in (*d_features, d_value, d_mask))

    def _autograd_backward(self, ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        *tensors, out, row_max, row_sum = ctx.saved_tensors
        needs_mask_grad = tensors[6] is not None and ctx.needs_input_grad[6]
        operator = getattr(torch.ops.mgk, f"{self.name}_backward")
        with without_autocast(out):
            gradients = operator(grad, *tensors, *ctx.options, out, row_max, row_sum, needs_mask_grad)
        is_given = [*(x is not None for x in tensors[:6]), needs_mask_grad]
        return *(x if given else None for x, given in zip(gradients, is_given, strict=True)), None, None, None, None

    def _no_second_derivative(self, ctx: Any, *grads: Any) -> None:
        raise RuntimeError(f"backend {self.name!r} has first derivatives only; use backend='reference' for second ones")


def _from_flat(arguments: tuple[Any, ...]) -> OperatorInputs:
    value, mask, seed = arguments[5:8]
    return OperatorInputs(ScoreFeatures(*arguments[:5]), value, mask, seed, Options(*arguments[8:11]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.options = inputs[8:]


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, value = arguments[0], arguments[5]
    shape = query.shape[:3]
    return query.new_empty(*shape, value.shape[-1]), query.new_empty(shape), query.new_empty(shape)


def _fake_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *tensors, mask = arguments[:7]
    wanted = (*tensors, mask if arguments[-1] else None)
    return tuple(grad.new_empty(0) if x is None else x.new_empty(x.shape) for x in wanted)


def fake_statistics(*arguments: Any) -> list[Tensor]:
    """Empty counts, and with points empty moments, of the arguments of ``flat_statistics``."""
    key_bias, points = arguments[3], arguments[6]
    widths: list[tuple[int, ...]] = [()] if points is None else [(), (points.shape[-1],), ()]
    return [key_bias.new_empty((*key_bias.shape, *width)) for width in widths]
