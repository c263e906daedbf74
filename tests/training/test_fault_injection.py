"""Kills at random moments and flipped bytes: an equal result or a named reason why not, never a silent difference.

``MGK_FAULTS=200`` is the nightly size: so many kills, and ten flips of every file in place of one.
"""

import multiprocessing
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import killed_run
import pytest
from training_cases import tiny, trajectory, weights

from mgk._util.errors import UserError
from mgk.data import load, prepare, vocabulary
from mgk.data.preparation import prepared
from mgk.experiments.reproduce.collect import collect_result
from mgk.experiments.result_store import ResultStore
from mgk.training import read_correct, read_metrics, read_summary, train
from mgk.training.recipe import Recipe
from mgk.training.run_dir import check_finished, read_environment, read_run_recipe
from mgk.training.tasks import load_model, open_data

KILLS = int(os.environ.get("MGK_FAULTS", "20"))
FLIPS = max(1, KILLS // 20)
CLOCKS = ("seconds_per_step", "tokens_per_second", "peak_memory_bytes", "seconds")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Recipe:
    return tiny(data__folder=str(tmp_path_factory.mktemp("data")), training__threads=1)


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    train(recipe, run)
    return run


@pytest.fixture(scope="module")
def broken(recipe, tmp_path_factory) -> Path:
    """A run that was killed after its second checkpoint."""
    run = tmp_path_factory.mktemp("runs") / "broken"
    started(recipe, run, None, 5).join()
    assert (run / "checkpoints" / "step-4").is_dir()
    assert not (run / "summary.json").exists()
    return run


def started(recipe: Recipe, run: Path, write: int | None, step: int | None = None) -> Any:
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mgk.training.run", "torch.utils.tensorboard", "scipy.stats"])
    process = context.Process(target=killed_run.work, args=(recipe, run, write, step))
    process.start()
    return process


def result_of(run: Path) -> dict[str, Any]:
    """All that a run has found, without its clocks, which must have been measured."""
    summary = asdict(read_summary(run))
    clocks = {name: summary.pop(name) for name in CLOCKS}
    peak = clocks.pop("peak_memory_bytes")
    assert min(clocks.values()) > 0, clocks
    assert peak is None or peak > 0
    return {"summary": summary, "curve": trajectory(run), "correct": read_correct(run), "weights": weights(run)}


def flips(path: Path, chance: random.Random, number: int = FLIPS) -> list[tuple[int, int]]:
    """Places and bits."""
    return [(chance.randrange(path.stat().st_size), 1 << chance.randrange(8)) for _ in range(number)]


def spoil(path: Path, place: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= bit
    path.write_bytes(data)


def equal_or_refused(read: Callable[[], Any], truth: Any, what: str) -> bool:
    """Whether it was refused; a difference, or an error that is not the user's, fails."""
    try:
        assert read() == truth, what
    except UserError:
        return True
    return False


def test_kills_at_random_moments_change_nothing(recipe, whole, tmp_path):
    chance, truth = random.Random(0), result_of(whole)
    begin = time.monotonic()
    process = started(recipe, tmp_path / "timed", None)
    process.join()
    seconds, kills, runs = time.monotonic() - begin, 0, 0
    while kills < KILLS:
        run, is_finished = tmp_path / f"run-{runs}", False
        runs += 1
        while not is_finished:
            kind = chance.random() if kills < KILLS else 1.0
            process = started(recipe, run, chance.randrange(70) if kind < 0.5 else None)
            if 0.5 <= kind < 1.0:
                process.join(chance.uniform(0, seconds))
                process.kill()
            process.join()
            assert process.exitcode in (0, -9)
            is_finished = process.exitcode == 0
            kills += not is_finished
        assert result_of(run) == truth
        assert {path.name for path in run.iterdir()} - {".lock"} == {
            path.name for path in whole.iterdir() if path.name != ".lock"
        }
        shutil.rmtree(run)


def files_of(folder: Path) -> list[Path]:
    return sorted(
        path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and path.name != ".lock"
    )


def test_a_flipped_byte_in_an_unfinished_run(recipe, whole, broken, tmp_path):
    chance, truth = random.Random(1), result_of(whole)
    for name in files_of(broken):
        for place, bit in flips(broken / name, chance):
            run = tmp_path / "run"
            shutil.copytree(broken, run)
            spoil(run / name, place, bit)

            def read(run: Path = run) -> dict[str, Any]:
                train(recipe, run, resume=True)
                return result_of(run)

            equal_or_refused(read, truth, f"{name} at {place}, bit {bit}")
            shutil.rmtree(run)


def test_a_flipped_byte_in_a_finished_run(recipe, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    task = open_data(recipe.data).task

    def read() -> Any:
        state = load_model(run, task).state_dict()
        found = asdict(read_summary(run)), read_metrics(run), read_correct(run), read_run_recipe(run)
        check_finished(run)
        return *found, read_environment(run), {name: value.tolist() for name, value in state.items()}

    truth, chance = read(), random.Random(2)
    refused = set()
    for name in files_of(run):
        for place, bit in flips(run / name, chance):
            spoil(run / name, place, bit)
            if equal_or_refused(read, truth, f"{name} at {place}, bit {bit}"):
                refused.add(name.parts[0] if name.parts[0] != "model" else name.name)
            spoil(run / name, place, bit)
    wanted = {"recipe.yaml", "metrics.jsonl", "test_correct.json", "model.safetensors"}
    assert (
        wanted
        <= refused
        <= {*wanted, "summary.json", "environment.json", *os.listdir(run / "model")} - {"README.md"}
    )


@pytest.mark.parametrize("task", ["listops", "wikitext-2"])
def test_a_flipped_byte_in_a_data_set(tmp_path, task):
    name = f"synthetic-{task}"
    folder = prepare(name, out=tmp_path).folder

    def read() -> Any:
        manifest = prepared(name, tmp_path)[1]
        rows = {split: load(name, split, folder=tmp_path) for split in manifest.splits}
        examples = [
            {k: v.tolist() for k, v in data[at].items()} for data in rows.values() for at in range(len(data))
        ]
        return manifest, examples, vocabulary(name, folder=tmp_path)

    truth, chance = read(), random.Random(3)
    for path in files_of(folder):
        content = (folder / path).read_bytes()
        number = 40 * FLIPS if path.name == "manifest.json" else FLIPS
        for place, bit in flips(folder / path, chance, number):
            spoil(folder / path, place, bit)
            was_refused = equal_or_refused(read, truth, f"{path} at {place}, bit {bit}")
            assert was_refused or path.name == "manifest.json"
            (folder / path).write_bytes(content)
    assert read() == truth


def test_a_flipped_byte_in_a_result(whole, tmp_path):
    store, truth = ResultStore(tmp_path), collect_result(whole)
    store.write(truth)
    path, chance = store.path(truth.trial), random.Random(4)
    content = path.read_bytes()
    for place, bit in flips(path, chance, 100 * FLIPS):
        spoil(path, place, bit)
        equal_or_refused(lambda: store.read(truth.trial), truth, f"at {place}, bit {bit}")
        path.write_bytes(content)
    assert store.read(truth.trial) == truth
