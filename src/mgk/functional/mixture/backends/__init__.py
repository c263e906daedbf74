"""One file a backend, each with NAME, ``refusal(call)`` (why it cannot serve a call) and ``attention(call)``."""
