"""Every number in a table of the README and of the page on speed comes from a file under results/."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from mgk.experiments.render.bench_tables import bench_parts, read_bench
from mgk.experiments.render.markdown_sections import fill
from mgk.training.errors import TrainingError

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")
REFRESH = "mgk report --update-docs README.md --update-docs docs/performance.md"

_GENERATED = re.compile(r"<!-- generated: ([\w-]+) -->\n.*?<!-- end of generated: \1 -->", re.DOTALL)
_CODE = re.compile(r"```.*?```", re.DOTALL)


@dataclass(frozen=True)
class Cell:
    heading: str
    row: str
    column: str
    text: str

    def __str__(self) -> str:
        return f"{self.text!r} under {self.heading!r}, row {self.row!r}, column {self.column!r}"


def cells(text: str) -> list[Cell]:
    """Those of every table, without the first column, which names the rows."""
    found: list[Cell] = []
    heading, header = "", None
    for line in _CODE.sub("", text).splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        parts = [part.strip() for part in line.strip().strip("|").split("|")] if line.startswith("|") else None
        if parts is None or header is None:
            header = parts
        elif not set(line) <= set("|-: "):
            found += [Cell(heading, parts[0], *pair) for pair in zip(header[1:], parts[1:], strict=True)]
    return found


def differences(text: str, filled: str) -> list[str]:
    """Each cell with a number that stands outside the generated parts, or that is another in the filled document."""
    typed = [cell for cell in cells(_GENERATED.sub("", text)) if re.search(r"\d", cell.text)]
    wrong = [f"{cell} is typed by hand" for cell in typed]
    present, wanted = cells(text), cells(filled)
    if len(wanted) != len(present):
        return [*wrong, f"the tables have {len(present)} cells, those of the results {len(wanted)}"]
    pairs = zip(present, wanted, strict=True)
    return wrong + [f"{mine}: the results say {theirs}" for mine, theirs in pairs if mine != theirs]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_every_cell_is_what_the_results_say(path, committed):
    text = path.read_text(encoding="utf-8")
    assert len([cell for cell in cells(text) if re.search(r"\d", cell.text)]) >= 20
    filled = fill(text, committed)
    assert not differences(text, filled), f"after new results: {REFRESH}"
    # sentences in the generated parts have numbers too
    assert filled == text, f"after new results: {REFRESH}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_any_changed_number_is_found_and_named(path):
    text = path.read_text(encoding="utf-8")
    rows = list(re.finditer(r"(?m)^\| .*\d\.\d.* \|$", text))
    assert rows
    for row in rows:
        place = row.start() + row[0].rindex(".") + 1
        digit = str((int(text[place]) + 1) % 10)
        (message,) = differences(text[:place] + digit + text[place + 1 :], text)
        assert f"row '{row[0].split('|')[1].strip()}'" in message


def test_a_number_that_is_typed_by_hand_is_named():
    text = "## Speed\n\n| model | time |\n| --- | ---: |\n| mgk | 0.10 |\n"
    assert differences(text, text) == ["'0.10' under 'Speed', row 'mgk', column 'time' is typed by hand"]


def test_what_is_not_measured_has_its_command(tmp_path):
    parts = bench_parts(read_bench(tmp_path), "results")
    assert parts["bench"]() == "Not measured yet: `mgk bench kernels --json results/bench/kernels.json`."
    assert parts["bench-train"]() == "Not measured yet: `mgk bench train --json results/bench/train.json`."


def test_the_roofline_is_a_table_of_parts():
    shape = {"batch": 2, "heads": 4, "length": 2048, "head_dim": 32}
    names = ("multiply-add", "score product", "softmax", "value product", "sgemm")
    rate = {"experiment": "rate", "giga_per_second": 150.0, "share_of_peak": 0.5}
    parts = ("", "score_products_", "softmax_", "value_product_", "rest_")
    forward = {f"{part}milliseconds": number for number, part in enumerate(parts, 1)}
    forward |= {"products_milliseconds_at_peak": 6, "share_of_peak": 0.25}
    rows = [rate | {"operation": name} for name in names]
    report = {"settings": shape, "rows": [*rows, {"experiment": "forward", "variant": "mgk", **forward}]}
    text = bench_parts({"roofline": report}, "results")["bench-roofline"]()
    assert "is 150 GFLOP/s. The kernel's score products reach 0.50 of it" in text
    assert "| mgk | 1.00 | 2.00 | 3.00 | 4.00 | 5.00 | 6.00 | 0.25 |" in text


def test_rows_that_were_left_out_are_dashes(committed):
    kernels = committed.bench["kernels"]
    fewer = {**kernels, "rows": [row for row in kernels["rows"] if row["alternative"] != "mgk hard, 4 heads"]}
    text = bench_parts({"kernels": fewer}, "results")["bench"]()
    assert "| mgk hard, 4 heads | – | – | – | – |" in text
    assert "train.json" not in text


def test_files_that_no_benchmark_wrote_are_told(tmp_path):
    (tmp_path / "train.json").write_text("{")
    with pytest.raises(TrainingError, match=r"train\.json: this is not the file of a benchmark"):
        read_bench(tmp_path)
    (tmp_path / "train.json").write_text(json.dumps({"settings": {"heads": [1], "shapes": ["text"]}}))
    with pytest.raises(TrainingError, match="results/bench: a file of the benchmarks lacks 'rows'"):
        bench_parts(read_bench(tmp_path), "results")["bench-train"]()
