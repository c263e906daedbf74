import os
import signal

import pytest

from mgk.experiments.subprocess_runner import ProcessError, run_isolated


def add(one, two, send):
    send(one)
    send(two)
    return one + two, os.getpid()


def fail(text, send):
    raise ValueError(text)


def die(send):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_result_and_messages_from_another_process():
    messages = []
    result, process = run_isolated(add, 2, 3, on_message=messages.append)
    assert (result, messages) == (5, [2, 3])
    assert process != os.getpid()


def test_an_error_comes_back_with_its_place():
    with pytest.raises(ValueError, match="too bad") as caught:
        run_isolated(fail, "too bad")
    assert "in fail" in "".join(caught.value.__notes__)


def test_a_process_that_dies_is_noticed():
    with pytest.raises(ProcessError, match="ended with code -9 and no result"):
        run_isolated(die)
