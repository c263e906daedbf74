"""These tests run in a process with TRITON_INTERPRET=1, which ``test_interpreter.py`` starts."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
