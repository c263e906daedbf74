"""The mathematics: pure functions without parameters. ``reference`` writes the equations down and judges the rest."""

from mgk.functional.linear.api import LinearState, linear_mixture_attention, linear_mixture_weights
from mgk.functional.mixture.api import (
    m_step,
    mixture_attention,
    mixture_weights,
    responsibilities,
    shifted_mixture_attention,
)
from mgk.functional.mixture.dispatch import available_backends
from mgk.functional.mixture.reference import MStep

__all__ = [
    "LinearState",
    "MStep",
    "available_backends",
    "linear_mixture_attention",
    "linear_mixture_weights",
    "m_step",
    "mixture_attention",
    "mixture_weights",
    "responsibilities",
    "shifted_mixture_attention",
]
