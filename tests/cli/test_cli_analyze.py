import subprocess
import sys

import pytest
import typer

from mgk.cli.analyze import parse_size


def run(*arguments, python=("-m", "mgk")):
    command = [sys.executable, *python, "analyze", "cost", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={"COLUMNS": "150", "PATH": ""}
    )


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("128k", 128_000), ("128Ki", 131_072), ("1.5M", 1_500_000), ("2Mi", 2**21)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "0", "-3k", "1.5", "12q", "1e"])
def test_sizes_that_are_none(text):
    with pytest.raises(typer.BadParameter, match="is not a whole number from 1 up"):
        parse_size(text)


def test_mixtures_beside_baselines_with_twice_the_heads():
    result = run("--heads", "8", "--length", "128k", "--layers", "32")
    assert result.returncode == 0, result.stderr
    for name in ("softmax:16", "mgk:8", "smgk:8", "linear:16", "mlk:8", "smlk:8"):
        assert name in result.stdout
    cache = next(line for line in result.stdout.splitlines() if line.strip().startswith("cache bytes"))
    assert cache.split()[2:7] == ["33.6G", "25.2G", "(0.75)", "16.8G", "(0.50)"]
    assert "projections: (3 + K) * C * H * D = (3 + 2) * 1024 * 8 * 64 = 2,621,440" in result.stdout


def test_some_variants_without_formulas():
    result = run(
        "--variants", "smgk", "--no-formulas", "--unfused", "--e-step", "hard", "--prior", "em", "--no-causal"
    )
    assert result.returncode == 0
    assert "softmax:16" not in result.stdout
    assert "C * H" not in result.stdout


def test_a_wrong_size_names_the_option():
    result = run("--length", "12q")
    assert (result.returncode, result.stdout) == (2, "")
    assert "Invalid value for '--length': '12q' is not a whole number" in result.stderr


def test_no_torch():
    result = run(python=("-X", "importtime", "-m", "mgk"))
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "mgk.analysis.cost_model" in imported
    assert "torch" not in imported
