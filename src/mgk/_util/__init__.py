"""What every layer may use: files, machine, progress, signals, suggestions. Imports nothing else of mgk."""
