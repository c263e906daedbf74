"""``mgk train``, ``eval`` and ``generate`` as a user runs them: processes with exit codes, stdout and stderr."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mgk.training import read_metrics, read_summary, train
from mgk.training.recipe import load_recipe

MGK = Path(sys.executable).with_name("mgk")
SMALL = {
    "model.num_hidden_layers": 1,
    "model.hidden_size": 8,
    "model.head_dim": 4,
    "model.intermediate_size": 8,
    "training.max_steps": 90,
    "training.save_every": 3,
    "training.threads": 1,
    "training.log_every": 4,
    "evaluation.every": 10,
    "data.validation_examples": 8,
}
pytestmark = pytest.mark.usefixtures("own_data_folder")
FIELDS = [f"--set={name}={value}" for name, value in SMALL.items()]


def run(*arguments: object, **options) -> subprocess.CompletedProcess[str]:
    command = [str(MGK), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def failed(result: subprocess.CompletedProcess[str], code: int) -> str:
    """The one sentence of a failure."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (line,) = (line for line in result.stderr.splitlines() if line.startswith(("mgk:", "Error")))
    return line


def stopped(number: signal.Signals, out: Path, at: str, *arguments: object) -> tuple[int, str]:
    """Start a run, send it a signal when a checkpoint is there, and return its exit code and stderr."""
    command = [str(MGK), "train", *map(str, arguments), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while not (out / "checkpoints" / at).is_dir():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    _, text = process.communicate(timeout=60)
    return process.returncode, text


def test_a_run_survives_kill_9_and_sigterm_and_ends_as_an_unbroken_one(tmp_path):
    recipe = load_recipe("listops", "smoke", overrides=SMALL)
    whole = train(recipe, tmp_path / "whole")
    out = tmp_path / "run"
    code, _ = stopped(signal.SIGKILL, out, "step-9", "listops", "--preset", "smoke", *FIELDS)
    assert code == -signal.SIGKILL
    assert failed(run("train", "listops", "--preset", "smoke", *FIELDS, "--out", out), 2).endswith(
        "there is something here already: go on with --resume, or --overwrite it"
    )
    code, text = stopped(signal.SIGTERM, out, "step-30", "--resume")
    assert code == 143
    assert "going on from" in text
    assert f"go on with: mgk train --resume --out {out}" in text.splitlines()[-1]
    assert text.splitlines()[-1].startswith("mgk: stopped by SIGTERM at step ")
    assert "Traceback" not in text
    last = run("train", "listops", "--preset", "smoke", *FIELDS, "--out", out, "--resume")
    assert last.returncode == 0, last.stderr
    clocks = ("seconds", "tokens_per_second")
    lines = [
        [{name: value for name, value in line.items() if name not in clocks} for line in read_metrics(folder)]
        for folder in (tmp_path / "whole", out)
    ]
    assert lines[0] == lines[1]
    assert read_summary(out).metrics == whole.metrics
    assert "test accuracy" in last.stdout
    assert f"{recipe.training.max_steps} of {recipe.training.max_steps}, loss" in last.stderr


def test_a_language_model_from_training_to_text(tmp_path):
    out = tmp_path / "run"
    trained = run(
        "train", "wikitext-2", "--preset", "smoke", "--attention", "smgk", "--heads", "1", "--out", out
    )
    assert trained.returncode == 0, trained.stderr
    assert "synthetic sample" in trained.stdout
    assert "tokens/s" in trained.stderr
    assert (read_summary(out).attention, read_summary(out).heads) == ("smgk", 1)

    measured = run("eval", out, "--stride", "8", "--max-tokens", "300", "--json", tmp_path / "figures.json")
    assert measured.returncode == 0, measured.stderr
    assert "by segments: perplexity" in measured.stdout
    assert "(window 32, stride 32)" in measured.stdout
    assert "(window 32, stride 8, the first 300 of" in measured.stdout
    assert json.loads((tmp_path / "figures.json").read_bytes())["sliding"]["stride"] == 8

    text = run("generate", out, "--prompt", "the old", "--max-new-tokens", "8", "--greedy")
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("the old ")
    assert len(text.stdout) > len("the old ")

    again = run("train", "--recipe", out / "recipe.yaml", "--print-config")
    assert again.stdout == (out / "recipe.yaml").read_text()


def test_a_classifier_is_measured_with_its_confusion(tmp_path):
    train(load_recipe("text", "smoke", overrides={**SMALL, "training.max_steps": 4}), tmp_path / "run")
    result = run("eval", tmp_path / "run", "--split", "validation", "--batch-size", "3")
    assert result.returncode == 0, result.stderr
    assert "synthetic-text, validation: accuracy" in result.stdout
    assert "95% CI" in result.stdout
    numbers = [line.split() for line in result.stdout.splitlines()[-2:]]
    assert sum(int(cell) for row in numbers for cell in row[1:]) == 8


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("train", "lstops"), "did you mean 'listops'?"),
        (("train", "text", "--preset", "labtop"), "did you mean 'laptop'?"),
        (("train", "text", "--attention", "mgq"), "did you mean 'mgk'?"),
        (("train", "text", "--set", "model.heads=3"), "there is no field 'model.heads'"),
        (("train", "text", "--set", "steps"), "'steps' is not of the form FIELD=VALUE"),
        (("train", "text", "--steps", "0"), "training.max_steps"),
        (("train",), "give a TASK, or --recipe FILE, or --resume --out RUN"),
        (("train", "--resume", "--out", "nowhere"), "nowhere: there is no run here (recipe.yaml is missing)"),
        (("train", "text", "--recipe", "x.yaml"), "give TASK or --recipe, not both"),
        (("eval", "nowhere", "--split", "tests"), "'tests' is not one of train, validation, test"),
    ],
)
def test_wrong_requests_are_one_sentence_and_need_no_torch(arguments, reason, tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "mgk", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if "import time" in line}
    assert reason in failed(result, 2)
    assert not imported & {"torch", "numpy", "transformers"}


def test_failed_jobs_lead_on(tmp_path):
    assert "there is no run here" in failed(run("eval", tmp_path), 2)
    assert "there is no run here" in failed(run("generate", tmp_path), 2)
    absent = failed(run("train", "image", "--preset", "paper", "--out", tmp_path / "run"), 1)
    assert "image is not prepared" in absent
    assert "mgk data prepare image" in absent


def test_debug_shows_the_traceback(tmp_path):
    result = run("train", "--debug", "lstops")
    assert result.returncode == 2
    assert "Traceback" in result.stderr


def test_kv_heads_are_shared_by_query_heads(tmp_path):
    options = ("--attention", "smgk", "--heads", "4", "--kv-heads", "2", "--set=training.max_steps=2")
    done = run("train", "listops", "--preset", "smoke", *FIELDS, *options, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)


def test_kv_heads_that_do_not_divide_the_heads_are_refused(tmp_path):
    options = ("--heads", "4", "--kv-heads", "3")
    line = failed(run("train", "listops", "--preset", "smoke", *options, "--out", tmp_path / "run"), 2)
    assert "num_key_value_heads" in line
    assert not (tmp_path / "run").exists()
