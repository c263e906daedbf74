"""The version; reading it takes longer than all of ``import mgk``."""

from importlib.metadata import version

__version__ = version("mgk")
