"""Cost by formula, inspection of attention, confidence intervals."""
