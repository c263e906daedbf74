"""Mixtures of linear keys: Eq. 14."""
