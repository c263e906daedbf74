"""``python -m mgk`` is the command ``mgk``."""

import sys

try:
    from mgk.cli import main
except KeyboardInterrupt:
    sys.exit(130)

main()
