"""What every layer may use; imports nothing else of mgk."""
