"""Evidence for the paper's claims: effects with confidence intervals, decision rules, and the claims themselves."""
