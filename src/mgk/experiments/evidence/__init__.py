"""The paper's claims, effects with confidence intervals, and decision rules."""
