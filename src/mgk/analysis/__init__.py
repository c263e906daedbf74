"""Cost of models by formula, inspection of their attention, and confidence intervals of measured differences."""
