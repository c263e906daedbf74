"""Comparisons of trained models: several runs under one budget, their statistics, and the page that shows them."""
