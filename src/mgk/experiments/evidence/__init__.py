"""The paper's claims, effects with intervals, and decision rules."""
