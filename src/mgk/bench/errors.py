"""The error whose message is one sentence for the user."""

from mgk._util.errors import UserError


class BenchError(UserError):
    """A benchmark that cannot be run as asked."""
