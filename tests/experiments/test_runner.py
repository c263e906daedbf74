"""Functions run in processes of their own, whose results, messages, errors and deaths come back."""

import os
import signal

import pytest

from mgk.experiments.runner import run_isolated
from mgk.training.errors import TrainingError


def add(one, two, send):
    send(one)
    send(two)
    return one + two, os.getpid()


def fail(text, send):
    raise ValueError(text)


def die(send):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_and_messages_from_other_processes(jobs):
    messages = {"a": [], "b": []}
    found = run_isolated(
        add,
        {"a": (2, 3), "b": (4, 5)},
        jobs=jobs,
        on_message=lambda key, message: messages[key].append(message),
    )
    assert {key: total for key, (total, _) in found.items()} == {"a": 5, "b": 9}
    assert messages == {"a": [2, 3], "b": [4, 5]}
    assert len({os.getpid(), *(process for _, process in found.values())}) == 3


def test_an_error_comes_back_with_its_traceback():
    with pytest.raises(ValueError, match="too bad") as caught:
        run_isolated(fail, {"a": ("too bad",), "b": ("not started",)})
    assert "in fail" in "".join(caught.value.__notes__)


def test_a_process_that_dies_is_noticed():
    with pytest.raises(TrainingError, match="a: the process ended with code -9 and no result"):
        run_isolated(die, {"a": ()})
