"""Transformers with a mixture of Gaussian keys (MGK) or of linear keys (MLK).

Every public name loads on first use, so ``import mgk`` alone imports neither torch nor anything heavier.
"""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from mgk._util.lazy import lazy_exports

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

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "mgk.functional": [
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
        ],
    },
    submodules=("analysis", "data", "functional", "models", "nn", "variants"),
)
__all__ += ["__version__"]
