"""From a finished run to what is kept of it: its record, and what is seen inside its model."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from mgk.analysis.attention_maps import AttentionMaps, attention_maps
from mgk.analysis.attention_rank import rank_distributions
from mgk.analysis.mixture_usage import mixture_usage
from mgk.analysis.redundancy import redundancy
from mgk.data.datasets import load_tokens
from mgk.data.manifest import read_record as read_sources
from mgk.experiments.inspect_runs import averaged, chance_level, typical_example
from mgk.experiments.model_analysis import LayerRanks, LayerUsage, ModelAnalysis, side_of
from mgk.experiments.reproduce.published import LRA
from mgk.experiments.result_store import DataNote, TrialResult, thinned
from mgk.experiments.trials import ModelSpec, Trial
from mgk.training.recipe import Recipe, load_recipe, read_recipe
from mgk.training.run_dir import ENVIRONMENT, RECIPE, read_correct, read_metrics, read_summary
from mgk.training.tasks import Batch, TaskData, count, load_model, open_data, quiet

# Training pairs of the ACL Anthology Network in LRA's release.
AAN_PAIRS = 147_086
# Examples that the similarity of heads and use of components are a mean over.
EXAMPLES = 32

_TITLES = {
    "listops": "ListOps",
    "text": "Text",
    "retrieval": "Retrieval",
    "image": "Image",
    "pathfinder": "Pathfinder",
    "wikitext-2": "WikiText-2",
    "wikitext-103": "WikiText-103",
}

OnStep = Callable[[int, int], None]


def collect_result(run: Path, *, command: str, jobs: int = 1, seconds: float = 0.0) -> TrialResult:
    """The record of a finished run.

    Args:
        run: its folder.
        command: that made it.
        jobs: how many ran at once.
        seconds: that it took, if it went through in one piece.
    """
    recipe, summary, lines = read_recipe(run / RECIPE), read_summary(run), read_metrics(run)
    environment = json.loads((run / ENVIRONMENT).read_bytes())
    session = environment["sessions"][-1]
    is_accuracy = summary.metric == "accuracy"
    return TrialResult(
        trial=Trial(recipe.preset, recipe.task, ModelSpec.of_recipe(recipe), recipe.seed),
        recipe=recipe.model_copy(update={"data": recipe.data.model_copy(update={"folder": None})}),
        summary=summary,
        data=note(recipe, open_data(recipe.data)),
        losses=thinned([(line["step"], line["loss"]) for line in lines if "loss" in line]),
        validation=thinned(
            [(line["step"], line[name]) for line in lines if (name := f"eval_{summary.metric}") in line]
        ),
        correct=tuple(read_correct(run)) if is_accuracy and summary.correct is not None else None,
        machine={**session["machine"], "versions": session["versions"], "sessions": len(environment["sessions"])},
        command=command,
        jobs=jobs,
        seconds=max(seconds, summary.seconds, *(line.get("seconds", 0.0) for line in lines)),
    )


def collect_results(runs: Sequence[Path]) -> list[TrialResult]:
    """The records of finished runs; the command is the one that the run was started by."""
    return [collect_result(run, command=_command(run)) for run in runs]


def _command(run: Path) -> str:
    """Without the folders of the machine that it ran on."""
    session = json.loads((run / ENVIRONMENT).read_bytes())["sessions"][0]
    program, *arguments = session["command"]
    return " ".join([Path(program).name, *arguments])


def note(recipe: Recipe, data: TaskData) -> DataNote:
    """What the data of a recipe are, in words and numbers."""
    splits = [name for name in data.manifest.splits if name != "train"]
    examples = {name: _examples(data, name) for name in ("train", *splits)}
    label, is_papers = _label(recipe, data)
    test = data.split("test")
    chance = chance_level(data, test)
    return DataNote(
        label=label,
        is_papers=is_papers,
        is_synthetic=data.manifest.synthetic,
        chance=round(unigram_perplexity(data) if chance is None else chance, 4),
        examples=examples,
    )


def analyze_model(
    trial: Trial, run: Path, *, matrices: int, on_step: OnStep = lambda done, total: None
) -> ModelAnalysis:
    """Look into the model of a finished run.

    Args:
        trial: that it is of.
        run: its folder.
        matrices: of each layer, whose ranks are taken.
        on_step: called with how many examples of how many are done.
    """
    with quiet():
        data = open_data(trial.recipe.data)
        model = load_model(run, data.task)
        test = data.split("test")
        number = typical_example(test)
        if data.is_language:
            number = min(1, count(test) - 1)  # the first segment begins the text: its maps are not typical
        (whole,) = attention_maps(model, [test[number]])
        side = side_of(whole.weights.shape[0] * whole.weights.shape[1])
        sampled = rank_examples(data, ("test", trial.recipe.evaluation.split))
        distributions = rank_distributions(model, sampled, count=matrices, on_step=on_step)
        places = np.linspace(0, count(test) - 1, min(EXAMPLES, count(test))).astype(int)
        examples = [test[int(place)] for place in places]
        similarity = [redundancy(model, [example]).within_layers for example in examples]
        usage = mixture_usage(model, examples) if trial.model.is_mixture else []
    return ModelAnalysis(
        trial=trial,
        tokens=whole.weights.shape[-1],
        maps=AttentionMaps(averaged(whole.weights, side), whole.layers, whole.heads),
        ranks=tuple(
            LayerRanks(
                ranks=tuple(layer.ranks.tolist()),
                effective=tuple(round(value, 2) for value in layer.effective.tolist()),
                lengths=tuple(layer.lengths.tolist()),
            )
            for layer in distributions
        ),
        head_similarity=tuple(round(value, 5) for value in similarity if value is not None),
        usage=tuple(
            LayerUsage(
                prior=_rounded(layer.prior.tolist()),
                share=_rounded(layer.share.tolist()),
                certainty=_rounded(layer.certainty.tolist()),
                distance=_rounded(layer.distance.tolist()),
            )
            for layer in usage
        ),
    )


def rank_examples(data: TaskData, splits: Sequence[str]) -> ConcatDataset[Batch]:
    """What ranks are taken of: some splits together, as the test split alone may have too few examples.

    A last segment of running text that is shorter has a lower rank, whatever the model, and is left out.
    """
    parts = [data.split(name) for name in dict.fromkeys(splits)]
    if data.is_language:
        parts = [
            Subset(part, range(count(part) - 1))
            if part[count(part) - 1]["input_ids"].shape[-1] < part[0]["input_ids"].shape[-1]
            else part
            for part in parts
        ]
    return ConcatDataset(parts)


def unigram_perplexity(data: TaskData) -> float:
    """exp(-mean of log p(word)) over the test split, p the word's frequency in training, one added to each count."""
    words = data.manifest.facts["vocab_size"]
    counts, test = (
        np.bincount(load_tokens(data.task.name, split, folder=data.folder), minlength=words).astype(np.float64)
        for split in ("train", "test")
    )
    log_p = np.log((counts + 1) / (counts + 1).sum())
    return float(np.exp(-(test * log_p).sum() / test.sum()))


def _examples(data: TaskData, split: str) -> int:
    return data.manifest.examples(split) if data.is_language else count(data.split(split))


def _label(recipe: Recipe, data: TaskData) -> tuple[str, bool]:
    """What the data are, and whether they are the paper's at its size."""
    name = _TITLES[recipe.task]
    if data.manifest.synthetic:
        return f"{name} (made-up sample)", False
    parts = []
    if recipe.task == "retrieval" and data.manifest.examples("train") != AAN_PAIRS:
        parts.append(f"{_source(data)} in place of AAN")
    if recipe.task == "pathfinder" and data.manifest.options.get("difficulty", "hard") != "hard":
        parts.append(str(data.manifest.options["difficulty"]))
    length = data.max_length
    full = load_recipe(recipe.task, "paper").data.max_length
    if full is not None and length < full:
        unit = {"listops": "tokens", "text": "bytes", "retrieval": "bytes"}.get(recipe.task, "tokens")
        parts.append(f"{length:,} {unit}")
    is_whole = recipe.data.train_examples is None and recipe.data.test_examples is None
    is_papers = recipe.task in (*LRA, "wikitext-103") and is_whole and not parts
    return f"{name} ({', '.join(parts)})" if parts else name, is_papers


def _source(data: TaskData) -> str:
    """The name of what a set was read from, without its folders and endings."""
    sources = read_sources(data.folder / data.task.name, data.manifest)
    found = [Path(sources.root).name, *(Path(file.path).name for file in sources.files)]
    if any("peerread" in part.lower() for part in [sources.root, *found]):
        return "PeerRead pairs"
    return found[0].partition(".")[0] or "other pairs"


def _rounded(values: Any) -> Any:
    return [_rounded(value) for value in values] if isinstance(values, list) else round(values, 4)
