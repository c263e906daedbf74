"""Attention, its priors, variances, feature maps and caches."""

from mgk.nn.attention import MixtureAttention
from mgk.nn.caches import KeyValueCache, StateCache, StaticKeyValueCache, StaticStateCache
from mgk.nn.em import m_step_after, m_step_all
from mgk.nn.feature_maps import Dpfp, Elu, Favor
from mgk.nn.multihead import MultiheadMixtureAttention
from mgk.nn.priors import EMPrior, LearnedPrior, UniformPrior
from mgk.nn.rotary import rotary_tables, rotate
from mgk.nn.variances import ConstantVariance, EMVariance, LearnedVariance, UnequalVariance

__all__ = [
    "ConstantVariance",
    "Dpfp",
    "EMPrior",
    "EMVariance",
    "Elu",
    "Favor",
    "KeyValueCache",
    "LearnedPrior",
    "LearnedVariance",
    "MixtureAttention",
    "MultiheadMixtureAttention",
    "StateCache",
    "StaticKeyValueCache",
    "StaticStateCache",
    "UnequalVariance",
    "UniformPrior",
    "m_step_after",
    "m_step_all",
    "rotary_tables",
    "rotate",
]
