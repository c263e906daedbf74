"""The backend ``triton``, for GPUs of NVIDIA and AMD."""
