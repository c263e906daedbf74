"""The unfused equations, materialised: for small inputs, and in float64 as the oracle ``reference``."""

import torch
from torch import Tensor

from mgk.functional.backends import Backend
from mgk.functional.mixture import reference
from mgk.functional.mixture.inputs import AttentionInputs, compute_dtype, finest_dtype, needs_grad

# Up to this many scores the set-up of a fused backend takes longer than the scores themselves.
MAX_SCORES = 2**16


class Eager(Backend[AttentionInputs]):
    """Eq. 9 to 12 in the precision of the inputs, float32 or better."""

    name = "eager"
    priority = 3

    def is_efficient(self, inputs: AttentionInputs) -> bool:
        """For few scores, and for one query, whose scores need no blocks."""
        return inputs.num_scores <= MAX_SCORES or inputs.num_queries == 1

    def dtype(self, inputs: AttentionInputs) -> torch.dtype:
        """float64 where a prior or a variance is learned: their gradients accumulate the rounding of every pair."""
        is_sum_over_pairs = needs_grad(inputs.log_prior) or needs_grad(inputs.variance)
        return finest_dtype(inputs.query) if is_sum_over_pairs else compute_dtype(inputs.query)

    def attention(self, inputs: AttentionInputs) -> Tensor:
        """h_i = sum_j A_ij v_j (Eq. 10)."""
        return reference.attention(inputs.in_dtype(self.dtype(inputs)))

    def statistics(self, inputs: AttentionInputs, query_mask: Tensor | None, points: Tensor | None) -> list[Tensor]:
        """N_jr = sum_i gamma_ijr, and with points the moments."""
        inputs = inputs.in_dtype(self.dtype(inputs))
        points = None if points is None else points.to(inputs.query.dtype)
        return reference.weighted_sums(reference.responsibilities(inputs), query_mask, points)


class Reference(Eager):
    """The same equations in float64, for tests and for those who name it."""

    name = "reference"
    priority = 0

    def dtype(self, inputs: AttentionInputs) -> torch.dtype:
        """float64 where the device has it."""
        return finest_dtype(inputs.query)
