"""Mixture attention by fused C++ kernels: tiles of queries and keys, one value product per position, memory O(N).

The kernels take the same features as ``blockwise``. Shifted keys cost one product per pair and a rank-M factor
(identity 2); tiles where the factor would underflow add exponents instead.
"""

from typing import Any

import torch
from torch import Tensor

from mgk.functional.backends import Task, define_operator
from mgk.functional.mixture.backends import cpu_kernels
from mgk.functional.mixture.features import ForwardResult, Gradients, OperatorBackend, OperatorInputs, ScoreFeatures
from mgk.functional.mixture.inputs import AttentionInputs, needs_grad

# Below, the set-up of the features takes longer than the scores.
MIN_SCORES = 2**16


class Cpu(OperatorBackend):
    """Attention and counts on CPU tensors."""

    name = "cpu"
    priority = 4

    def status(self) -> str:
        """Whether the kernels are built and loaded."""
        return cpu_kernels.STATUS

    def unsupported_reason(self, inputs: AttentionInputs, task: Task = "attention") -> str | None:
        """CPU tensors, 8 components, no gradient of a mask, no moments."""
        if self.status() != "ready":
            return f"it is {self.status()}"
        if inputs.query.device.type != "cpu":
            return f"the tensors are on {inputs.query.device.type}"
        if inputs.num_mixtures > cpu_kernels.MAX_COMPONENTS:
            return f"it has room for {cpu_kernels.MAX_COMPONENTS} components, not {inputs.num_mixtures}"
        if needs_grad(inputs.attn_mask):
            return "it has no gradient for attn_mask"
        return "it has counts, no moments" if task == "moments" else None

    def is_efficient(self, inputs: AttentionInputs) -> bool:
        """For many scores; for decoding always, as that kernel needs no features."""
        return inputs.num_scores > MIN_SCORES or _is_decoding(inputs)

    def attention(self, inputs: AttentionInputs) -> Tensor:
        """h_i = sum_j A_ij v_j (Eq. 10)."""
        return _decode(inputs) if _is_decoding(inputs) else super().attention(inputs)

    def forward(self, inputs: OperatorInputs) -> ForwardResult:
        """h_i = sum_j A_ij v_j (Eq. 10)."""
        features, value = cpu_kernels.contiguous(inputs.features), inputs.value.contiguous()
        shape = features.query.shape[:3]
        result = ForwardResult(value.new_empty(*shape, value.shape[-1]), value.new_empty(shape), value.new_empty(shape))
        cpu_kernels.run("forward", features, inputs.options, **_fields(inputs, value, result))
        return result

    def backward(self, grad: Tensor, inputs: OperatorInputs, result: ForwardResult, needs_mask_grad: bool) -> Gradients:
        """The gradients of the features and the values."""
        del needs_mask_grad  # such inputs are unsupported
        features, value = cpu_kernels.contiguous(inputs.features), inputs.value.contiguous()
        d_features = ScoreFeatures._make(x if x is None else torch.empty_like(x) for x in features)
        d_value = torch.empty_like(value)
        names = ("d_query", "d_keys", "d_query_bias", "d_key_bias", "d_score_affine", "d_value")
        fields = _fields(inputs, value, result) | dict(zip(names, (*d_features, d_value), strict=True))
        cpu_kernels.run("backward", features, inputs.options, **fields, grad=grad.contiguous())
        return d_features, d_value, None

    def flat_statistics(self, *arguments: Any) -> list[Tensor]:
        """sum_i gamma_ijr."""
        *tensors, mask, query_mask, _, is_hard, is_causal = arguments
        return [cpu_kernels.counts(ScoreFeatures(*tensors), mask, query_mask, is_hard, is_causal)]


def _fields(inputs: OperatorInputs, value: Tensor, result: ForwardResult) -> dict[str, Any]:
    """The fields of the kernel's struct that forward and backward share."""
    pairs = (*inputs.features.query.shape[:3], inputs.features.key_bias.shape[3])
    return {
        "value": value,
        "value_width": value.shape[-1],
        "out": result.out,
        "row_max": result.row_max,
        "row_sum": result.row_sum,
        **cpu_kernels.mask_fields(inputs.mask, pairs),
        **cpu_kernels.dropout_fields(inputs.seed, inputs.options.dropout_p),
    }


def _is_decoding(inputs: AttentionInputs) -> bool:
    return inputs.num_queries == 1 and not any(map(needs_grad, inputs))


def _decode(inputs: AttentionInputs) -> Tensor:
    """One query: keys and values are read once, in place in the cache."""
    inputs = inputs.at_full_precision()
    if inputs.kernel == "dot":  # q . (k + b) is no score of q - b
        inputs = inputs.with_expanded_keys()
    variance = torch.as_tensor(inputs.variance, dtype=inputs.query.dtype)
    tensors = (inputs.query, inputs.keys, inputs.shifts, inputs.value, inputs.log_prior, variance, inputs.attn_mask)
    out: Tensor = torch.ops.mgk.cpu_decode(*tensors, inputs.kernel == "dot", inputs.is_hard)
    return out


define_operator(
    "cpu_decode(Tensor query, Tensor keys, Tensor? shifts, Tensor value, Tensor? log_prior, Tensor variance,"
    " Tensor? mask, bool is_dot, bool is_hard) -> Tensor",
    cpu_kernels.decode,
    lambda query, keys, shifts, value, *others: value.new_empty(*query.shape[:3], value.shape[-1]),
)
