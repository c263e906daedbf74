"""Makes the result of a trial from the folder of its finished run."""

from collections import Counter
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from mgk.data.datasets import load_tokens
from mgk.data.manifest import read_record as read_sources
from mgk.experiments.model_spec import ModelSpec
from mgk.experiments.reproduce.published import LRA, TITLES
from mgk.experiments.result_store import DataNote, TrialResult, thinned
from mgk.experiments.trials import Trial
from mgk.training import run_dir
from mgk.training.recipe import Recipe, load_recipe
from mgk.training.tasks import Batch, TaskData, count, open_data

# Training pairs of the ACL Anthology Network in LRA's release.
AAN_PAIRS = 147_086


def collect_result(
    run: Path,
    *,
    trial: Trial | None = None,
    command: str | None = None,
    jobs: int = 1,
    seconds: float = 0.0,
    plan: str | None = None,
) -> TrialResult:
    """The result of a finished run.

    Args:
        trial: whose run it is; the one of its recipe if None.
        command: that made it; the one that started the run if None.
        seconds: that it took, if it was not interrupted.
    """
    run_dir.check_finished(run)
    recipe, summary, lines = run_dir.read_run_recipe(run), run_dir.read_summary(run), run_dir.read_metrics(run)
    sessions = run_dir.read_environment(run)["sessions"]
    machine, versions = sessions[-1]["machine"], sessions[-1]["versions"]
    program, *arguments = sessions[0]["command"]
    losses, validation = (
        thinned([(line["step"], line[name]) for line in lines if name in line])
        for name in ("loss", f"eval_{summary.metric}")
    )
    return TrialResult(
        trial=trial or Trial(recipe.preset, recipe.task, ModelSpec.of_recipe(recipe), recipe.seed),
        recipe=recipe.model_copy(update={"data": recipe.data.model_copy(update={"folder": None})}),
        summary=summary,
        data=describe_data(recipe, open_data(recipe.data)),
        losses=losses,
        validation=validation,
        correct=None if summary.correct is None else tuple(run_dir.read_correct(run)),
        machine={**machine, "versions": versions, "sessions": len(sessions)},
        command=command or " ".join([Path(program).name, *arguments]),
        jobs=jobs,
        seconds=round(max(seconds, summary.seconds, *(line.get("seconds", 0.0) for line in lines)), 1),
        plan=plan,
    )


def collect_results(folder: Path) -> list[TrialResult]:
    """The results of all finished runs below a folder."""
    runs = sorted(
        path.parent for path in folder.rglob(run_dir.SUMMARY) if (path.parent / run_dir.RECIPE).is_file()
    )
    return [collect_result(run) for run in runs]


def describe_data(recipe: Recipe, data: TaskData) -> DataNote:
    """The data of a recipe: name, size and chance level."""
    splits = ("train", *(name for name in data.manifest.splits if name != "train"))
    is_language = data.is_language
    label, is_papers = _label(recipe, data)
    return DataNote(
        label=label,
        is_papers=is_papers,
        is_synthetic=data.manifest.synthetic,
        chance=round(_unigram(data) if is_language else _majority_share(data.split("test")), 4),
        examples={
            name: data.manifest.examples(name) if is_language else count(data.split(name)) for name in splits
        },
    )


def _majority_share(test: Dataset[Batch]) -> float:
    """The accuracy of always answering the most frequent class."""
    labels = Counter(int(test[place]["labels"]) for place in range(count(test)))
    return max(labels.values()) / labels.total()


def _unigram(data: TaskData) -> float:
    """exp(-mean log p(word)) of the test split by training counts; or bits."""
    words = data.manifest.facts["vocab_size"]
    counts, test = (
        np.bincount(load_tokens(data.task.name, split, folder=data.folder), minlength=words).astype(np.float64)
        for split in ("train", "test")
    )
    log_p = np.log((counts + 1) / (counts + 1).sum())
    loss = -(test * log_p).sum() / test.sum()
    return float(loss / np.log(2) if data.metric == "bits_per_byte" else np.exp(loss))


def _label(recipe: Recipe, data: TaskData) -> tuple[str, bool]:
    """The data's name with what differs from the paper's, if anything."""
    name = TITLES[recipe.task]
    if data.manifest.synthetic:
        return f"{name} (synthetic sample)", False
    parts = []
    if "corpus" in data.manifest.facts:
        parts.append(data.manifest.facts["corpus"])
    if recipe.task == "retrieval" and data.manifest.examples("train") != AAN_PAIRS:
        parts.append(f"{_source(data)} in place of AAN")
    if recipe.task == "pathfinder" and data.manifest.options.get("difficulty", "hard") != "hard":
        parts.append(str(data.manifest.options["difficulty"]))
    full = load_recipe(recipe.task, "paper").data.max_length
    if full is not None and data.max_length < full:
        parts.append(
            f"{data.max_length:,} {'bytes' if recipe.task in ('text', 'retrieval', 'bytes') else 'tokens'}"
        )
    is_whole = recipe.data.train_examples is None and recipe.data.test_examples is None
    is_papers = recipe.task in (*LRA, "wikitext-103") and is_whole and not parts
    return f"{name} ({', '.join(parts)})" if parts else name, is_papers


def _source(data: TaskData) -> str:
    """The name of the source of a data set, without folders and suffixes."""
    sources = read_sources(data.folder / data.task.name, data.manifest)
    found = [Path(sources.root).name, *(Path(file.path).name for file in sources.files)]
    if any("peerread" in part.lower() for part in [sources.root, *found]):
        return "PeerRead pairs"
    return found[0].partition(".")[0] or "other pairs"
