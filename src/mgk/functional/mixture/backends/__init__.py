"""The backends of mixture attention, one file each."""
