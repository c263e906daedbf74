"""``python -m mgk`` is the command ``mgk``."""

from mgk_command import main

main()
