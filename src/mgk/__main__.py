"""``python -m mgk`` is the command ``mgk``."""

from mgk.cli import main

main()
