"""Errors for the user: what is wrong, in which file, at which line or byte."""

from typing import NoReturn

from mgk._util import errors


class DataError(errors.UserError):
    """The data cannot be read, written or trusted."""


class UsageError(errors.UsageError, DataError):
    """A wrong request: an unknown task, an option that the task does not have, a missing source."""


def fail(where: str, what: str) -> NoReturn:
    """Raise a ``DataError`` that starts with the place."""
    raise DataError(f"{where}: {what}")


def check_text(data: bytes, where: str, offset: int = 0) -> None:
    """Raise unless the bytes are UTF-8; ``offset`` is the position of the first of them in the file."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(where, f"byte {offset + error.start} (0x{data[error.start]:02x}) is not UTF-8 text")
