"""``mgk reproduce``, ``report`` and ``analyze RUN`` as a user runs them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from mgk.cli.app import app

MGK = Path(sys.executable).with_name("mgk")
TASK = "retrieval"

pytestmark = pytest.mark.usefixtures("own_data_folder")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("reproduced")


def process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command itself."""
    return subprocess.run([str(MGK), *map(str, arguments)], capture_output=True, text=True, timeout=180)


def run(*arguments: object) -> Result:
    """The same without a new process, which would import torch anew each time."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def failed(result: Result, code: int) -> str:
    """The one sentence of a failure."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def reproduced(own_data_folder, place) -> subprocess.CompletedProcess[str]:
    """Figure 2 on synthetic data: three trials, analyzed."""
    options = ("--preset", "smoke", "--results", place / "results", "--runs", place / "runs", "--jobs", 2)
    result = process("reproduce", "fig2", *options)
    assert result.returncode == 0, result.stderr
    again = run("reproduce", "fig2", *options)
    assert "3 trials, 3 done" in again.stderr
    assert " of 3: " not in again.stderr
    return result


@pytest.fixture(scope="module")
def mixture_run(reproduced, place) -> Path:
    return place / "runs" / "smoke" / TASK / "mgk-2h-seed-0"


def test_cost_comes_first_then_progress_then_what_was_written(reproduced, place):
    first, *lines = reproduced.stderr.splitlines()
    assert re.fullmatch(r"3 trials, 0 done; 3 to run, about .* \(by the cost model .*\)", first)
    done = [
        line
        for line in lines
        if re.match(r"\d of 3: smoke/retrieval/.*, test accuracy \d+\.\d\d%, in \d+ s", line)
    ]
    assert len(done) == 3
    assert all("left" in line for line in done[:-1])
    assert (place / "results/figures/smoke/fig2.png").is_file()
    assert len(list((place / "results/trials/smoke/retrieval").glob("*.json"))) == 3
    assert not list((place / "results").rglob("*.tmp"))


def test_a_table_of_trials_that_are_there_costs_nothing(reproduced, place):
    store = ("--preset", "smoke", "--results", place / "results")
    text = run("reproduce", "fig1", *store, "--dry-run").stdout
    assert text.startswith("6 trials, 3 done; 3 to run, about ")
    assert re.search(r"smoke/retrieval/mgk-1h-seed-0 +12 steps +done", text)
    listed = run("reproduce", "--list", *store).stdout
    assert re.search(r"results: 3 of 3 trials at preset smoke", listed)
    assert "the paper: Attention matrices of mgk have higher ranks" in listed
    assert "by formula: nothing is run" in listed
    for name in ("table1", "table4", "fig8", "mixtures", "feature-maps"):
        assert re.search(rf"^{name} ", listed, re.MULTILINE)
    assert "(more with --tasks: image, pathfinder); seeds: 1" in listed
    some = run("reproduce", "--list", *store, "--tasks", "image", "--seeds", "2").stdout
    assert "tasks: image; seeds: 2" in some
    assert not re.search(r"^(fig2|table3) ", some, re.MULTILINE)


def test_figures_by_formula_need_no_trials(place):
    result = run("reproduce", "fig3", "--preset", "smoke", "--results", place / "formula")
    assert result.exit_code == 0, result.stderr
    assert (place / "formula/figures/smoke/fig3.png").is_file()
    figure = json.loads((place / "formula/figures/smoke/fig3.json").read_bytes())
    assert len(figure["panels"]) == 4


def test_the_report_is_one_page_or_fills_documents(reproduced, place):
    page, document = place / "page.html", place / "page.md"
    result = run("report", "--results", place / "results", "--out", page)
    assert result.exit_code == 0, result.stderr
    assert page.as_uri() in result.stdout
    assert (place / "results/tables/smoke/claims.json").is_file()
    text = page.read_text()
    assert "Figure 2: attention maps and ranks on Retrieval" in text
    assert "The data are synthetic" in text
    document.write_text("<!-- generated: fig2 -->\n<!-- end of generated: fig2 -->\n")
    result = run("report", "--results", place / "results", "--update-docs", document)
    assert result.exit_code == 0, result.stderr
    assert "Mean rank, and effective rank in parentheses" in document.read_text()
    assert (place / "images/reproduction/fig2.png").is_file()


def test_the_report_reads_any_folder_of_runs(reproduced, place):
    page = place / "runs.html"
    result = run("report", "--results", place / "runs", "--out", page)
    assert result.exit_code == 0, result.stderr
    assert "The page of 3 trials" in result.stdout
    assert "mgk, 2 heads" in page.read_text()


def test_maps_are_drawn(mixture_run, tmp_path):
    image, numbers = tmp_path / "maps.png", tmp_path / "maps.json"
    result = run("analyze", "maps", mixture_run, "--layers", "2", "--out", image, "--json", numbers)
    assert result.exit_code == 0, result.stderr
    assert image.read_bytes().startswith(b"\x89PNG")
    assert [(item["layer"], item["head"]) for item in json.loads(numbers.read_bytes())["maps"]] == [
        (2, 1),
        (2, 2),
    ]
    assert "Attention of the average query" in result.stdout


def test_ranks_redundancy_and_mixtures_are_measured(mixture_run, tmp_path):
    numbers = tmp_path / "numbers.json"
    result = run("analyze", "ranks", mixture_run, "--samples", 4, "--json", numbers)
    assert result.exit_code == 0, result.stderr
    assert [len(layer["ranks"]) for layer in json.loads(numbers.read_bytes())["layers"]] == [4, 4]
    result = run("analyze", "redundancy", mixture_run, "--examples", 2, "--json", numbers)
    assert "mean within layers: 0." in result.stdout
    assert len(json.loads(numbers.read_bytes())["similarity"]) == 4
    result = run("analyze", "mixtures", mixture_run, "--examples", 2, "--json", numbers)
    assert "priors" in result.stdout
    prior = json.loads(numbers.read_bytes())["layers"][0]["prior"]
    assert sum(prior[0]) == pytest.approx(1.0, abs=1e-4)


def test_wrong_requests_to_analyze_are_one_sentence(mixture_run, place, tmp_path):
    layers = failed(run("analyze", "maps", mixture_run, "--layers", "3", "--out", tmp_path / "a.png"), 2)
    assert layers == "mgk: layers must be from 1 to 2, got 3"
    heads = failed(run("analyze", "maps", mixture_run, "--heads", "7", "--out", tmp_path / "a.png"), 2)
    assert heads == "mgk: heads must be from 1 to 2, got 7"
    example = failed(run("analyze", "maps", mixture_run, "--example", "65", "--out", tmp_path / "a.png"), 2)
    assert example == "mgk: example must be from 1 to 64, got 65"
    softmax = place / "runs" / "smoke" / TASK / "softmax-2h-seed-0"
    assert "softmax has one key a position" in failed(run("analyze", "mixtures", softmax), 2)
    assert "there is no run here" in failed(run("analyze", "ranks", tmp_path), 2)
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    (unfinished / "recipe.yaml").write_text((softmax / "recipe.yaml").read_text())
    assert "this run is not finished" in failed(run("analyze", "redundancy", unfinished), 2)
    assert "must end in .png" in failed(run("analyze", "maps", mixture_run, "--out", tmp_path / "a.txt"), 2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tabel1"], "there is no experiment 'tabel1'; did you mean 'table1'?"),
        ([], "name an experiment, such as table1, or all"),
        (["table1", "--preset", "lapto"], "there is no preset 'lapto'; did you mean 'laptop'?"),
        (["table1", "--tasks", "listop"], "there is no task 'listop'; did you mean 'listops'?"),
        (["table3", "--tasks", "text"], "table3 has no task text: it has wikitext-2"),
        (["table1", "--seeds", "0"], "Invalid value for '--seeds'"),
    ],
)
def test_wrong_requests_are_one_sentence(arguments, sentence):
    assert sentence in failed(run("reproduce", *arguments), 2)


def test_absent_data_and_folders_are_errors(tmp_path):
    message = failed(run("reproduce", "table1", "--tasks", "text", "--results", tmp_path), 1)
    assert "text is not prepared" in message
    assert "mgk data prepare text --source PATH" in message
    assert "there is no such folder" in failed(run("report", "--results", tmp_path / "none"), 2)
    both = ("--results", tmp_path, "--update-docs", tmp_path / "a.md", "--out", tmp_path / "b.html")
    assert "not both" in failed(run("report", *both), 2)
