"""What the paper published: every number of its tables, as printed. Free of torch.

Accuracies are in per cent, means over 5 seeds; perplexities are of WikiText-103.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mgk.experiments.trials import ModelSpec

AVERAGE = "average"
LRA = ("listops", "text", "retrieval")
# In LRA and not in the paper: columns of ours.
EXTRA_TASKS = ("image", "pathfinder")
SEEDS = 5


@dataclass(frozen=True)
class PublishedTable:
    """One table.

    Attributes:
        number: the paper's.
        columns: tasks and "average"; of Table 3, "validation" and "test".
        rows: the models from top to bottom, with a number for each column.
    """

    number: int
    columns: tuple[str, ...]
    rows: Mapping[ModelSpec, tuple[float, ...]]

    def value(self, model: ModelSpec, column: str) -> float | None:
        """A number of the table; None where there is none."""
        row = self.rows.get(model)
        return row[self.columns.index(column)] if row is not None and column in self.columns else None


_ACCURACIES = (*LRA, AVERAGE)

TABLE_1 = PublishedTable(
    1,
    _ACCURACIES,
    {
        ModelSpec("softmax", 8): (37.03, 65.71, 81.74, 61.49),
        ModelSpec("smgk", 4): (37.25, 65.51, 82.79, 61.85),
        ModelSpec("mgk", 4): (36.98, 65.69, 82.23, 61.63),
        ModelSpec("softmax", 4): (36.89, 65.26, 81.54, 61.23),
        ModelSpec("smgk", 2): (37.35, 65.17, 82.20, 61.57),
        ModelSpec("mgk", 2): (36.88, 65.37, 81.83, 61.36),
        ModelSpec("softmax", 2): (36.76, 64.90, 79.1, 60.25),
        ModelSpec("smgk", 1): (37.31, 65.04, 81.23, 61.19),
        ModelSpec("mgk", 1): (37.13, 65.40, 80.63, 61.05),
        ModelSpec("softmax", 1): (36.81, 64.48, 77.9, 59.73),
    },
)

TABLE_2 = PublishedTable(
    2,
    _ACCURACIES,
    {
        ModelSpec("linear", 8): (19.17, 65.85, 81.18, 55.40),
        ModelSpec("smlk", 4): (20.11, 65.74, 81.53, 55.79),
        ModelSpec("mlk", 4): (20.06, 65.7, 81.34, 55.7),
        ModelSpec("linear", 4): (19.37, 65.81, 81.65, 55.61),
        ModelSpec("smlk", 2): (19.88, 65.61, 81.66, 55.71),
        ModelSpec("mlk", 2): (20.12, 65.72, 80.80, 55.54),
        ModelSpec("linear", 2): (18.35, 65.94, 80.94, 55.07),
        ModelSpec("smlk", 1): (18.87, 65.57, 80.37, 54.93),
        ModelSpec("mlk", 1): (18.34, 65.70, 81.09, 55.04),
        ModelSpec("linear", 1): (18.60, 65.70, 80.6, 54.96),
    },
)

TABLE_3 = PublishedTable(
    3,
    ("validation", "test"),
    {
        ModelSpec("softmax", 8): (33.15, 34.29),
        ModelSpec("mgk", 4): (33.28, 34.21),
        ModelSpec("smgk", 8): (32.92, 33.99),
        ModelSpec("mgk", 8): (32.74, 33.93),
        ModelSpec("linear", 8): (38.07, 39.08),
        ModelSpec("mlk", 4): (38.49, 39.46),
        ModelSpec("mlk", 8): (37.78, 38.99),
    },
)

# "Soft-E" is setting B, whose prior is updated by the M-step; without an addition it is setting A.
TABLE_4 = PublishedTable(
    4,
    _ACCURACIES,
    {
        ModelSpec("smgk", 1, e_step="hard"): (37.25, 64.7, 81.29, 61.08),
        ModelSpec("smgk", 1, prior="em"): (37.05, 64.68, 81.44, 61.05),
        ModelSpec("smgk", 1): (37.31, 65.04, 81.23, 61.19),
        ModelSpec("mgk", 1, e_step="hard"): (19.40, 65.40, 80.72, 55.17),
        ModelSpec("mgk", 1, prior="em"): (33.85, 65.25, 80.73, 59.94),
        ModelSpec("mgk", 1): (37.13, 65.40, 80.63, 61.05),
    },
)

TABLES: Mapping[str, PublishedTable] = {"table1": TABLE_1, "table2": TABLE_2, "table3": TABLE_3, "table4": TABLE_4}
