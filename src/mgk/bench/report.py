"""The outcome of a benchmark, as data."""

from dataclasses import asdict, dataclass
from typing import Any

from mgk._util.machine import Machine
from mgk.bench.settings import Passes, Settings

YARDSTICK_BACKEND = "torch"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One alternative in one kind of pass."""

    variant: str
    heads: int
    backend: str  # YARDSTICK_BACKEND: scaled_dot_product_attention itself
    is_auto: bool  # whether backend="auto" takes this one
    passes: Passes
    milliseconds: float  # the median over rounds
    ratio: float  # to the yardstick in the same round, the median over rounds
    ratio_min: float
    ratio_max: float
    peak_extra_mb: float | None  # 10^6 bytes; None: not measured

    @property
    def is_yardstick(self) -> bool:
        """Whether the ratios of the other rows are to this one."""
        return self.backend == YARDSTICK_BACKEND


@dataclass(frozen=True, kw_only=True)
class Report:
    """Every row, with what is needed to measure it again."""

    settings: Settings
    machine: Machine
    rows: tuple[Row, ...]
    notes: tuple[str, ...]  # what was left out, and why

    def to_json(self) -> dict[str, Any]:
        """The report in the types of JSON."""
        return {"benchmark": "attention", **_lists(asdict(self))}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Report":
        """The report that ``to_json`` made this of."""
        settings = {name: _tuple(value) for name, value in data["settings"].items()}
        return cls(
            settings=Settings(**settings),
            machine=Machine(**data["machine"]),
            rows=tuple(Row(**row) for row in data["rows"]),
            notes=tuple(data["notes"]),
        )


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _lists(item) for name, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, tuple) else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
