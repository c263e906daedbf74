"""Mixtures of Gaussian keys: Eq. 8 to 13."""
