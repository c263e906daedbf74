"""The equations as pure functions, and the backends that compute them."""

from mgk.functional import flops as flops
from mgk.functional.backends import available_backends as available_backends
from mgk.functional.linear.api import LinearState as LinearState
from mgk.functional.linear.api import linear_mixture_attention as linear_mixture_attention
from mgk.functional.linear.api import linear_mixture_weights as linear_mixture_weights
from mgk.functional.mixture.api import m_step as m_step
from mgk.functional.mixture.api import mixture_attention as mixture_attention
from mgk.functional.mixture.api import mixture_weights as mixture_weights
from mgk.functional.mixture.api import responsibilities as responsibilities
from mgk.functional.mixture.api import shifted_mixture_attention as shifted_mixture_attention
from mgk.functional.mixture.em_statistics import MStep as MStep
from mgk.functional.mixture.merging import merge_attention as merge_attention
