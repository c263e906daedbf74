"""Benchmarks; docs/performance.md describes the rows of each."""
