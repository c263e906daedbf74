"""Errors whose message is one sentence for the user."""

from mgk._util.errors import UsageError, UserError


class TrainingError(UserError):
    """The run cannot go on: data, disk, values that are not finite."""


class RecipeError(UsageError, TrainingError):
    """A wrong request: an unknown task, preset or field, or a wrong value."""
