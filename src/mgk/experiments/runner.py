"""Runs trials, each in a process of its own, with its own memory and threads.

A trial that has a result is not run again; an interrupted one resumes. Processes are
forked from a server that has imported torch and transformers, so each starts at once.
A process pool would not do: when one worker is killed, it ends all others.
"""

import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Callable, Hashable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from signal import SIGINT
from typing import Any, TypeVar

from mgk._util.errors import Interrupted
from mgk._util.signals import forwarding, raise_on_signals, starting_processes, unblock
from mgk.experiments.plan import Plan
from mgk.experiments.result_store import ResultStore, TrialResult
from mgk.experiments.trials import Trial, changes
from mgk.training.errors import TrainingError
from mgk.training.run_dir import BEST, CHECKPOINTS, MODEL, RECIPE, SUMMARY, read_run_recipe

# Imported once, for all trials.
_PRELOAD = [
    "mgk.training.run",
    "mgk.experiments.reproduce.collect",
    "mgk.experiments.model_analysis",
    "torch.utils.tensorboard",
]
_CONTINUES = "the same command continues from the last checkpoint"
# The part of a trial that is training, where its model is analyzed afterwards.
_TRAINING_SHARE = 0.9

_Key = TypeVar("_Key", bound=Hashable)
Send = Callable[[Any], None]
OnProgress = Callable[[Trial, float], None]
OnDone = Callable[[TrialResult], None]


def default_runs_folder() -> Path:
    """``MGK_RUNS``, else the platform's folder for data."""
    if chosen := os.environ.get("MGK_RUNS"):
        return Path(chosen)
    from platformdirs import user_data_path

    return user_data_path("mgk", appauthor=False) / "runs" / "reproduce"


def run_plan(
    plan: Plan,
    store: ResultStore,
    runs: Path,
    *,
    jobs: int = 1,
    on_progress: OnProgress = lambda trial, part: None,
    on_done: OnDone = lambda result: None,
) -> None:
    """Run the trials that are missing.

    Args:
        store: where results go, each as soon as its trial is done.
        jobs: trials at once, which share the cores.
        on_progress: called with a trial and its part done, from 0 to 1.
        on_done: called with the result of every trial that was run.
    """
    missing = plan.missing(store, runs)
    calls = {trial: (plan, trial, store, trial.path(runs), jobs) for trial in missing}
    run_isolated(
        _run_trial, calls, jobs=jobs, on_message=on_progress, on_result=lambda trial, result: on_done(result)
    )


def _run_trial(plan: Plan, trial: Trial, store: ResultStore, run: Path, jobs: int, send: Send) -> TrialResult:
    """Train, store the result, analyze the model where a figure shows it."""
    import torch

    from mgk.experiments.model_analysis import analyze_model
    from mgk.experiments.reproduce.collect import collect_result
    from mgk.training.run import train

    if jobs > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    is_analyzed, is_anew = trial in plan.analyzed, plan.overwrite == "all"
    share = _TRAINING_SHARE if is_analyzed else 1.0
    is_resumed = (run / RECIPE).is_file() and not is_anew and read_run_recipe(run) == trial.recipe
    has_model = is_resumed and (run / MODEL).is_dir()
    if (run / SUMMARY).is_file() and not has_model:  # deleted in part
        is_resumed = False
    result = store.read(trial)
    if result is None or not has_model or changes(trial.recipe, result.recipe):
        begin = time.perf_counter()
        train(
            trial.recipe,
            run,
            resume=is_resumed or not run.exists(),
            overwrite=run.exists() and not is_resumed,
            on_step=lambda done, total: send(share * done / total),
        )
        seconds = time.perf_counter() - begin
        result = collect_result(
            run, trial=trial, command=plan.commands[trial], jobs=jobs, seconds=seconds, plan=plan.sha256
        )
        store.remove(trial)  # the analysis of the model before it, too
        store.write(result)
    if is_analyzed:
        analysis = analyze_model(
            trial,
            run,
            rank_samples=plan.rank_samples,
            on_step=lambda done, total: send(share + (1 - share) * done / total),
        )
        store.write(analysis)
    for name in (CHECKPOINTS, BEST):  # large, and of no more use
        shutil.rmtree(run / name, ignore_errors=True)
    return result


def run_isolated(
    function: Callable[..., Any],
    calls: Mapping[_Key, tuple[Any, ...]],
    *,
    jobs: int = 1,
    on_message: Callable[[_Key, Any], None] = lambda key, message: None,
    on_result: Callable[[_Key, Any], None] = lambda key, result: None,
) -> dict[_Key, Any]:
    """Call ``function(*arguments, send)`` in a process each; results by key.

    ``send`` takes messages for ``on_message``. After a failure or a signal, which is
    passed on, nothing more is started. Then ``Interrupted``, ``TrainingError`` for a
    process that was killed, or the first error of a call is raised.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(_PRELOAD)
    waiting = list(calls)[::-1]
    running: dict[Connection, tuple[_Key, Any]] = {}
    results: dict[_Key, Any] = {}
    failures: list[Exception] = []
    with forwarding(
        lambda: [process.pid for process in multiprocessing.active_children() if process.pid]
    ) as signals:
        while running or (waiting and not failures and not signals):
            while waiting and len(running) < jobs and not failures and not signals:
                receiver, sender = context.Pipe(duplex=False)
                key = waiting.pop()
                process = context.Process(target=_work, args=(sender, function, calls[key]))
                with starting_processes():  # which get a signal that comes now
                    if signals:  # it came just before
                        break
                    process.start()
                sender.close()
                running[receiver] = key, process
            for receiver in wait(list(running), timeout=1.0):
                assert isinstance(receiver, Connection)
                key, process = running[receiver]
                try:
                    kind, content = receiver.recv()
                except EOFError:
                    del running[receiver]
                    process.join()
                    if key not in results and not failures:
                        end = f"the process ended with code {process.exitcode} and no result"
                        failures.append(TrainingError(f"{key}: {end}; {_CONTINUES}"))
                    continue
                if kind == "message":
                    on_message(key, content)
                elif kind == "result":
                    results[key] = content
                    on_result(key, content)
                else:
                    failures.append(content)
    if signals:
        raise Interrupted(f"interrupted; {_CONTINUES}", signals[0])
    if failures:
        raise failures[0]
    return results


def _work(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The new process: signals stop it; without its parent it ends."""

    def send(kind: str, content: Any) -> None:
        try:
            sender.send((kind, content))
        except OSError:  # the parent is gone
            os._exit(1)

    raise_on_signals()
    try:
        unblock()
        result = function(*arguments, lambda message: send("message", message))
        send("result", result)
    except KeyboardInterrupt as stop:
        send("error", Interrupted("interrupted", getattr(stop, "number", SIGINT)))
    except Exception as error:
        error.add_note(traceback.format_exc())  # pickling loses the traceback
        send("error", error)
