"""Errors for the user: what is wrong, and in which file, line or byte."""

from typing import NoReturn

from mgk._util import errors


class DataError(errors.UserError):
    """The data cannot be read, written or trusted."""


class UsageError(errors.UsageError, DataError):
    """A wrong request, such as an unknown task or option."""


def fail(where: str, what: str) -> NoReturn:
    """Raise a ``DataError`` that starts with the place."""
    raise DataError(f"{where}: {what}")


def check_text(data: bytes, where: str, offset: int = 0) -> None:
    """Raise unless the bytes, at ``offset`` of a file, are UTF-8."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        fail(where, f"byte {offset + error.start} (0x{data[error.start]:02x}) is not UTF-8 text")
