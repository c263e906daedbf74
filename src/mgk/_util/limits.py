"""Limits that several commands share. Does not import torch."""

# Threads or processes: thread libraries crash far beyond the cores of a machine.
MAX_THREADS = 1024
