"""Synthetic results and analyses, for what is made from them."""

import numpy as np

from mgk.analysis.attention_maps import AttentionMaps
from mgk.experiments.model_analysis import LayerRanks, LayerUsage, ModelAnalysis
from mgk.experiments.model_spec import ModelSpec
from mgk.experiments.reproduce.registry import EXPERIMENTS, make_trial
from mgk.experiments.result_store import DataNote, ResultStore, TrialResult
from mgk.training.run_dir import RunSummary

EXAMPLES = 500
LABELS = {
    "listops": "ListOps (200 tokens)",
    "text": "Text (1,000 bytes)",
    "retrieval": "Retrieval (PeerRead pairs in place of AAN)",
}


def record(task, model, seed, *, share=0.6, preset="laptop", chance=0.5, perplexity=None):
    """A trial with so many right answers, or this perplexity."""
    trial = make_trial(preset, task, model, seed)
    generator = np.random.Generator(np.random.PCG64([seed, *map(ord, task)]))
    difficulty = generator.random(EXAMPLES)  # the same for all models
    correct = tuple(bool(value) for value in difficulty < share)
    is_language = task.startswith("wikitext")
    values = {"test_loss": 1.0, "test_accuracy": float(np.mean(correct))}
    if is_language:
        values = {"best_validation_perplexity": perplexity + 5, "test_loss": 4.0}
        values |= {"test_perplexity": perplexity + 1, "test_sliding_perplexity": perplexity}
    summary = RunSummary(
        task=task,
        preset=preset,
        data=task,
        seed=seed,
        attention=model.attention,
        heads=model.heads,
        steps=100,
        parameters=50_000 + 1_000 * model.heads,
        train_loss=0.5,
        metric="perplexity" if is_language else "accuracy",
        metrics=values,
        test_split="test",
        examples=EXAMPLES,
        correct=None if is_language else sum(correct),
        seconds_per_step=0.1,
        tokens_per_second=1e4,
        peak_memory_bytes=10**7,
        seconds=10.0,
        device="cpu",
        processes=1,
    )
    level = perplexity if is_language else share
    return TrialResult(
        trial=trial,
        recipe=trial.recipe,
        summary=summary,
        data=DataNote(
            label=LABELS.get(task, task),
            is_papers=False,
            is_synthetic=False,
            chance=700.0 if is_language else chance,
            examples={"train": 1000, "test": EXAMPLES},
        ),
        losses=tuple((10 * step, 2.0 - 0.1 * step + 0.01 * seed) for step in range(1, 11)),
        validation=tuple((20 * step, level * (1 + 0.01 * step)) for step in range(1, 6)),
        correct=None if is_language else correct,
        machine={
            "processor": "a processor",
            "cores": 2,
            "accelerator": None,
            "torch": "2.13.0",
            "mgk": "0.1.0",
            "commit": "0123456789abcdef",
            "date": "2026-11-16T00:00:00+00:00",
        },
        command="mgk reproduce table1 --preset laptop",
        jobs=1,
        seconds=180.0,
    )


def analysis(task, model, seed=0, *, rank=20, similarity=0.5, layers=2, preset="laptop"):
    """The analysis of a model."""
    generator = np.random.Generator(np.random.PCG64(model.heads))
    weights = generator.random((layers, model.heads, 12, 12)).astype(np.float32)
    weights /= weights.sum(-1, keepdims=True)
    usage = LayerUsage(
        prior=[[0.5, 0.5]] * model.heads,
        share=[[0.4, 0.6]] * model.heads,
        certainty=[0.7] * model.heads,
        distance=[[[0.0, 1.5], [1.5, 0.0]]] * model.heads,
    )
    ranks = tuple(int(value) for value in rank + generator.integers(0, 3, 40))
    return ModelAnalysis(
        trial=make_trial(preset, task, model, seed),
        tokens=48,
        maps=AttentionMaps(weights, tuple(range(layers)), tuple(range(model.heads))),
        ranks=tuple(LayerRanks(ranks=ranks, effective=(5.0,) * 40, lengths=(48,) * 40) for _ in range(layers)),
        head_similarity=tuple(similarity + 0.01 * number for number in range(5)) if model.heads > 1 else (),
        usage=(usage,) * layers if model.is_mixture else (),
    )


# Mixtures are a little better here, and their ranks higher.
SHARES = {"softmax": 0.70, "linear": 0.66, "mgk": 0.74, "smgk": 0.78, "mlk": 0.68, "smlk": 0.69}


def everything(seeds=3, preset="laptop"):
    """Results of every trial of the laptop's tables and figures, and analyses of their models."""
    trials = {trial for experiment in EXPERIMENTS.values() for trial in experiment.trials(preset, seeds=seeds)}
    records = [
        record(
            trial.task,
            trial.model,
            trial.seed,
            share=SHARES[trial.model.attention],
            perplexity=200 - 100 * SHARES[trial.model.attention] + trial.seed,
        )
        for trial in sorted(trials, key=str)
    ]
    analyzed = {trial for item in EXPERIMENTS.values() if item.kind == "maps" for trial in item.trials(preset)}
    return records, [
        analysis(trial.task, trial.model, rank=30 if trial.model.is_mixture else 20) for trial in analyzed
    ]


SOFTMAX, MGK, SMGK = ModelSpec("softmax", 2), ModelSpec("mgk", 1), ModelSpec("smgk", 1)


def stored(folder):
    """A store of everything."""
    store = ResultStore(folder)
    records, analyses = everything()
    for item in (*records, *analyses):
        store.write(item)
    return store
