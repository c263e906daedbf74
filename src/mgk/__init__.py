"""Transformers with a mixture of Gaussian keys (MGK) or of linear keys (MLK).

Every public name loads on first use, so ``import mgk`` alone imports neither torch nor anything heavier.
"""

from importlib import import_module
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mgk.functional import LinearState as LinearState
    from mgk.functional import MStep as MStep
    from mgk.functional import available_backends as available_backends
    from mgk.functional import linear_mixture_attention as linear_mixture_attention
    from mgk.functional import linear_mixture_weights as linear_mixture_weights
    from mgk.functional import m_step as m_step
    from mgk.functional import mixture_attention as mixture_attention
    from mgk.functional import mixture_weights as mixture_weights
    from mgk.functional import responsibilities as responsibilities
    from mgk.functional import shifted_mixture_attention as shifted_mixture_attention

__version__ = _version("mgk")

_FUNCTIONS = (
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
)
_SUBPACKAGES = ("analysis", "data", "functional", "models", "nn")

__all__ = [*_FUNCTIONS, *_SUBPACKAGES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(import_module("mgk.functional"), name)
    if name in _SUBPACKAGES:
        return import_module(f"mgk.{name}")
    raise AttributeError(f"module 'mgk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
