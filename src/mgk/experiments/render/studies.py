"""The studies that have a report. Does not import torch."""

from mgk.experiments.render.frontier import Frontier
from mgk.experiments.render.initialisation import Initialisation
from mgk.experiments.render.learning_rates import LearningRates
from mgk.experiments.render.study_report import StudyReport

STUDIES: dict[str, type[StudyReport]] = {
    report.id: report for report in (Initialisation, LearningRates, Frontier)
}
