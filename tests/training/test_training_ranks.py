"""Several processes: the losses of one, M-step priors included; sharded models train as unsharded ones do."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import failing_rank
import pytest
import sharded_training
import torch
import unfinished_collectives
from safetensors.torch import load_file
from training_cases import tiny, trajectory, weights

from mgk.models import MgkForCausalLM, MgkForSequenceClassification
from mgk.training import evaluate, read_summary, train
from mgk.training.recipe import write_recipe
from support.versions import needs_sharding_on_the_cpu


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_two_ranks_give_the_losses_of_one_process(tmp_path):
    # Text of different lengths, and a last segment that is shorter: ranks then hold different numbers of targets.
    recipe = tiny(
        "wikitext-2",
        model__prior="em",
        model__hidden_dropout_prob=0.0,
        training__batch_size=128,
        training__accumulation=2,
        data__validation_examples=None,
    )
    train(recipe, tmp_path / "one")
    write_recipe(recipe, tmp_path / "recipe.yaml")
    result = torchrun(
        "-m", "mgk", "train", "--recipe", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "two")
    )
    assert result.returncode == 0, result.stderr
    one, two = trajectory(tmp_path / "one"), trajectory(tmp_path / "two")
    for line, other in zip(one, two, strict=True):
        assert other == pytest.approx(line, abs=1e-5)
    assert read_summary(tmp_path / "two").processes == 2
    metrics = [read_summary(tmp_path / name).metrics for name in ("one", "two")]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5)
    assert result.stdout.count("model: ") == 1  # the first rank alone speaks
    states = load_file(tmp_path / "two" / "checkpoints" / "step-6" / "ranks.safetensors")["rng"]
    assert len(states) == 2
    assert not torch.equal(*states)  # each rank has dropout of its own
    result = torchrun("-m", "mgk", "eval", str(tmp_path / "two"), "--json", str(tmp_path / "figures.json"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("by segments: ") == 1
    figures, whole = json.loads((tmp_path / "figures.json").read_bytes()), evaluate(tmp_path / "two")
    assert figures["examples"] == whole.examples
    assert figures["loss"] == pytest.approx(whole.loss, abs=1e-5)


def test_two_ranks_resume_to_the_same_end(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    write_recipe(tiny(model__prior="em", training__keep=3, training__log_every=3), tmp_path / "recipe.yaml")
    for out in (whole, broken):
        if out == broken:  # as if it had been killed after step 2
            shutil.copytree(whole, broken)
            shutil.rmtree(broken / "checkpoints" / "step-4")
            shutil.rmtree(broken / "checkpoints" / "step-6")
            (broken / "summary.json").unlink()
        recipe = ("--recipe", str(tmp_path / "recipe.yaml"), "--resume")
        result = torchrun("-m", "mgk", "train", *recipe, "--out", str(out))
        assert result.returncode == 0, result.stderr
    assert "going on from" in result.stderr
    assert trajectory(broken) == trajectory(whole)
    assert weights(broken) == weights(whole)


def test_a_rank_that_fails_alone_ends_all_with_its_sentence(tmp_path):
    write_recipe(tiny(training__max_steps=2000), tmp_path / "recipe.yaml")
    arguments = ("train", "--recipe", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run"))
    result = torchrun(str(Path(failing_rank.__file__)), *arguments)
    assert result.returncode == 1
    assert result.stderr.count("mgk: the last rank has failed") == 1
    assert "this is a bug" not in result.stderr
    assert "terminate called" not in result.stderr
    assert (tmp_path / "run" / "checkpoints" / "step-2").is_dir()


def test_the_others_report_that_the_first_rank_was_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("KILLED_RANK", "0")
    write_recipe(tiny(training__max_steps=2000), tmp_path / "recipe.yaml")
    arguments = ("train", "--recipe", str(tmp_path / "recipe.yaml"), "--out", str(tmp_path / "run"))
    result = torchrun(str(Path(failing_rank.__file__)), *arguments)
    assert result.returncode != 0
    assert "run: another process has failed; the last good checkpoint is" in result.stderr
    assert "this is a bug" not in result.stderr


@pytest.mark.parametrize("kind", ["plain", pytest.param("sharded", marks=needs_sharding_on_the_cpu)])
def test_the_interpreter_exits_while_collectives_are_under_way(kind):
    result = torchrun(str(Path(unfinished_collectives.__file__)), kind)
    assert result.returncode == 0, result.stderr


@needs_sharding_on_the_cpu
def test_sharded_models_train_as_unsharded_ones_do():
    result = torchrun(str(Path(sharded_training.__file__)))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    for head in (MgkForSequenceClassification, MgkForCausalLM):
        for attention, prior in sharded_training.CASES:
            whole = sharded_training.losses(sharded_training.make(attention, prior, head), 0, 1)
            assert found[f"{head.__name__}-{attention}-{prior}"] == pytest.approx(whole, abs=1e-5)
