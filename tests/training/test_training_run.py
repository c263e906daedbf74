"""Runs in this process: every task, repetition, resuming, corrupt files, full disks, values that are not finite."""

import errno
import json
import math
import os
import re
import shutil
import signal
import time

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save
from tensorboard.summary.writer.record_writer import RecordWriter
from training_cases import tiny, trajectory, weights

from mgk._util.errors import UserError
from mgk._util.files import folder_lock, read_json, read_verified, write_hashed
from mgk.data import prepare
from mgk.training import (
    Interrupted,
    RecipeError,
    TrainingError,
    checkpoints,
    evaluate,
    read_correct,
    read_metrics,
    read_recipe,
    read_summary,
    train,
)
from mgk.training import run as run_module
from mgk.training.loop import TrainingLoop
from mgk.training.recipe import TASKS
from mgk.training.run import check_batch_size
from mgk.training.run_dir import write_summary


class Killed(BaseException):
    """As good as SIGKILL for what is on the disk: nothing is cleaned up after the step."""


def killed_at(step):
    def on_step(done, total):
        if done == step:
            raise Killed

    return on_step


def killed_run(recipe, out, step):
    with pytest.raises(Killed):
        train(recipe, out, on_step=killed_at(step))


@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_measures_and_saves(tmp_path, task):
    recipe = tiny(task, evaluation__batch_size=16)
    summary = train(recipe, tmp_path / "run")
    assert summary == read_summary(tmp_path / "run")
    assert read_recipe(tmp_path / "run" / "recipe.yaml") == recipe
    assert (summary.task, summary.steps, summary.processes) == (task, 6, 1)
    assert summary.seconds_per_step > 0
    assert summary.tokens_per_second > 0
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    assert summary.train_loss == next(line["loss"] for line in reversed(lines) if "loss" in line)
    if summary.metric == "accuracy":
        assert len(read_correct(tmp_path / "run")) == summary.examples == 9
        assert (
            summary.metrics["test_accuracy"] == summary.correct / 9 == sum(read_correct(tmp_path / "run")) / 9
        )
    else:
        assert summary.metrics["test_perplexity"] == pytest.approx(math.exp(summary.metrics["test_loss"]))
        if summary.metric == "bits_per_byte":
            bits = summary.metrics["test_bits_per_byte"]
            assert bits == pytest.approx(math.log2(summary.metrics["test_perplexity"]))
        else:
            assert summary.metrics["test_sliding_perplexity"] > 1
    environment = json.loads((tmp_path / "run" / "environment.json").read_bytes())
    assert environment["data"]["task"] == recipe.data.name
    assert environment["sessions"][0]["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "synthetic sample" in card
    assert "| licence of the data | generated here |" in card
    assert re.search(
        r"test_accuracy \| .*% \(95% CI .*% to .*%, one seed, 9 examples\)"
        r"|_perplexity \| .* \(95% CI .* to .* one seed; window",
        card,
    )
    (tmp_path / "recipe.yaml").write_text(re.search(r"```yaml\n(.*?)```", card, re.DOTALL)[1])
    assert read_recipe(tmp_path / "recipe.yaml") == recipe
    trial = {"format": 2, "recipe": recipe.model_dump(mode="json")}
    (tmp_path / "trial.json").write_text(json.dumps(trial))
    assert read_recipe(tmp_path / "trial.json") == recipe
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "tensorboard", "checkpoints", "model", "summary.json"} <= names
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"step-4", "step-6"}


@pytest.mark.parametrize(
    ("name", "licence"), [("wikitext-2", "CC BY-SA"), ("book", "that of the text: fill it in")]
)
def test_the_card_of_a_model_of_bytes_names_its_text(tmp_path, name, licence):
    (tmp_path / f"{name}.txt").write_text("".join(f"line {n} of the text\n" for n in range(600)))
    prepare("bytes", tmp_path / f"{name}.txt", out=tmp_path / "data")
    recipe = tiny("bytes", data__name="bytes", data__folder=str(tmp_path / "data"), training__max_steps=1)
    train(recipe, tmp_path / "run")
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert f"| data | bytes: the text of {name} |" in card
    assert f"| licence of the data | {licence} |" in card


def test_images_in_colour_as_patches(tmp_path):
    summary = train(tiny("image", data__colour=True, model__patch_size=8), tmp_path / "run")
    assert summary.examples == 9


def test_a_recipe_repeats_to_the_same_numbers_and_a_seed_changes_them(tmp_path):
    runs = [tmp_path / name for name in ("a", "b", "c")]
    for run, seed in zip(runs, (1, 1, 2), strict=True):
        train(tiny(seed=seed), run)
    assert trajectory(runs[0]) == trajectory(runs[1])
    assert weights(runs[0]) == weights(runs[1])
    assert trajectory(runs[0])[-1] != trajectory(runs[2])[-1]


def test_evaluating_more_often_does_not_change_the_run(tmp_path):
    for name, every in (("often", 1), ("seldom", 6)):
        train(tiny(evaluation__every=every, evaluation__select="last"), tmp_path / name)
    often, seldom = (
        [line for line in trajectory(tmp_path / name) if "loss" in line] for name in ("often", "seldom")
    )
    assert often == seldom


@pytest.mark.parametrize("step", [1, 3, 5, 6])
def test_a_run_that_was_killed_goes_on_to_the_same_end(tmp_path, step):
    recipe = tiny(
        "text", model__prior="em", model__variance="em", training__log_every=4, data__group_by_length=True
    )
    whole = train(recipe, tmp_path / "whole")
    killed_run(recipe, tmp_path / "killed", step)
    again = train(recipe, tmp_path / "killed", resume=True)
    assert trajectory(tmp_path / "killed") == trajectory(tmp_path / "whole")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert again.metrics == whole.metrics
    sessions = json.loads((tmp_path / "killed" / "environment.json").read_bytes())["sessions"]
    assert [session["from_step"] for session in sessions] == [0, (step - 1) // 2 * 2]


def test_a_run_killed_while_it_tests_goes_on_to_the_same_end(tmp_path):
    recipe = tiny("wikitext-2")
    train(recipe, tmp_path / "whole")

    def die(done, total):
        raise Killed

    with pytest.raises(Killed):
        train(recipe, tmp_path / "killed", on_test=die)
    progress = read_json(tmp_path / "killed" / "checkpoints" / "step-6" / "progress.json")
    summary = train(recipe, tmp_path / "killed", resume=True)
    # Times and memory are those of training, though this process has not trained.
    assert summary.seconds_per_step > 0
    assert summary.tokens_per_second > 0
    assert summary.seconds >= progress["wall_seconds"] >= 6 * summary.seconds_per_step / 2
    assert summary.peak_memory_bytes == progress["peak_memory_bytes"]
    assert read_summary(tmp_path / "killed").metrics == read_summary(tmp_path / "whole").metrics
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


def test_a_finished_run_is_not_run_again(tmp_path):
    summary = train(tiny(), tmp_path / "run")
    assert train(tiny(), tmp_path / "run", resume=True, on_step=killed_at(1)) == summary


def test_a_corrupt_checkpoint_is_named_and_the_one_before_used(tmp_path):
    recipe = tiny()
    train(recipe, tmp_path / "whole")
    killed_run(recipe, tmp_path / "run", 5)
    path = tmp_path / "run" / "checkpoints" / "step-4" / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # killed as it wrote
    notes = []
    train(recipe, tmp_path / "run", resume=True, on_note=notes.append)
    assert notes == [
        f"{path.parent} is corrupt (optimizer.safetensors has changed: its SHA-256 differs): it is not used",
        f"going on from {path.parents[1] / 'step-2'}",
    ]
    assert trajectory(tmp_path / "run") == trajectory(tmp_path / "whole")


@pytest.mark.parametrize(
    "kind", [lambda text: OSError(errno.ENOSPC, text), SafetensorError], ids=["file", "tensors"]
)
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(tmp_path, monkeypatch, kind):
    save = checkpoints.save_file

    def full(tensors, path):
        if "step-4" in str(path):
            raise kind("No space left on device")
        save(tensors, path)

    sentence = r"step 4 cannot be saved \(No space left on device\); the last good checkpoint is .*step-2"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", full)
        with pytest.raises(TrainingError, match=sentence):
            train(tiny(), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]
    assert train(tiny(), tmp_path / "run", resume=True).steps == 6


def test_a_disk_that_fills_up_between_checkpoints_is_one_sentence(tmp_path, monkeypatch, capfd):
    write = RecordWriter.write

    def full(self, data):
        if (tmp_path / "run" / "checkpoints" / "step-2").is_dir():
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, data)

    monkeypatch.setattr(RecordWriter, "write", full)  # in a thread of TensorBoard's
    with pytest.raises(
        TrainingError, match=r"run: No space left on device; the last good checkpoint is .*step-\d+$"
    ):
        train(tiny(training__max_steps=200), tmp_path / "run")
    assert capfd.readouterr().err == ""


def test_a_loss_that_is_not_finite_names_step_and_module(tmp_path):
    recipe = tiny(training__learning_rate=1e36, training__warmup_steps=0, training__save_every=1)
    with pytest.raises(
        TrainingError, match=r"the loss of step 2 is nan: .* in the (output of|weights) '.*step-1"
    ):
        train(recipe, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]


def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    take_step = TrainingLoop._step

    def spoil(self, batches):
        norm = take_step(self, batches)
        if self.progress.step == 4:
            next(self.model.parameters()).data[0] = torch.inf
        return norm

    monkeypatch.setattr(TrainingLoop, "_step", spoil)
    with pytest.raises(TrainingError, match=r"step 4 made the weights '.*' not finite; .*step-2"):
        train(tiny(evaluation__every=6), tmp_path / "run")


def test_a_run_that_began_and_ended_meanwhile_is_not_deleted(tmp_path, monkeypatch):
    """Two processes find no folder; the second to lock it does not clear it away."""
    killed_run(tiny(), tmp_path / "first", 3)
    lock = run_module.folder_lock

    def lock_late(folder):
        shutil.copytree(tmp_path / "first", folder, dirs_exist_ok=True)
        return lock(folder)

    monkeypatch.setattr(run_module, "folder_lock", lock_late)
    with pytest.raises(RecipeError, match="there is something here already"):
        train(tiny(), tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints").is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_to_the_same_end(tmp_path, number):
    recipe = tiny(training__log_every=4)
    train(recipe, tmp_path / "whole")

    def stop(done, total):
        if done == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(
        Interrupted, match=rf"stopped by {number.name} at step [34]; go on with: mgk train --resume"
    ):
        train(recipe, tmp_path / "run", on_step=stop)
    assert signal.getsignal(number) is before
    train(recipe, tmp_path / "run", resume=True)
    assert trajectory(tmp_path / "run") == trajectory(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


@pytest.mark.parametrize(
    "overrides",
    [
        {"model__prior": "em", "model__variance": "em"},
        {"training__gradient_checkpointing": True, "model__prior": "em"},
    ],
    ids=["em", "em-checkpointing"],
)
def test_accumulation_gives_the_losses_of_one_batch(tmp_path, overrides):
    still = {"model__hidden_dropout_prob": 0.0, "model__attention_probs_dropout_prob": 0.0, **overrides}
    train(tiny("text", **still), tmp_path / "one")
    train(tiny("text", **still, training__accumulation=4), tmp_path / "four")
    for one, four in zip(trajectory(tmp_path / "one"), trajectory(tmp_path / "four"), strict=True):
        assert four == pytest.approx(one, abs=1e-5)


def test_folders_are_not_overwritten_or_mixed_up(tmp_path):
    run = tmp_path / "run"
    killed_run(tiny(), run, 3)
    with pytest.raises(
        RecipeError, match="there is something here already: go on with --resume, or --overwrite it"
    ):
        train(tiny(), run)
    with pytest.raises(
        RecipeError, match=r"started with training.max_steps = 6, not 8: resume it without changes"
    ):
        train(tiny(training__max_steps=8), run, resume=True)
    with pytest.raises(RecipeError, match="resumed or overwritten, not both"):
        train(tiny(), run, resume=True, overwrite=True)
    train(tiny(seed=1), run, overwrite=True)
    with pytest.raises(RecipeError, match="there is a finished run here already"):
        train(tiny(), run)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    for options in ({"overwrite": True}, {"resume": True}, {}):
        with pytest.raises(RecipeError, match="other: "):
            train(tiny(), other, **options)
    assert (other / "thesis.txt").exists()
    with pytest.raises(RecipeError, match="this is a file"):
        train(tiny(), other / "thesis.txt")


def test_a_run_killed_before_its_recipe_was_whole_starts_anew(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".recipe.yaml.1.tmp").write_text("format")
    assert train(tiny(), tmp_path / "run", resume=True).steps == 6


def test_a_run_whose_data_cannot_be_opened_leaves_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError):
        train(tiny(data__folder=tmp_path / "file"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_data_that_changed_are_refused(tmp_path):
    killed_run(tiny(), tmp_path / "run", 3)
    path = tmp_path / "run" / "environment.json"
    environment = read_verified(path)
    first = next(iter(environment["data"]["files"].values()))
    first["sha256"] = "0" * 64
    write_hashed(path, environment)
    with pytest.raises(TrainingError, match="the data have changed since"):
        train(tiny(), tmp_path / "run", resume=True)


def test_data_with_options_are_generated_on_first_use(tmp_path):
    options = {
        "seed": 1,
        "train": 20,
        "validation": 4,
        "test": 5,
        "min_length": 4,
        "max_length": 30,
        "max_depth": 3,
    }
    recipe = tiny(data__name="listops", data__options=options, data__folder=str(tmp_path / "data"))
    assert train(recipe, tmp_path / "run").examples == 5
    with pytest.raises(RecipeError, match="text is read from files"):
        train(tiny("text", data__name="text", data__options={"seed": 1}), tmp_path / "none")
    with pytest.raises(RecipeError, match=r"data\.options: listops has no option 'depth'"):
        train(tiny(data__name="listops", data__options={"depth": 1}), tmp_path / "nothing")


def test_impossible_models_and_batches_are_named(tmp_path):
    with pytest.raises(RecipeError, match=r"model: .*rotary"):
        train(tiny(model__position="rotary", model__head_dim=5), tmp_path / "run")
    with pytest.raises(RecipeError, match="cannot be shared out over 3 processes"):
        check_batch_size(tiny(), 3)


def test_what_was_deleted_or_changed_after_the_end_is_made_again(tmp_path):
    run, notes = tmp_path / "run", []
    train(tiny(), run)
    before = weights(run)
    shutil.rmtree(run / "model")
    with pytest.raises(RecipeError, match="this run is not finished: go on with mgk train --resume"):
        evaluate(run)
    train(tiny(), run, resume=True, on_note=notes.append)
    assert "this file of the run is missing" in notes[0]
    assert weights(run) == before
    (run / "metrics.jsonl").write_text("".join((run / "metrics.jsonl").read_text().splitlines(True)[1:]))
    with pytest.raises(TrainingError, match=r"metrics.jsonl: this file of the run has .* bytes instead of"):
        read_metrics(run)
    train(tiny(), run, resume=True)
    assert len(read_metrics(run)) == 8
    shutil.rmtree(run / "checkpoints")
    (run / "test_correct.json").unlink()
    with pytest.raises(TrainingError, match="put it back as it was, or train anew with --overwrite"):
        train(tiny(), run, resume=True)


@pytest.mark.parametrize("options", [{"resume": True}, {"overwrite": True}], ids=str)
def test_a_run_at_work_is_left_alone(tmp_path, options):
    killed_run(tiny(), tmp_path / "run", 3)
    before = sorted((tmp_path / "run").rglob("*"))
    with (
        folder_lock(tmp_path / "run"),
        pytest.raises(UserError, match=rf"run: process {os.getpid()} on .* is at work in this folder"),
    ):
        train(tiny(), tmp_path / "run", **options)
    assert sorted((tmp_path / "run").rglob("*")) == before
    assert train(tiny(), tmp_path / "run", **options).steps == 6


def forge(folder, name, content):
    """Replace a file as an attacker does who knows how manifests are made."""
    (folder / name).write_bytes(content)
    checkpoints.finalize(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("optimizer.safetensors", b"x" * 50),
        ("optimizer.safetensors", save({"0.exp_avg": torch.zeros(3, 3, 3)})),
        ("optimizer.safetensors", save({"nonsense": torch.zeros(1)})),
        ("ranks.safetensors", save({"loss": torch.zeros(1), "rng": torch.zeros(1, 3, dtype=torch.uint8)})),
        ("timings.safetensors", save({"timings": torch.zeros(9, 2)})),
        ("progress.json", b'{"step": 1000000000}'),
        ("progress.json", b'{"step": 4, "nonsense'),
        ("model.safetensors", save({"weight": torch.zeros(2)})),
    ],
)
def test_forged_checkpoints_are_refused_with_the_way_on(tmp_path, name, content):
    run = tmp_path / "run"
    killed_run(tiny(), run, 5)
    (run / "checkpoints" / "step-4" / "manifest.json").unlink()
    forge(run / "checkpoints" / "step-4", name, content)
    with pytest.raises(
        TrainingError, match=r"step-4: this is not a checkpoint of this run .*: delete it to go on"
    ):
        train(tiny(), run, resume=True)
    shutil.rmtree(run / "checkpoints" / "step-4")
    assert train(tiny(), run, resume=True).steps == 6


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"sessions": 1}'])
def test_a_spoiled_environment_is_taken_from_the_checkpoint(tmp_path, text):
    killed_run(tiny(), tmp_path / "run", 5)
    (tmp_path / "run" / "environment.json").write_text(text)
    notes = []
    train(tiny(), tmp_path / "run", resume=True, on_note=notes.append)
    assert any("environment.json: this is not the environment of a run" in note for note in notes)
    assert len(read_verified(tmp_path / "run" / "environment.json")["sessions"]) == 2


@pytest.mark.parametrize(
    "overrides",
    [
        {"model__num_hidden_layers": 10**7},
        {"model__num_attention_heads": 10**9},
        {"model__num_attention_heads": 10**30},
        {"model__vocab_size": 10**12},
        {"data__max_length": 10**12},
    ],
    ids=str,
)
def test_models_beyond_the_machine_are_refused_by_arithmetic(tmp_path, overrides):
    begin = time.perf_counter()
    with pytest.raises(RecipeError, match=r"model: .* layers with .* heads .*(GB|too large for any machine)"):
        train(tiny(**overrides), tmp_path / "run")
    assert time.perf_counter() - begin < 20
    assert not (tmp_path / "run").exists()


def test_a_saved_model_beyond_the_machine_is_refused(tmp_path):
    run = tmp_path / "run"
    train(tiny(), run)
    for name, value in (("vocab_size", 10**12), ("num_hidden_layers", 10**7), ("hidden_size", "many")):
        config = json.loads((run / "model" / "config.json").read_bytes())
        (run / "model" / "config.json").write_text(json.dumps({**config, name: value}))
        write_summary(run, read_summary(run))
        with pytest.raises(TrainingError, match="model: the model cannot be loaded"):
            evaluate(run)
        (run / "model" / "config.json").write_text(json.dumps(config))
