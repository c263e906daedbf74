"""The claims of the paper: the trials that test each, and how its verdict is computed.

The rules are in :mod:`mgk.experiments.evidence.decision_rules`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import resources
from itertools import pairwise, product
from math import inf
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
    MARGINS,
    NOT_MEASURED,
    UNITS,
    Claim,
    Evidence,
    Outcome,
    Verdict,
    decide_better,
    decide_comparable,
    deciding_half_width,
)
from mgk.experiments.evidence.effects import (
    PresetResults,
    detectable_difference,
    difference_of_means,
    is_above_chance,
    mean_of,
    paired_by_seed,
    seeds_for,
)
from mgk.experiments.model_analysis import ModelAnalysis
from mgk.experiments.model_spec import HALVED, ModelSpec, sizes_of_paper
from mgk.experiments.render.numbers import confidence_text, json_safe, plural, signed
from mgk.experiments.reproduce.published import LRA
from mgk.experiments.reproduce.registry import EXPERIMENTS

Count = Callable[[cost_model.Sizes], Quantity]

TECHNIQUES: Mapping[str, ModelSpec] = {
    "smgk": ModelSpec("smgk", 1),
    "mgk": ModelSpec("mgk", 1),
    "mgk + Hard-E": ModelSpec("mgk", 1, e_step="hard"),
    "mgk + Soft-E": ModelSpec("mgk", 1, prior="em"),
}
_HARD_SMGK = ModelSpec("smgk", 1, e_step="hard")


def _unmeasured(names: str) -> Evidence:
    return Evidence(NOT_MEASURED, f"{names}: not measured.")


def _names(candidate: ModelSpec, baseline: ModelSpec) -> str:
    return f"{candidate.title} vs {baseline.title}"


def compare_pair(
    results: PresetResults,
    tasks: Sequence[str],
    candidate: ModelSpec,
    baseline: ModelSpec,
    *,
    is_comparable: bool,
) -> Evidence:
    """One pair of models: the mean over tasks above chance."""
    names = _names(candidate, baseline)
    found = {task: d for task in tasks if (d := results.difference(task, candidate, baseline)) is not None}
    if not found:
        return _unmeasured(names)
    labels = {task: results.trials(task, candidate)[0].data.label for task in found}
    informative = [
        task for task in found if any(is_above_chance(results.trials(task, m)) for m in (candidate, baseline))
    ]
    at_chance = [labels[task] for task in found if task not in informative]
    if not informative:
        return Evidence(INCONCLUSIVE, f"{names}: both at chance on {', '.join(at_chance)}.")
    interval = mean_of([found[task] for task in informative])
    metric = results.trials(informative[0], candidate)[0].summary.metric
    unit, margin = UNITS[metric], MARGINS[metric]
    seeds = min(len(results.differences(task, candidate, baseline)) for task in informative)
    parts = [
        f"{signed(interval.estimate)}{unit} ({confidence_text(interval)})",
        f"{'on' if len(informative) == 1 else 'mean over'} {', '.join(labels[task] for task in informative)}",
        plural(seeds, "seed"),
    ]
    if len(found) < len(tasks):
        parts.append(f"{len(tasks) - len(found)} of {len(tasks)} tasks not measured")
    if at_chance:
        parts.append(f"both at chance on {', '.join(at_chance)}")
    if is_comparable:
        outcome = decide_comparable(interval, margin=margin)
    else:
        narrower = (results.difference(task, candidate, baseline, confidence=0.9) for task in informative)
        outcome = decide_better(interval, at_90=mean_of([d for d in narrower if d is not None]), margin=margin)
    if outcome == INCONCLUSIVE:
        width = deciding_half_width(interval, margin, is_comparable=is_comparable)
        needed = seeds_for(interval, seeds, width)
        if needed is not None:
            parts.append(f"about {needed:,} seeds would decide it if the estimate stays")
    return Evidence(outcome, f"{names}: {', '.join(parts)}.", interval, unit, seeds)


def _against_baseline(
    results: PresetResults, *, table: str, half: bool, is_comparable: bool, only: Sequence[str] = ()
) -> Iterator[Evidence]:
    """Each mixture of a table against its baseline."""
    models, tasks = _setting(table, results)
    for model in models:
        if not model.is_mixture or (only and model.attention not in only):
            continue
        baseline = model.baseline(2 * model.heads if half else model.heads)
        if baseline in models:
            yield compare_pair(results, tasks, model, baseline, is_comparable=is_comparable)


def _setting(experiment_id: str, results: PresetResults) -> tuple[tuple[ModelSpec, ...], tuple[str, ...]]:
    experiment = EXPERIMENTS[experiment_id]
    return experiment.models_at(results.preset), experiment.tasks_at(results.preset)


def _smgk_best(results: PresetResults) -> Iterator[Evidence]:
    for model in EXPERIMENTS["table1"].models_at(results.preset):
        if model.attention == "smgk":
            baselines = map(model.baseline, (model.heads, 2 * model.heads))
            for other in (replace(model, attention="mgk"), *baselines):
                yield compare_pair(results, LRA, model, other, is_comparable=False)


def _hard_e(results: PresetResults) -> Iterator[Evidence]:
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
        why = "all others at chance" if is_measured else "not measured"
        outcome = INCONCLUSIVE if is_measured else NOT_MEASURED
        yield Evidence(outcome, f"{_HARD_SMGK.title}: {why}.")
        return
    interval = mean_of([interval for _, interval in found.values()])
    others = ", ".join(f"{best.title} on {task}" for task, (best, _) in found.items())
    difference_text = f"{signed(interval.estimate)} points ({confidence_text(interval)})"
    sentence = f"{_HARD_SMGK.title} vs the best of each task ({others}): {difference_text}."
    seeds = min(len(results.trials(task, _HARD_SMGK)) for task in found)
    outcome = decide_comparable(interval, margin=MARGINS["accuracy"])
    yield Evidence(outcome, sentence, interval, UNITS["accuracy"], seeds)


def _throughout_training(results: PresetResults) -> Iterator[Evidence]:
    models, (task,) = _setting("fig1", results)
    for model in models:
        if not model.is_mixture:
            continue
        baseline = model.baseline(2)
        names = _names(model, baseline)
        pairs = paired_by_seed(results.trials(task, model), results.trials(task, baseline))
        if not pairs:
            yield _unmeasured(names)
            continue
        curves = [(dict(ours.validation), dict(theirs.validation)) for ours, theirs in pairs]
        steps = set.intersection(*(ours.keys() & theirs.keys() for ours, theirs in curves))
        differences = ([ours[step] - theirs[step] for ours, theirs in curves] for step in steps)
        intervals = [student_interval(values) for values in differences]
        ahead = sum(interval.estimate > 0 for interval in intervals)
        behind = sum(interval.high < 0 for interval in intervals)
        outcome: Outcome = CONFIRMED if ahead == len(steps) else CONTRADICTED if behind else INCONCLUSIVE
        at = f"ahead at {ahead} of {len(steps)} evaluations by the mean over seeds"
        sentence = f"{names}: {at}, significantly behind at {behind} (95% CI over seeds)."
        yield Evidence(outcome, sentence)


def _analyzed_pairs(
    results: PresetResults, experiment_id: str
) -> Iterator[tuple[str, list[tuple[ModelAnalysis, ModelAnalysis]]]]:
    """Each model of a figure against its first: names, and analyses by seed."""
    (baseline, *others), (task,) = _setting(experiment_id, results)
    for model in others:
        pairs = paired_by_seed(results.analyses(task, model), results.analyses(task, baseline))
        yield _names(model, baseline), pairs


def _ranks(results: PresetResults, *, experiment_id: str) -> Iterator[Evidence]:
    for names, pairs in _analyzed_pairs(results, experiment_id):
        yield _compare_ranks(names, pairs) if pairs else _unmeasured(names)


def _compare_ranks(names: str, pairs: Sequence[tuple[ModelAnalysis, ModelAnalysis]]) -> Evidence:
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
    return Evidence(decide_better(interval), sentence, interval)


def _redundancy(results: PresetResults) -> Iterator[Evidence]:
    """The baseline's head similarity minus the candidate's."""
    for experiment_id in ("fig2", "fig5"):
        names, pairs = next(_analyzed_pairs(results, experiment_id))
        names += f" on {_setting(experiment_id, results)[1][0]}"
        if not pairs or not pairs[0][0].head_similarity:
            yield _unmeasured(names)
            continue
        reductions = [
            [b - a for a, b in zip(ours.head_similarity, theirs.head_similarity, strict=True)]
            for ours, theirs in pairs
        ]
        interval = student_interval(reductions[0] if len(pairs) == 1 else list(map(fmean, reductions)))
        groups = zip(*pairs, strict=True)
        ours, theirs = (fmean(fmean(model.head_similarity) for model in group) for group in groups)
        yield Evidence(
            decide_better(interval),
            f"{names}: head similarity {ours:.3f} vs {theirs:.3f} within a layer (Δ {signed(interval.estimate)},"
            f" {confidence_text(interval)}; above 0 is less redundant), {plural(len(pairs), 'seed')}.",
            interval,
        )


def _cost(count: Count, model: ModelSpec) -> int:
    return count(sizes_of_paper(model)).value


def _halved_costs(results: PresetResults, *, attentions: Sequence[str]) -> Iterator[Evidence]:
    """Lower with half the heads, and the more heads the larger the saving."""
    counts = {"parameters": cost_model.model_parameters, "FLOPs": cost_model.forward_flops}
    for attention, (what, count) in product(attentions, counts.items()):
        saved, shares = [], []
        for heads in reversed(HALVED):
            model = ModelSpec(attention, heads)
            ours, theirs = _cost(count, model), _cost(count, model.baseline(2 * heads))
            saved.append(theirs - ours)
            shares.append(f"{ours / theirs:.2f} ({heads} of {2 * heads})")
        holds = min(saved) > 0 and all(more > less for less, more in pairwise(saved))
        share = f"{attention}, {what} as a share of the baseline's with twice the heads"
        yield Evidence(CONFIRMED if holds else CONTRADICTED, f"{share}: {', '.join(shares)}.")


def _fewest_parameters(results: PresetResults) -> Iterator[Evidence]:
    for heads in HALVED:
        models = [replace(model, heads=heads) for model in TECHNIQUES.values()]
        smgk, *others = (_cost(cost_model.model_parameters, model) for model in models)
        yield Evidence(
            CONFIRMED if smgk < min(others) else CONTRADICTED,
            f"parameters with H = {heads}: smgk {smgk:,}, the others {min(others):,} or more.",
        )


def _most_efficient(results: PresetResults) -> Iterator[Evidence]:
    """Of the models of Table 4, smgk with a hard E-step costs least."""
    models = EXPERIMENTS["table4"].models_at("paper")
    for what, count in (
        ("parameters", cost_model.model_parameters),
        ("training FLOPs", cost_model.training_flops),
    ):
        values = {model: _cost(count, model) for model in models}
        ours, most = values[_HARD_SMGK], max(values, key=lambda model: values[model])
        least = min(value for model, value in values.items() if model != _HARD_SMGK)
        yield Evidence(
            CONFIRMED if ours <= least else CONTRADICTED,
            f"{what} of {_HARD_SMGK.title}: {ours:,}; the least of the others has {least:,},"
            f" {most.title} {values[most]:,}.",
        )


# Rules by their names in claims.yaml.
_RULES: Mapping[str, Callable[..., Iterator[Evidence]]] = {
    "against_baseline": _against_baseline,
    "smgk_best": _smgk_best,
    "hard_e": _hard_e,
    "throughout_training": _throughout_training,
    "ranks": _ranks,
    "redundancy": _redundancy,
    "halved_costs": _halved_costs,
    "fewest_parameters": _fewest_parameters,
    "most_efficient": _most_efficient,
}


def _read_claims() -> tuple[Claim, ...]:
    text = (resources.files("mgk.experiments.evidence") / "claims.yaml").read_text("utf-8")
    claims = []
    for name, fields in yaml.safe_load(text).items():
        rule = partial(_RULES[fields["rule"]], **fields.get("options", {}))
        claims.append(Claim(name, fields["text"], fields["where"], rule))
    return tuple(claims)


CLAIMS = _read_claims()


def verdicts(results: PresetResults) -> dict[str, Verdict]:
    """The verdict on every claim, by its id."""
    return {claim.id: claim.verdict(results) for claim in CLAIMS}


def power(evidence: Sequence[Evidence], seeds: int) -> str:
    """The difference that so many seeds can detect; of several the largest."""
    found: dict[str, float] = {}
    if all(item.outcome in (CONFIRMED, CONTRADICTED) and item.interval is None for item in evidence):
        return "decided by formula"
    for item in evidence:
        if item.interval is not None and item.seeds is not None:
            difference = detectable_difference(item.interval, item.seeds, seeds)
            found[item.unit] = max(difference, found.get(item.unit, 0.0))
    if not found or max(found.values()) == inf:
        return "what it can detect is not known before two seeds of every pair are measured"
    differences = " and ".join(f"{value:.1f}{unit}" for unit, value in found.items())
    return f"{plural(seeds, 'seed')} detect a difference of {differences} with a power of 80%"


def verdicts_json(results: PresetResults) -> dict[str, Any]:
    """All claims as JSON data; unbounded intervals have null."""
    data = {}
    for claim in CLAIMS:
        verdict = claim.verdict(results)
        evidence = json_safe([asdict(item) for item in verdict.evidence])
        data[claim.id] = {
            "text": claim.text,
            "where": claim.where,
            "verdict": verdict.outcome,
            "evidence": evidence,
        }
    return {"format": 1, "preset": results.preset, "claims": data}
