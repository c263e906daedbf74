"""Benchmarks of time, memory and precision: one registry, one runner, one JSON form."""
