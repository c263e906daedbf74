"""Transformers with a mixture of Gaussian keys (MGK) or of linear keys (MLK).

Public names load on first use: ``import mgk`` alone does not import torch.
"""

from typing import TYPE_CHECKING

from mgk._util.lazy import lazy_exports

if TYPE_CHECKING:
    from mgk._util.version import __version__ as __version__
    from mgk.functional import LinearState as LinearState
    from mgk.functional import MStep as MStep
    from mgk.functional import available_backends as available_backends
    from mgk.functional import linear_mixture_attention as linear_mixture_attention
    from mgk.functional import linear_mixture_weights as linear_mixture_weights
    from mgk.functional import m_step as m_step
    from mgk.functional import merge_attention as merge_attention
    from mgk.functional import mixture_attention as mixture_attention
    from mgk.functional import mixture_weights as mixture_weights
    from mgk.functional import responsibilities as responsibilities
    from mgk.functional import shifted_mixture_attention as shifted_mixture_attention

_SUBMODULES = ("analysis", "data", "functional", "models", "nn", "parallel", "variants")
__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__, _SUBMODULES)
