"""The command as a user runs it: a process with an exit code, stdout and stderr."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mgk
from mgk.bench.registry import BENCHMARKS
from mgk.cli import doctor as doctor_command

BENCH = ("bench", "attention")
SMALL = (*BENCH, "--batch", "1", "--heads", "2", "--length", "16", "--head-dim", "8", "--rounds", "1")


def run(*arguments: str, python: tuple[str, ...] = ("-m", "mgk")) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *python, *arguments], capture_output=True, text=True, timeout=120)


def test_version() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"mgk {mgk.__version__}\n")


def test_help_names_the_verbs_and_options() -> None:
    assert "bench" in run("--help").stdout
    text = run(*BENCH, "--help").stdout
    for option in ("--batch", "--mixtures", "--causal", "--no-causal", "--variants", "--json", "--no-memory"):
        assert option in text


@pytest.mark.parametrize(
    "arguments",
    [("--help",), (*BENCH, "--help"), (*BENCH, "--variants", "softmin"), ("bench", "list"), ("--version",)],
)
def test_help_and_usage_errors_do_not_import_torch(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, python=("-X", "importtime", "-m", "mgk"))
    imported = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time")
    }
    assert "mgk.cli.bench" in imported
    assert not imported & {"torch", "numpy"}


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--batch", "0", "greater than or equal to 1"),
        ("--rounds", "few", "integer"),
        ("--dtype", "int8", "'int8' is not one of float64, float32"),
        ("--device", "cuda:x", "'cuda:x' is not one of cpu, cuda"),
        ("--variants", "mgk,softmin", "'softmin' is not one of softmax, linear"),
        ("--variants", ",", "give at least one of softmax, linear"),
        ("--backends", "magic", "'magic' is not one of reference, eager, blockwise"),
        ("--passes", "sideways", "'sideways' is not one of forward"),
        ("--json", "missing/figures.json", "does not exist"),
    ],
)
def test_bad_usage_names_the_option(option: str, value: str, reason: str) -> None:
    result = run(*BENCH, option, value)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("Error"))
    assert f"Invalid value for '{option}'" in line
    assert reason in line


def test_unknown_verb_and_option() -> None:
    for arguments in (("brew",), (*BENCH, "--colour")):
        result = run(*arguments)
        assert result.returncode == 2
        assert arguments[-1] in result.stderr
        assert "Traceback" not in result.stderr


def test_bench_prints_tables_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = run(*SMALL, "--variants", "mgk,smgk-hard", "--causal", "--json", str(path))
    assert result.returncode == 0, result.stderr
    data = json.loads(path.read_text())
    assert {row["variant"] for row in data["rows"]} == {"softmax", "mgk", "smgk-hard"}
    assert data["settings"]["causal"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["figures.json"]
    assert "forward+backward\n" in result.stdout.replace(" ", "")
    assert "batch 1, heads 2, length 16, head_dim 8, mixtures 2" in result.stdout
    assert "causal True" in result.stdout
    assert data["machine"]["processor"].split()[0] in result.stdout
    for value in (row["milliseconds"] for row in data["rows"]):
        assert (f"{value:.2f}" if value >= 0.1 else f"{value:.2g}") in result.stdout
    assert "…" not in result.stdout
    assert "bench attention: " in result.stderr


def test_bench_list_names_every_benchmark() -> None:
    lines = run("bench", "list").stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(BENCHMARKS)


def test_a_missed_limit_exits_with_1_after_writing_the_results(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = run(
        "bench",
        "precision",
        "--seeds",
        "1",
        "--length",
        "8",
        "--threads",
        "1",
        "--bound",
        "0",
        "--json",
        str(path),
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].endswith("errors are above 0")
    assert json.loads(path.read_text())["settings"]["seeds"] == 1


def test_failed_job_is_one_sentence_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = run(*SMALL, "--variants", "linear", "--backends", "sdpa", "--json", str(path))
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("mgk: nothing is left to measure")
    assert len(result.stderr.splitlines()) == 1
    assert not path.exists()


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    program = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
from mgk.cli import main
main()
"""
    result = run("--help", python=("-c", program))
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr == "mgk: the command needs typer and rich: pip install 'mgk[cli]'\n"


def test_doctor_shows_the_backends_and_that_they_agree_with_the_equations() -> None:
    result = run("doctor")
    assert result.returncode == 0
    for name, status in mgk.available_backends().items():
        assert f"backend {name}: {status}" in result.stdout
    assert result.stdout.count("from the equations in float64") >= 3


def test_doctor_works_with_a_build_for_gpus_on_a_machine_without_one(monkeypatch, capsys) -> None:
    def none_is_here() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")  # torch 2.6

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", none_is_here)
    monkeypatch.setattr(doctor_command, "_backends_agree", lambda: True)
    doctor_command.doctor()
    assert "accelerator: none" in capsys.readouterr().out
