"""The claims of the paper: the trials that test each, and how its verdict is computed. Does not import torch.

The rules are in :mod:`mgk.experiments.evidence.decision_rules`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib import resources
from itertools import pairwise
from statistics import fmean
from typing import Any

import yaml

from mgk.analysis import cost_model
from mgk.analysis.confidence_intervals import student_interval
from mgk.analysis.formula import Quantity
from mgk.experiments.evidence.decision_rules import (
    CONFIRMED,
    CONTRADICTED,
    INCONCLUSIVE,
    MARGIN_PERPLEXITY,
    MARGIN_POINTS,
    NOT_MEASURED,
    Claim,
    Evidence,
    Outcome,
    Verdict,
    decide,
)
from mgk.experiments.evidence.effects import (
    ExperimentResults,
    difference_of_means,
    is_above_chance,
    mean_of,
    paired_by_seed,
)
from mgk.experiments.model_spec import HALVED, ModelSpec, sizes_of_paper
from mgk.experiments.render.numbers import confidence_text, json_safe, plural, signed
from mgk.experiments.reproduce.published import LRA
from mgk.experiments.reproduce.registry import EXPERIMENTS

Rule = Callable[[ExperimentResults], Iterator[Evidence]]
Count = Callable[[cost_model.Sizes], Quantity]

TECHNIQUES: Mapping[str, ModelSpec] = {
    "smgk": ModelSpec("smgk", 1),
    "mgk": ModelSpec("mgk", 1),
    "mgk + Hard-E": ModelSpec("mgk", 1, e_step="hard"),
    "mgk + Soft-E": ModelSpec("mgk", 1, prior="em"),
}
_HARD_SMGK = ModelSpec("smgk", 1, e_step="hard")


def _names(candidate: ModelSpec, baseline: ModelSpec) -> str:
    return f"{candidate.title} vs {baseline.title}"


def _compare(
    results: ExperimentResults, tasks: Sequence[str], candidate: ModelSpec, baseline: ModelSpec, *, is_comparable: bool
) -> Evidence:
    """One pair of models, the mean over the tasks on which at least one of them is above chance."""
    names = _names(candidate, baseline)
    found = {task: d for task in tasks if (d := results.difference(task, candidate, baseline)) is not None}
    if not found:
        return Evidence(NOT_MEASURED, f"{names}: not measured.")
    labels = {task: results.trials(task, candidate)[0].data.label for task in found}
    informative = [
        task for task in found if any(is_above_chance(results.trials(task, m)) for m in (candidate, baseline))
    ]
    at_chance = [labels[task] for task in found if task not in informative]
    if not informative:
        return Evidence(INCONCLUSIVE, f"{names}: both at chance on {', '.join(at_chance)}.")
    interval = mean_of([found[task] for task in informative])
    is_accuracy = results.trials(informative[0], candidate)[0].summary.metric == "accuracy"
    unit, margin = (" points", MARGIN_POINTS) if is_accuracy else ("% of perplexity", MARGIN_PERPLEXITY)
    seeds = min(len(paired_by_seed(*(results.trials(task, m) for m in (candidate, baseline)))) for task in informative)
    parts = [
        f"{signed(interval.estimate)}{unit} ({confidence_text(interval)})",
        f"{'on' if len(informative) == 1 else 'mean over'} {', '.join(labels[task] for task in informative)}",
        plural(seeds, "seed"),
    ]
    if len(found) < len(tasks):
        parts.append(f"{len(tasks) - len(found)} of {len(tasks)} tasks not measured")
    if at_chance:
        parts.append(f"both at chance on {', '.join(at_chance)}")
    outcome = decide(interval, margin=margin if is_comparable else 0.0)
    return Evidence(outcome, f"{names}: {', '.join(parts)}.", interval)


def _against_baseline(table: str, *, half: bool, is_comparable: bool, only: Sequence[str] = ()) -> Rule:
    """Each mixture of a table against the baseline with twice as many heads, or as many."""

    def rule(results: ExperimentResults) -> Iterator[Evidence]:
        models, tasks = _setting(table, results)
        for model in models:
            if not model.is_mixture or (only and model.attention not in only):
                continue
            baseline = model.baseline(2 * model.heads if half else model.heads)
            if baseline in models:
                yield _compare(results, tasks, model, baseline, is_comparable=is_comparable)

    return rule


def _setting(experiment_id: str, results: ExperimentResults) -> tuple[tuple[ModelSpec, ...], tuple[str, ...]]:
    experiment = EXPERIMENTS[experiment_id]
    return experiment.models_at(results.preset), experiment.tasks_at(results.preset)


def _smgk_best(results: ExperimentResults) -> Iterator[Evidence]:
    for model in EXPERIMENTS["table1"].models_at(results.preset):
        if model.attention == "smgk":
            others = replace(model, attention="mgk"), model.baseline(model.heads), model.baseline(2 * model.heads)
            for other in others:
                yield _compare(results, LRA, model, other, is_comparable=False)


def _hard_e(results: ExperimentResults) -> Iterator[Evidence]:
    """Against the model of Table 4 with the highest mean on each task."""
    models = EXPERIMENTS["table4"].models_at(results.preset)
    found = {}
    for task in LRA:
        means = {
            model: fmean(trial.test for trial in trials)
            for model in models
            if model != _HARD_SMGK and (trials := results.trials(task, model))
        }
        best = max(means, key=lambda model: means[model], default=None)
        if best is not None and is_above_chance(results.trials(task, best)):
            interval = results.difference(task, _HARD_SMGK, best)
            if interval is not None:
                found[task] = (best, interval)
    if not found:
        is_measured = any(results.trials(task, _HARD_SMGK) for task in LRA)
        outcome, why = (INCONCLUSIVE, "all others at chance") if is_measured else (NOT_MEASURED, "not measured")
        yield Evidence(outcome, f"{_HARD_SMGK.title}: {why}.")
        return
    interval = mean_of([interval for _, interval in found.values()])
    others = ", ".join(f"{best.title} on {task}" for task, (best, _) in found.items())
    difference_text = f"{signed(interval.estimate)} points ({confidence_text(interval)})"
    sentence = f"{_HARD_SMGK.title} vs the best of each task ({others}): {difference_text}."
    yield Evidence(decide(interval, margin=MARGIN_POINTS), sentence, interval)


def _throughout_training(results: ExperimentResults) -> Iterator[Evidence]:
    models, (task,) = _setting("fig1", results)
    for model in models:
        if model.is_mixture:
            yield _compare_curves(results, task, model, model.baseline(2))


def _compare_curves(results: ExperimentResults, task: str, candidate: ModelSpec, baseline: ModelSpec) -> Evidence:
    names = _names(candidate, baseline)
    pairs = paired_by_seed(results.trials(task, candidate), results.trials(task, baseline))
    if not pairs:
        return Evidence(NOT_MEASURED, f"{names}: not measured.")
    curves = [(dict(ours.validation), dict(theirs.validation)) for ours, theirs in pairs]
    steps = set.intersection(*(ours.keys() & theirs.keys() for ours, theirs in curves))
    intervals = [student_interval([ours[step] - theirs[step] for ours, theirs in curves]) for step in steps]
    ahead = sum(interval.estimate > 0 for interval in intervals)
    behind = sum(interval.high < 0 for interval in intervals)
    outcome: Outcome = CONFIRMED if ahead == len(steps) else CONTRADICTED if behind else INCONCLUSIVE
    return Evidence(
        outcome,
        f"{names}: ahead at {ahead} of {len(steps)} evaluations by the mean over seeds, significantly behind at"
        f" {behind} (95% CI over seeds).",
    )


def _ranks(experiment_id: str) -> Rule:
    def rule(results: ExperimentResults) -> Iterator[Evidence]:
        (baseline, *others), (task,) = _setting(experiment_id, results)
        for model in others:
            yield _compare_ranks(results, task, model, baseline)

    return rule


def _compare_ranks(results: ExperimentResults, task: str, candidate: ModelSpec, baseline: ModelSpec) -> Evidence:
    names = _names(candidate, baseline)
    pairs = paired_by_seed(results.analyses(task, candidate), results.analyses(task, baseline))
    if not pairs:
        return Evidence(NOT_MEASURED, f"{names}: not measured.")
    by_seed = [
        mean_of([difference_of_means(a.ranks, b.ranks) for a, b in zip(ours.ranks, theirs.ranks, strict=True)])
        for ours, theirs in pairs
    ]
    interval = by_seed[0] if len(pairs) == 1 else student_interval([one.estimate for one in by_seed])
    means = [
        tuple(fmean(fmean(model.ranks[layer].ranks) for model in models) for models in zip(*pairs, strict=True))
        for layer in range(len(pairs[0][0].ranks))
    ]
    by_layer = ", ".join(f"{a:.1f} vs {b:.1f} in layer {number}" for number, (a, b) in enumerate(means, 1))
    change = f"mean difference {signed(interval.estimate)} ({confidence_text(interval)})"
    sentence = f"{names}: mean ranks {by_layer}; {change}, {plural(len(pairs), 'seed')}."
    return Evidence(decide(interval), sentence, interval)


def _redundancy(results: ExperimentResults) -> Iterator[Evidence]:
    """The baseline's head similarity minus the candidate's, by seed; with one seed, by example."""
    for experiment_id in ("fig2", "fig5"):
        (baseline, candidate, *_), (task,) = _setting(experiment_id, results)
        names = f"{_names(candidate, baseline)} on {task}"
        pairs = paired_by_seed(results.analyses(task, candidate), results.analyses(task, baseline))
        if not pairs or not pairs[0][0].head_similarity:
            yield Evidence(NOT_MEASURED, f"{names}: not measured.")
            continue
        reductions = [
            [b - a for a, b in zip(ours.head_similarity, theirs.head_similarity, strict=True)] for ours, theirs in pairs
        ]
        interval = student_interval(reductions[0] if len(pairs) == 1 else [fmean(values) for values in reductions])
        ours, theirs = (fmean(fmean(m.head_similarity) for m in models) for models in zip(*pairs, strict=True))
        yield Evidence(
            decide(interval),
            f"{names}: head similarity {ours:.3f} vs {theirs:.3f} within a layer (Δ {signed(interval.estimate)},"
            f" {confidence_text(interval)}; above 0 is less redundant), {plural(len(pairs), 'seed')}.",
            interval,
        )


def _cost(count: Count, model: ModelSpec) -> int:
    return count(sizes_of_paper(model)).value


def _halved_costs(attentions: Sequence[str]) -> Rule:
    """Both are lower with half the heads, and the more heads the larger the saving."""

    def rule(results: ExperimentResults) -> Iterator[Evidence]:
        for attention in attentions:
            for what, count in (("parameters", cost_model.model_parameters), ("FLOPs", cost_model.forward_flops)):
                saved, shares = [], []
                for heads in reversed(HALVED):
                    model = ModelSpec(attention, heads)
                    ours, theirs = _cost(count, model), _cost(count, model.baseline(2 * heads))
                    saved.append(theirs - ours)
                    shares.append(f"{ours / theirs:.2f} ({heads} of {2 * heads})")
                holds = min(saved) > 0 and all(more > less for less, more in pairwise(saved))
                yield Evidence(
                    CONFIRMED if holds else CONTRADICTED,
                    f"{attention}, {what} as a share of the baseline's with twice the heads: {', '.join(shares)}.",
                )

    return rule


def _fewest_parameters(results: ExperimentResults) -> Iterator[Evidence]:
    for heads in HALVED:
        models = [replace(model, heads=heads) for model in TECHNIQUES.values()]
        smgk, *others = (_cost(cost_model.model_parameters, model) for model in models)
        yield Evidence(
            CONFIRMED if smgk < min(others) else CONTRADICTED,
            f"parameters with H = {heads}: smgk {smgk:,}, the others {min(others):,} or more.",
        )


def _most_efficient(results: ExperimentResults) -> Iterator[Evidence]:
    """Of the models of Table 4, smgk with a hard E-step has the fewest parameters and training FLOPs."""
    models = EXPERIMENTS["table4"].models_at("paper")
    for what, count in (("parameters", cost_model.model_parameters), ("training FLOPs", cost_model.training_flops)):
        values = {model: _cost(count, model) for model in models}
        ours, most = values[_HARD_SMGK], max(values, key=lambda model: values[model])
        least = min(value for model, value in values.items() if model != _HARD_SMGK)
        yield Evidence(
            CONFIRMED if ours <= least else CONTRADICTED,
            f"{what} of {_HARD_SMGK.title}: {ours:,}; the least of the others has {least:,},"
            f" {most.title} {values[most]:,}.",
        )


# The rules by their names in claims.yaml; those with options are made by them.
_RULES: Mapping[str, Rule] = {
    "smgk_best": _smgk_best,
    "hard_e": _hard_e,
    "throughout_training": _throughout_training,
    "redundancy": _redundancy,
    "fewest_parameters": _fewest_parameters,
    "most_efficient": _most_efficient,
}
_RULES_WITH_OPTIONS: Mapping[str, Callable[..., Rule]] = {
    "against_baseline": _against_baseline,
    "ranks": _ranks,
    "halved_costs": _halved_costs,
}


def _read_claims() -> tuple[Claim, ...]:
    text = (resources.files("mgk.experiments.evidence") / "claims.yaml").read_text("utf-8")
    claims = []
    for name, fields in yaml.safe_load(text).items():
        options = fields.get("options")
        rule = _RULES_WITH_OPTIONS[fields["rule"]](**options) if options else _RULES[fields["rule"]]
        claims.append(Claim(name, fields["text"], fields["where"], rule))
    return tuple(claims)


CLAIMS = _read_claims()


def verdicts(results: ExperimentResults) -> dict[str, Verdict]:
    """The verdict on every claim, by its id."""
    return {claim.id: claim.verdict(results) for claim in CLAIMS}


def verdicts_json(results: ExperimentResults) -> dict[str, Any]:
    """All claims with their verdicts as JSON data; unbounded intervals have null."""
    data = {}
    for claim in CLAIMS:
        verdict = claim.verdict(results)
        evidence = json_safe([asdict(item) for item in verdict.evidence])
        data[claim.id] = {"text": claim.text, "where": claim.where, "verdict": verdict.outcome, "evidence": evidence}
    return {"format": 1, "preset": results.preset, "claims": data}
