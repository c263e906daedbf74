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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from mgk._util.errors import Interrupted
from mgk._util.signals import forwarding
from mgk.experiments.plan import Plan
from mgk.experiments.result_store import ResultStore, TrialResult
from mgk.experiments.trials import Trial, changes
from mgk.training.errors import TrainingError
from mgk.training.recipe import read_recipe
from mgk.training.run_dir import BEST, CHECKPOINTS, RECIPE

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
    """``MGK_RUNS``, else the platform's folder for the data of applications."""
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
        on_progress: called with a trial and the part of it that is done, from 0 to 1.
        on_done: called with the result of every trial that was run.
    """
    calls = {
        trial: (
            _Job(
                trial=trial,
                store=store,
                run=trial.path(runs),
                command=plan.commands[trial],
                jobs=jobs,
                rank_samples=plan.rank_samples if trial in plan.analyzed else 0,
                is_anew=plan.overwrite == "all",
            ),
        )
        for trial in plan.missing(store, runs)
    }
    run_isolated(_run_trial, calls, jobs=jobs, on_message=on_progress, on_result=lambda trial, result: on_done(result))


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A trial and how it is run.

    Attributes:
        rank_samples: of the analysis of its model; 0 for none.
        is_anew: whether to train anew what is finished.
    """

    trial: Trial
    store: ResultStore
    run: Path
    command: str
    jobs: int
    rank_samples: int
    is_anew: bool


def _run_trial(job: _Job, send: Send) -> TrialResult:
    """Train, collect and store the result, analyze the model where a figure shows it."""
    import torch

    from mgk.experiments.model_analysis import analyze_model
    from mgk.experiments.reproduce.collect import collect_result
    from mgk.training.run import train

    if job.jobs > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.jobs))
    trial, store, run = job.trial, job.store, job.run
    share = _TRAINING_SHARE if job.rank_samples else 1.0
    is_resumed = (run / RECIPE).is_file() and not job.is_anew and read_recipe(run / RECIPE) == trial.recipe
    result = store.read(trial)
    is_current = result is not None and not job.is_anew and not changes(trial.recipe, result.recipe)
    if result is None or not is_current or (job.rank_samples and not is_resumed):
        store.remove(trial)
        begin = time.perf_counter()
        train(
            trial.recipe,
            run,
            resume=is_resumed or not run.exists(),
            overwrite=run.exists() and not is_resumed,
            on_step=lambda done, total: send(share * done / total),
        )
        result = collect_result(run, command=job.command, jobs=job.jobs, seconds=time.perf_counter() - begin)
        store.write(result)
    if job.rank_samples:
        analysis = analyze_model(
            trial,
            run,
            rank_samples=job.rank_samples,
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
    """Call ``function(*arguments, send)`` in a new process for each of ``calls``; the results, by key.

    After a failure or a signal nothing more is started, and what runs comes to its end; SIGINT and SIGTERM are passed
    on to it.

    Args:
        function: of a module, which the new process can import; ``send`` takes messages for ``on_message``.

    Raises:
        Interrupted: after a signal.
        TrainingError: when a process was killed or crashed.
        Exception: the first that a call raised.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(_PRELOAD)
    waiting = list(calls)[::-1]
    running: dict[Connection, tuple[_Key, Any]] = {}
    results: dict[_Key, Any] = {}
    failures: list[Exception] = []
    with forwarding(lambda: [process.pid for process in multiprocessing.active_children() if process.pid]) as signals:
        while running or (waiting and not failures and not signals):
            while waiting and len(running) < jobs and not failures and not signals:
                receiver, sender = context.Pipe(duplex=False)
                key = waiting.pop()
                process = context.Process(target=_work, args=(sender, function, calls[key]))
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
        raise Interrupted(f"interrupted; {_CONTINUES}")
    if failures:
        raise failures[0]
    return results


def _work(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(*arguments, lambda message: sender.send(("message", message)))
        sender.send(("result", result))
    except KeyboardInterrupt:
        sender.send(("error", Interrupted("interrupted")))
    except Exception as error:
        error.add_note(traceback.format_exc())  # pickling loses the traceback
        sender.send(("error", error))
