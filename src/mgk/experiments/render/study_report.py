"""What a study has measured, in files and documents. Does not import torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from mgk._util.files import write_file
from mgk._util.json_codec import write_compact
from mgk.experiments.plan import find_studies
from mgk.experiments.render.figure_png import draw
from mgk.experiments.render.figures import Figure
from mgk.experiments.result_store import TrialResult
from mgk.experiments.study import Study, read_study

SUMMARY = "summary.json"


@dataclass(frozen=True)
class StudyReport:
    """What a study has measured so far; ``id`` names its folder of results."""

    id: ClassVar[str]

    study: Study
    results: tuple[TrialResult, ...]

    @classmethod
    def read(cls, results: Path) -> Self | None:
        """The study in a folder of results; None where there is none."""
        if cls.id not in find_studies(results):
            return None
        study = read_study(results, cls.id).extended()
        return cls(study, study.measured)

    @classmethod
    def write(cls, results: Path) -> list[Path]:
        """Write the summary and the figure beside the plan; the paths."""
        found = cls.read(results)
        if found is None or not found.results:
            return []
        path = results / cls.id / SUMMARY
        write_compact(path, found.to_json())
        figure = found.figure()
        if figure is None or not figure.panels:
            return [path]
        write_file(image := path.with_name(f"{cls.id}.png"), draw(figure))
        return [path, image]

    @property
    def progress(self) -> str:
        """How many trials are done."""
        return f"{len(self.results)} of {len(self.study.trials)} trials are done"

    def to_json(self) -> dict[str, Any]:
        """The summary as JSON data."""
        return {
            "format": 1,
            "plan": self.study.sha256,
            "trials": {"done": len(self.results), "all": len(self.study.trials)},
        }

    def markdown(self) -> str:
        """Its tables and what follows from them."""
        raise NotImplementedError

    def figure(self) -> Figure | None:
        """Its figure, if it has one."""
        return None
