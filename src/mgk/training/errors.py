"""Errors whose message is one sentence for the user."""


class TrainingError(Exception):
    """The run cannot go on: data, disk, numbers, a run folder that is not what it should be."""


class RecipeError(TrainingError, ValueError):
    """The request itself is wrong: an unknown task, preset or field, a value that a field cannot have."""


class Interrupted(TrainingError):  # noqa: N818  nothing went wrong
    """A signal stopped the run; its state is saved."""
