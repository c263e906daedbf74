"""The equations as pure functions, and the backends that compute them."""

from mgk.functional import flops
from mgk.functional.backends import available_backends
from mgk.functional.linear.api import LinearState, linear_mixture_attention, linear_mixture_weights
from mgk.functional.mixture.api import (
    m_step,
    mixture_attention,
    mixture_weights,
    responsibilities,
    shifted_mixture_attention,
)
from mgk.functional.mixture.em_statistics import MStep
from mgk.functional.mixture.merging import merge_attention

__all__ = [
    "LinearState",
    "MStep",
    "available_backends",
    "flops",
    "linear_mixture_attention",
    "linear_mixture_weights",
    "m_step",
    "merge_attention",
    "mixture_attention",
    "mixture_weights",
    "responsibilities",
    "shifted_mixture_attention",
]
