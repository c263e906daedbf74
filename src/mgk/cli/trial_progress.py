"""Progress over all trials of a plan; a line for each."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mgk._util.progress import Progress

if TYPE_CHECKING:
    from mgk.experiments.result_store import TrialResult
    from mgk.experiments.trials import Trial


class TrialProgress:
    """Takes the calls of :func:`mgk.experiments.runner.run_plan`.

    Args:
        progress: that shows it.
        work: of each trial that is run, in any unit.
    """

    def __init__(self, progress: Progress, work: Mapping["Trial", float]) -> None:
        self.progress, self.work = progress, work
        self.parts: dict[Trial, float] = {}
        # The part of a resumed trial that was done before: not at today's pace.
        self.before: dict[Trial, float] = {}
        self.finished = 0

    def update(self, trial: "Trial", part: float) -> None:
        """A part of a trial is done, from 0 to 1."""
        self.before.setdefault(trial, part if part < 1 else 0.0)
        self.parts[trial] = part
        done = sum(self.work[trial] * (part - self.before[trial]) for trial, part in self.parts.items())
        total = sum(work * (1 - self.before.get(trial, 0.0)) for trial, work in self.work.items())
        label = f"{self.finished} of {len(self.work)} trials"
        self.progress.update(done, total, details=f"{trial} {part:.0%}", label=label)

    def done(self, result: "TrialResult") -> None:
        """A trial is finished."""
        self.finished += 1
        self.update(result.trial, 1.0)
        left = f", {self.progress.time_left}" if self.progress.time_left else ""
        self.progress.note(
            f"{self.finished} of {len(self.work)}: {describe(result)}, in {result.seconds:.0f} s{left}"
        )


def describe(result: "TrialResult") -> str:
    """The trial and its test metric, if it has one."""
    if result.metric not in result.summary.metrics:
        return str(result.trial)
    unit = "%" if result.summary.metric == "accuracy" else ""
    return f"{result.trial}, {result.metric.replace('_', ' ')} {result.test:.2f}{unit}"
