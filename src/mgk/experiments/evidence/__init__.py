"""Effects, decision rules and claims: what the results support."""
