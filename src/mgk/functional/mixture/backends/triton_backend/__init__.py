"""Mixture attention in Triton, for GPUs of NVIDIA and AMD: kernels, their tiles, and the backend ``triton``."""
