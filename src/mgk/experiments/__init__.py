"""Trained models under one budget, their statistics, and pages that show them.

Only ``reproduce.collect`` imports torch before a model is trained or analyzed.
"""
