"""The error whose message is one sentence for the user. Free of torch."""


class BenchError(RuntimeError):
    """A benchmark that cannot be run as asked."""
