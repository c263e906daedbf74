"""Limits that several commands share. Does not import torch."""

# Threads or processes: more than any machine has cores; far beyond, thread libraries crash.
MAX_THREADS = 1024
