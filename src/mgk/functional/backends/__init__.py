"""One file a backend, each with NAME, ``refusal(call)`` (why it cannot serve a call, or None) and ``attention(call)``."""
