"""In a process with TRITON_INTERPRET=1 the backend ``triton`` is ready and joins the tests of every backend."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from support import triton_interpreter

    triton_interpreter.install()
