"""Errors whose message is one sentence for the user."""

from mgk._util.errors import UsageError, UserError


class TrainingError(UserError):
    """The run cannot go on: data, disk, numbers, a run folder that is not what it should be."""


class RecipeError(UsageError, TrainingError):
    """The request itself is wrong: an unknown task, preset or field, a value that a field cannot have."""
