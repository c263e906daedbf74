"""Errors whose message is one sentence for the user, each with the exit code of the command that meets it."""


class UserError(Exception):
    """A job that failed for a reason that the user can act on."""

    exit_code = 1


class UsageError(UserError, ValueError):
    """A wrong request: an option, an argument or a file that cannot be meant."""

    exit_code = 2


class Interrupted(UserError):  # noqa: N818  nothing went wrong
    """A signal ended the job; what was done is saved."""
