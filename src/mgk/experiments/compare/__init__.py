"""``mgk compare``: models trained under one budget, side by side."""
