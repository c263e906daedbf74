"""Documents say what was measured: generated parts are those of the results, and numbers come from files."""

import json
import re
from pathlib import Path

import pytest
from synthetic_results import record, stored

from mgk.experiments.artifacts import Artifacts, gather
from mgk.experiments.evidence.effects import PresetResults
from mgk.experiments.render.markdown_sections import fill, fill_document
from mgk.experiments.render.numbers import short
from mgk.experiments.reproduce.registry import EXPERIMENTS
from mgk.training.errors import RecipeError, TrainingError

ROOT = Path(__file__).parents[2]
DOCUMENTS = tuple(
    ROOT / name
    for name in (
        "README.md",
        *(f"docs/{n}.md" for n in ("reproduction", "frontier", "performance", "initialisation")),
    )
)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Artifacts:
    return gather(stored(tmp_path_factory.mktemp("all") / "results"), "laptop")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_committed_documents_are_those_of_the_committed_results(path, committed):
    text = path.read_text(encoding="utf-8")
    assert "<!-- generated: " in text
    # After new results: mgk report with --update-docs FILE for each of these documents
    assert fill(text, committed) == text


def test_the_committed_tables_are_those_of_the_committed_trials(committed):
    for name, table in committed.tables.items():
        path = ROOT / "results" / "tables" / committed.results.preset / f"{name}.json"
        assert json.loads(path.read_bytes()) == json.loads(json.dumps(table.to_json()))


def test_committed_cells_are_small():
    for path in (ROOT / "results" / "trials").glob("*/*/*.json"):
        assert path.stat().st_size < 60_000, path


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_every_number_of_a_table_comes_from_a_file_that_is_cited(name):
    assert check_numbers((ROOT / name).read_text(encoding="utf-8"), ROOT) >= 20


def check_numbers(text: str, root: Path) -> int:
    """Each number in a cell, but for the first column, is one of a file cited since the last heading or table."""
    checked = 0
    before: list[str] = []
    for part in re.split(r"\n\n+", text):
        if not part.startswith("|"):
            before = [part] if part.startswith("#") else [*before, part]
            continue
        files = re.findall(r"`(results/[\w./-]+\.json)`", "\n".join(before))
        known = set().union(*(_forms(json.loads((root / name).read_bytes())) for name in files))
        for line in part.splitlines()[2:]:
            for cell in line.strip("|").split("|")[1:]:
                for number in re.findall(r"\d[\d,.]*[kMG]?", re.sub(r"[\w+ -]+, \d+ heads?", "", cell)):
                    assert number in known, f"{number} in {line!r} is in none of {files or 'no file'}"
                    checked += 1
    return checked


def _forms(data: object) -> set[str]:
    """Every number of a file as a document may write it."""
    if isinstance(data, dict):
        return set().union(*map(_forms, data.values()))
    if isinstance(data, list):
        return set().union(*map(_forms, data))
    if isinstance(data, bool) or not isinstance(data, int | float):
        return set()
    size = abs(data)
    return {f"{size:.2f}", f"{size:.1f}", f"{size:.0f}", str(size), f"{size:,}", short(size)}


def test_numbers_that_no_file_has_are_noticed(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text('{"x": [1.234, 81234]}')
    table = "| model | x |\n| --- | --- |\n| mgk, 9 heads | {} |\n"
    cited = "Measured (`results/a.json`):\n\n"
    assert check_numbers(cited + table.format("1.23 (81.2k)"), tmp_path) == 2
    with pytest.raises(AssertionError, match=r"1\.24 in"):
        check_numbers(cited + table.format("1.24"), tmp_path)
    with pytest.raises(AssertionError, match="no file"):
        check_numbers(table.format("1.23"), tmp_path)


def test_a_filled_readme_has_numbers_of_the_tables(artifacts, tmp_path):
    place = tmp_path / "results" / "tables" / "laptop"
    place.mkdir(parents=True)
    for name, table in artifacts.tables.items():
        (place / f"{name}.json").write_text(json.dumps(table.to_json()))
    (place / "claims.json").write_text("{}")
    parts = ("summary", "headlines")
    empty = "".join(f"<!-- generated: {name} -->\n<!-- end of generated: {name} -->\n" for name in parts)
    text = fill(f"# A\n\n{empty}", artifacts)
    assert check_numbers(text, tmp_path) > 40
    assert "claims, at preset `laptop`: " in text


def test_the_summary_names_the_tasks_of_the_average_alone(tmp_path):
    store = stored(tmp_path)
    for model in EXPERIMENTS["table1"].models_at("laptop"):
        store.write(record("image", model, 0))
    found = gather(store, "laptop")
    assert "image" in found.tables["table1"].columns
    text = fill("<!-- generated: headlines -->\n<!-- end of generated: headlines -->\n", found)
    assert "Retrieval (PeerRead pairs in place of AAN), of 3 seeds" in text


def test_parts_are_filled_in_place(artifacts, tmp_path):
    document = tmp_path / "page.md"
    parts = ("claims", "verdicts", "measured", "table1", "table3", "fig1", "fig5")
    empty = "".join(
        f"before\n<!-- generated: {name} -->\nold\n<!-- end of generated: {name} -->\n" for name in parts
    )
    document.write_text(empty)
    assert fill_document(document, artifacts) == list(parts)
    text = document.read_text()
    assert "old" not in text
    assert text.count("before\n<!-- generated: ") == len(parts)
    assert "| mgk, 1 head | 3 |" in text
    assert "`mgk reproduce table1 --preset laptop`" in text
    assert "2026-11-16; commit 0123456789" in text
    assert (tmp_path / "images/reproduction/fig1.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "images/reproduction/fig3.png").exists()
    assert fill(text, artifacts) == text


def test_what_is_missing_has_its_command(artifacts):
    nothing = Artifacts(PresetResults("laptop"))
    text = fill("<!-- generated: table2 -->\n<!-- end of generated: table2 -->", nothing)
    assert "Not measured yet: `mgk reproduce table2 --preset laptop`." in text


def test_wrong_documents_are_named(artifacts, tmp_path):
    document = tmp_path / "page.md"
    with pytest.raises(TrainingError, match=r"page\.md: cannot be read"):
        fill_document(document, artifacts)
    document.write_text("nothing here")
    with pytest.raises(RecipeError, match="it has no generated part"):
        fill_document(document, artifacts)
    document.write_text("<!-- generated: tabel1 -->\n<!-- end of generated: tabel1 -->")
    with pytest.raises(
        RecipeError, match=r"page\.md: there is no generated part 'tabel1': choose one of abstract, claims"
    ):
        fill_document(document, artifacts)
