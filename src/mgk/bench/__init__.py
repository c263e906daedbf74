"""Measurements of time and memory, each as a ratio to a yardstick that is measured beside it."""
