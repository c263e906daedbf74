"""Runs the trials of tables and figures, each once, and writes what follows from them.

Each trial has a process of its own. A trial that is done is never run again, whichever experiment asks for it; one that
was interrupted goes on from its last checkpoint.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

from mgk._util.errors import Interrupted
from mgk.data.errors import DataError
from mgk.data.preparation import prepared
from mgk.data.task_registry import find_task
from mgk.experiments.artifacts import analysis_path, read_analysis, write_analysis
from mgk.experiments.model_analysis import ModelAnalysis
from mgk.experiments.reproduce.registry import Experiment
from mgk.experiments.result_store import ResultStore, TrialResult
from mgk.experiments.subprocess_runner import ProcessError, run_isolated
from mgk.experiments.trials import Trial, changes
from mgk.training.errors import TrainingError
from mgk.training.recipe import Recipe, read_recipe
from mgk.training.run_dir import BEST, CHECKPOINTS, RECIPE

MATRICES = {"paper": 1000, "laptop": 1000, "smoke": 8}
# Imported once, for all trials.
PRELOAD = ("mgk.experiments.reproduce.collect", "torch.utils.tensorboard")


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
        trials: all of them, each once, in the order of the experiments.
        looks: those among them that a figure looks into.
        commands: the command that makes each trial.
        matrices: of a layer, whose ranks are taken.
    """

    trials: tuple[Trial, ...]
    looks: frozenset[Trial]
    commands: Mapping[Trial, str]
    matrices: int

    def missing(self, results: ResultStore, *, overwrite: bool = False) -> list[Trial]:
        """The trials that are not done or not looked into, or, if those are to be replaced, of another recipe."""
        return [
            trial
            for trial in self.trials
            if not results.has(trial)
            or (trial in self.looks and not analysis_path(results, trial).is_file())
            or (overwrite and _is_stale(trial, results))
        ]


# Told of a trial: which part of it is done, from 0 to 1.
OnProgress = Callable[[Trial, float], None]
# Told of a trial that is finished.
OnDone = Callable[[Trial, TrialResult], None]


def make_plan(
    experiments: Sequence[Experiment],
    preset: str,
    *,
    seeds: int | None = None,
    tasks: Sequence[str] | None = None,
    matrices: int | None = None,
) -> Plan:
    """The trials of some experiments at a preset."""
    commands: dict[Trial, str] = {}
    looks = set()
    for experiment in experiments:
        for trial in experiment.trials(preset, seeds=seeds, tasks=tasks):
            commands.setdefault(trial, experiment.command(preset, seeds=seeds, tasks=tasks))
            if experiment.kind == "maps":
                looks.add(trial)
    return Plan(tuple(commands), frozenset(looks), commands, matrices or MATRICES[preset])


def check_data(trials: Sequence[Trial]) -> None:
    """Raise, before anything is trained, when data are absent that cannot be made on the way."""
    wrong = []
    for recipe in {trial.task: trial.recipe for trial in trials}.values():
        if recipe.data.options or find_task(recipe.data.name).is_synthetic:
            continue
        try:
            prepared(recipe.data.name, recipe.data.folder)
        except DataError as error:
            wrong.append(str(error))
    if wrong:
        raise DataError("; ".join(wrong))


def runs_folder() -> Path:
    """Where runs live: ``MGK_RUNS``, else the platform's folder for the data of applications."""
    chosen = os.environ.get("MGK_RUNS")
    if chosen:
        return Path(chosen)
    from platformdirs import user_data_path

    return user_data_path("mgk", appauthor=False) / "runs" / "reproduce"


def run_plan(
    plan: Plan,
    results: ResultStore,
    runs: Path,
    *,
    jobs: int = 1,
    overwrite: bool = False,
    on_progress: OnProgress = lambda trial, part: None,
    on_done: OnDone = lambda trial, record: None,
) -> None:
    """Run whatever is missing.

    Args:
        plan: the trials.
        results: where records go, each as soon as its trial is done.
        runs: the folder of the runs.
        jobs: trials at once, the cores shared out among them.
        overwrite: whether to run anew the trials that were measured by another recipe.
        on_progress: told how far a trial is.
        on_done: told of every trial that is finished now.
    """
    if not overwrite:
        for trial in plan.trials:
            results.check_same(trial)
    threads = max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 else None
    queue = plan.missing(results, overwrite=overwrite)[::-1]
    run = partial(_run, plan, results, runs, jobs, threads, on_progress)
    with ThreadPoolExecutor(jobs) as pool, _signals_passed_on() as is_stopped:
        waiting: dict[Future[TrialResult], Trial] = {}
        failed: BaseException | None = None
        while (queue and failed is None and not is_stopped.is_set()) or waiting:
            while queue and len(waiting) < jobs and failed is None and not is_stopped.is_set():
                trial = queue.pop()
                waiting[pool.submit(run, trial)] = trial
            for future in wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED).done:
                trial = waiting.pop(future)
                if (error := future.exception()) is None:
                    on_done(trial, future.result())
                elif failed is None:
                    failed = error
        if is_stopped.is_set():
            raise Interrupted("interrupted; the same command goes on where it was")
        if isinstance(failed, ProcessError):
            raise TrainingError(f"{failed}; the same command goes on where it was") from failed
        if failed is not None:
            raise failed


def _run(
    plan: Plan,
    results: ResultStore,
    runs: Path,
    jobs: int,
    threads: int | None,
    on_progress: OnProgress,
    trial: Trial,
) -> TrialResult:
    """One trial, in a process of its own, with what a figure sees in it."""
    folder = trial.place(runs)
    looks = trial in plan.looks and read_analysis(results, trial) is None
    record = results.read(trial)
    is_stale = record is not None and _is_stale(trial, results)
    has_run = (folder / RECIPE).is_file() and not _differs(trial.recipe, folder)
    if record is None or is_stale or (looks and not has_run):
        share = 0.9 if trial in plan.looks else 1.0
        record = run_isolated(
            _train,
            trial,
            folder,
            has_run,
            threads,
            jobs,
            plan.commands[trial],
            on_message=lambda part: on_progress(trial, share * part),
            preload=PRELOAD,
        )
        analysis_path(results, trial).unlink(missing_ok=True)  # of another model than this one
        results.write(record)
        looks = trial in plan.looks
    if looks:
        inside = run_isolated(
            _look,
            trial,
            folder,
            plan.matrices,
            threads,
            on_message=lambda part: on_progress(trial, 0.9 + 0.1 * part),
            preload=PRELOAD,
        )
        write_analysis(results, inside)
    for name in (CHECKPOINTS, BEST):  # large, and of no more use
        shutil.rmtree(folder / name, ignore_errors=True)
    return record


def _train(
    trial: Trial,
    folder: Path,
    is_resumed: bool,
    threads: int | None,
    jobs: int,
    command: str,
    send: Callable[[Any], None],
) -> TrialResult:
    import torch

    from mgk.experiments.reproduce.collect import collect_result
    from mgk.training.run import train

    if threads is not None:
        torch.set_num_threads(threads)
    begin = time.perf_counter()
    train(
        trial.recipe,
        folder,
        resume=is_resumed or not folder.exists(),
        overwrite=folder.exists() and not is_resumed,
        on_step=lambda done, total: send(done / total),
    )
    return collect_result(folder, command=command, jobs=jobs, seconds=time.perf_counter() - begin)


def _look(trial: Trial, folder: Path, matrices: int, threads: int | None, send: Callable[[Any], None]) -> ModelAnalysis:
    import torch

    from mgk.experiments.reproduce.collect import analyze_model

    if threads is not None:
        torch.set_num_threads(threads)
    return analyze_model(trial, folder, matrices=matrices, on_step=lambda done, total: send(done / total))


def _is_stale(trial: Trial, results: ResultStore) -> bool:
    """Whether a trial was measured by another recipe than it has now."""
    record = results.read(trial)
    return record is not None and bool(changes(trial.recipe, record.recipe))


def _differs(recipe: Recipe, folder: Path) -> bool:
    """Whether a run cannot be gone on with by this recipe."""
    return read_recipe(folder / RECIPE) != recipe


@contextmanager
def _signals_passed_on() -> Iterator[threading.Event]:
    """While it is entered, Ctrl-C and SIGTERM tell all trials to save and end; the event tells that one came.

    A terminal's Ctrl-C reaches the trials by itself as well; two within a second are one wish.
    """
    is_stopped = threading.Event()

    def hand_on(number: int, frame: Any) -> None:
        is_stopped.set()
        for process in active_children():
            if process.pid is not None:
                os.kill(process.pid, signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield is_stopped
        return
    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield is_stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
