"""Errors for the user: one sentence, and the exit code of the command."""

import signal


def first_line(error: Exception) -> str:
    """The first line of its message; its kind where there is none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class UserError(Exception):
    """A job that failed for a reason that the user can act on."""

    exit_code = 1


class UsageError(UserError, ValueError):
    """A wrong request: an option, an argument or a file that cannot be meant."""

    exit_code = 2


class Interrupted(UserError):  # noqa: N818  nothing went wrong
    """A signal ended the job, which is saved; exit code 128 + the signal."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message, number)  # both, so that it can be pickled
        self.number = number
        self.exit_code = 128 + number

    def __str__(self) -> str:
        return str(self.args[0])
