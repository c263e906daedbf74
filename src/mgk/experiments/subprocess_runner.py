"""Runs a function in a process of its own, so that the memory it takes and the threads it starts are its alone.

The processes are forked from one that has imported torch and transformers and nothing more: each starts at once, with
the same memory in use. Where the system cannot fork, each imports them anew.
"""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

OnMessage = Callable[[Any], None]


class ProcessError(RuntimeError):
    """The process ended without an answer."""


def run_isolated(
    function: Callable[..., Any],
    *arguments: Any,
    on_message: OnMessage = lambda message: None,
    preload: tuple[str, ...] = (),
) -> Any:
    """Call ``function(*arguments, send)`` in a new process and return what it returns.

    Args:
        function: a function of a module, which the new process can import; ``send`` takes messages for ``on_message``.
        arguments: that can be pickled.
        on_message: called here with every message.
        preload: modules that all such processes need.

    Returns:
        The function's result; what it raises is raised here.

    Raises:
        ProcessError: when the process was killed or crashed.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(list(preload))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, function, arguments))
    process.start()
    sender.close()
    with _signals_passed_on(process):
        is_interrupted = False
        answer: tuple[str, Any] | None = None
        while True:
            try:
                kind, content = receiver.recv()
            except EOFError:
                break
            except KeyboardInterrupt:  # the terminal has told the process too: it saves, then ends
                is_interrupted = True
                continue
            if kind == "message":
                on_message(content)
            else:
                answer = (kind, content)
        process.join()
    if answer is None:
        if is_interrupted:
            raise KeyboardInterrupt
        raise ProcessError(f"the process of this run ended with code {process.exitcode} and no result")
    if answer[0] == "error":
        raise answer[1]
    return answer[1]


def _work(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(*arguments, lambda message: sender.send(("message", message)))
        sender.send(("result", result))
    except Exception as error:
        error.add_note(traceback.format_exc())  # where it happened does not cross the border by itself
        sender.send(("error", error))


@contextmanager
def _signals_passed_on(process: BaseProcess) -> Iterator[None]:
    """Hand SIGTERM on to the process, which saves before it ends; only the main thread may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hand_on(number: int, _: Any) -> None:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)

    old = signal.signal(signal.SIGTERM, hand_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
