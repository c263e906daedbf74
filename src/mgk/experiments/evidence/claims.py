"""The claims of the paper: where each stands, which trials test it, and how its verdict is computed. Free of torch.

The rules are in :mod:`mgk.experiments.evidence.decision_rules`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from math import isfinite
from statistics import fmean
from typing import Any

from mgk.analysis import cost_model
from mgk.analysis.confidence_intervals import Interval, student_interval
from mgk.experiments.evidence.decision_rules import (
    CONFIRMED,
    CONTRADICTED,
    MARGIN_PERPLEXITY,
    MARGIN_POINTS,
    NOT_MEASURED,
    NOT_SEEN,
    Claim,
    Evidence,
    Findings,
    Verdict,
    Word,
    judge,
)
from mgk.experiments.evidence.effects import between_samples, has_learned, mean_of, pooled
from mgk.experiments.model_analysis import ModelAnalysis
from mgk.experiments.model_spec import HALVED, ModelSpec, sizes_of_paper
from mgk.experiments.reproduce.published import LRA
from mgk.experiments.reproduce.registry import EXPERIMENTS
from mgk.experiments.result_store import TrialResult

Rule = Callable[[Findings], Iterator[Evidence]]


def _text(interval: Interval, unit: str) -> str:
    if not isfinite(interval.low):
        return f"{interval.estimate:+.2f}{unit}, and one seed does not tell whether that is luck".replace("-", "−")
    bounds = f"95% interval {interval.low:+.2f} to {interval.high:+.2f}"
    return f"{interval.estimate:+.2f}{unit} ({bounds})".replace("-", "−")


def _compared(
    findings: Findings, tasks: Sequence[str], candidate: ModelSpec, baseline: ModelSpec, *, is_comparable: bool
) -> Evidence:
    """One pair of models over some tasks; tasks that neither has learned say nothing."""
    names, measured = f"{candidate.title} against {baseline.title}", findings.measured
    found = pooled(measured, tasks, candidate, baseline)
    if not found:
        return Evidence(NOT_MEASURED, f"{names}: not measured.")
    labels = {task: measured.of(task, candidate)[0].data.label for task in found}
    telling = [task for task in found if any(has_learned(measured.of(task, m)) for m in (candidate, baseline))]
    silent = [labels[task] for task in found if task not in telling]
    if not telling:
        return Evidence(NOT_SEEN, f"{names}: neither has learned anything on {', '.join(silent)}.")
    interval = mean_of([found[task].interval for task in telling])
    is_accuracy = measured.of(telling[0], candidate)[0].summary.metric == "accuracy"
    unit, margin = (" points", MARGIN_POINTS) if is_accuracy else ("% of perplexity", MARGIN_PERPLEXITY)
    seeds = min(found[task].seeds for task in telling)
    on = f"{'on' if len(telling) == 1 else 'mean over'} {', '.join(labels[task] for task in telling)}"
    parts = [_text(interval, unit), on, f"{seeds} seed{'' if seeds == 1 else 's'}"]
    if len(found) < len(tasks):
        parts.append(f"{len(tasks) - len(found)} of {len(tasks)} tasks not measured")
    if silent:
        parts.append(f"neither has learned anything on {', '.join(silent)}")
    return Evidence(judge(interval, margin=margin if is_comparable else 0.0), f"{names}: {', '.join(parts)}.", interval)


def _pairs(table: str, *, half: bool, is_comparable: bool, only: Sequence[str] = ()) -> Rule:
    """Each mixture of a table against the baseline with twice or as many heads."""

    def rule(findings: Findings) -> Iterator[Evidence]:
        experiment = EXPERIMENTS[table]
        models = experiment.models_at(findings.preset)
        for model in models:
            if not model.is_mixture or (only and model.attention not in only):
                continue
            baseline = model.baseline(2 * model.heads if half else model.heads)
            if baseline in models:
                tasks = experiment.tasks_at(findings.preset)
                yield _compared(findings, tasks, model, baseline, is_comparable=is_comparable)

    return rule


def _smgk_best(findings: Findings) -> Iterator[Evidence]:
    models = EXPERIMENTS["table1"].models_at(findings.preset)
    for model in models:
        if model.attention == "smgk":
            for other in (
                replace(model, attention="mgk"),
                model.baseline(model.heads),
                model.baseline(2 * model.heads),
            ):
                yield _compared(findings, LRA, model, other, is_comparable=False)


def _hard_e(findings: Findings) -> Iterator[Evidence]:
    """Against the best other model of Table 4 on each task, by its mean."""
    models = EXPERIMENTS["table4"].models_at(findings.preset)
    candidate = ModelSpec("smgk", 1, e_step="hard")
    found = {}
    for task in LRA:
        means = {
            model: fmean(record.test for record in records)
            for model in models
            if model != candidate and (records := findings.measured.of(task, model))
        }
        best = max(means, key=lambda model: means[model], default=None)
        if best is None or not has_learned(findings.measured.of(task, best)):
            continue
        difference = findings.measured.difference(task, candidate, best)
        if difference is not None:
            found[task] = (best, difference)
    if not found:
        is_there = any(findings.measured.of(task, candidate) for task in LRA)
        why = "no other model has learned anything" if is_there else "not measured"
        yield Evidence(NOT_SEEN if is_there else NOT_MEASURED, f"{candidate.title}: {why}.")
        return
    interval = mean_of([difference.interval for _, difference in found.values()])
    others = ", ".join(f"{best.title} on {task}" for task, (best, _) in found.items())
    sentence = f"{candidate.title} against the best of each task ({others}): {_text(interval, ' points')}."
    yield Evidence(judge(interval, margin=MARGIN_POINTS), sentence, interval)


def _cheapest(findings: Findings) -> Iterator[Evidence]:
    """Of the models of Table 4, smgk with a hard E-step has the fewest parameters, and none has fewer FLOPs."""
    models = EXPERIMENTS["table4"].models_at("paper")
    sizes = {model: sizes_of_paper(model) for model in models}
    hard = ModelSpec("smgk", 1, e_step="hard")
    for what, count in (("parameters", cost_model.model_parameters), ("training FLOPs", cost_model.training_flops)):
        values = {model: count(size).value for model, size in sizes.items()}
        is_least = values[hard] == min(values.values())
        most = max(values, key=lambda model: values[model])
        yield Evidence(
            CONFIRMED if is_least else CONTRADICTED,
            f"{what} of {hard.title}: {values[hard]:,}; the least of the others has"
            f" {min(value for model, value in values.items() if model != hard):,}, {most.title} {values[most]:,}.",
        )


def _throughout(findings: Findings) -> Iterator[Evidence]:
    experiment = EXPERIMENTS["fig1"]
    (task,) = experiment.tasks_at(findings.preset)
    for model in experiment.models_at(findings.preset):
        if model.is_mixture:
            yield _curves(findings, task, model, model.baseline(2))


def _curves(findings: Findings, task: str, candidate: ModelSpec, baseline: ModelSpec) -> Evidence:
    names = f"{candidate.title} against {baseline.title}"
    ours, theirs = (_by_seed(findings.measured.of(task, model)) for model in (candidate, baseline))
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return Evidence(NOT_MEASURED, f"{names}: not measured.")
    steps = set.intersection(*(ours[seed].keys() & theirs[seed].keys() for seed in seeds))
    intervals = [student_interval([ours[seed][step] - theirs[seed][step] for seed in seeds]) for step in steps]
    ahead = sum(interval.estimate > 0 for interval in intervals)
    below = sum(interval.high < 0 for interval in intervals)
    word: Word = CONFIRMED if ahead == len(steps) else CONTRADICTED if below else NOT_SEEN
    return Evidence(
        word,
        f"{names}: ahead at {ahead} of {len(steps)} evaluations by the mean over seeds, behind beyond the luck of seeds"
        f" at {below}.",
    )


def _by_seed(records: Sequence[TrialResult]) -> dict[int, dict[float, float]]:
    """The curve of the metric that is looked at, by seed."""
    return {record.trial.seed: dict(record.validation) for record in records}


def _ranks(experiment_id: str) -> Rule:
    def rule(findings: Findings) -> Iterator[Evidence]:
        experiment = EXPERIMENTS[experiment_id]
        (task,) = experiment.tasks_at(findings.preset)
        baseline, *others = experiment.models_at(findings.preset)
        for model in others:
            yield _rank_evidence(findings, task, model, baseline)

    return rule


def _rank_evidence(findings: Findings, task: str, candidate: ModelSpec, baseline: ModelSpec) -> Evidence:
    names = f"{candidate.title} against {baseline.title}"
    pairs = _seen_in_both(findings, task, candidate, baseline)
    if not pairs:
        return Evidence(NOT_MEASURED, f"{names}: not measured.")
    by_seed = [
        mean_of([between_samples(a.ranks, b.ranks) for a, b in zip(ours.ranks, theirs.ranks, strict=True)])
        for ours, theirs in pairs
    ]
    interval = by_seed[0] if len(pairs) == 1 else student_interval([one.estimate for one in by_seed])
    means = [
        tuple(fmean(fmean(model.ranks[layer].ranks) for model in models) for models in zip(*pairs, strict=True))
        for layer in range(len(pairs[0][0].ranks))
    ]
    by_layer = ", ".join(f"{a:.1f} and {b:.1f} in layer {number}" for number, (a, b) in enumerate(means, 1))
    sentence = f"{names}: mean ranks {by_layer}; {_text(interval, ' on average')}, {_how_many(pairs)}."
    return Evidence(judge(interval), sentence, interval)


def _seen_in_both(
    findings: Findings, task: str, candidate: ModelSpec, baseline: ModelSpec
) -> list[tuple[ModelAnalysis, ModelAnalysis]]:
    """What is seen in both models, of the seeds that both have."""
    ours, theirs = (
        {inside.trial.seed: inside for inside in findings.inside.get((task, model), ())}
        for model in (candidate, baseline)
    )
    return [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]


def _how_many(pairs: Sequence[tuple[ModelAnalysis, ModelAnalysis]]) -> str:
    return "one model of each" if len(pairs) == 1 else f"{len(pairs)} seeds"


def _redundancy(findings: Findings) -> Iterator[Evidence]:
    """Less likeness is better: the baseline's less the candidate's, seed by seed; of one seed, example by example."""
    for experiment_id in ("fig2", "fig5"):
        experiment = EXPERIMENTS[experiment_id]
        (task,) = experiment.tasks_at(findings.preset)
        baseline, candidate, *_ = experiment.models_at(findings.preset)
        names = f"heads of {candidate.title} and of {baseline.title} on {task}"
        pairs = _seen_in_both(findings, task, candidate, baseline)
        if not pairs or not pairs[0][0].head_similarity:
            yield Evidence(NOT_MEASURED, f"{names}: not measured.")
            continue
        less = [
            [b - a for a, b in zip(ours.head_similarity, theirs.head_similarity, strict=True)] for ours, theirs in pairs
        ]
        interval = student_interval(less[0] if len(pairs) == 1 else [fmean(values) for values in less])
        mine, other = (fmean(fmean(model.head_similarity) for model in models) for models in zip(*pairs, strict=True))
        yield Evidence(
            judge(interval),
            f"{names} are alike by {mine:.3f} and {other:.3f} within a layer (1: they always look at the same places);"
            f" less by {_text(interval, ' of 1')}, {_how_many(pairs)}.",
            interval,
        )


def _costs(*attentions: str) -> Rule:
    """Fewer of both with half the heads, and the more are saved the more heads there are."""

    def rule(findings: Findings) -> Iterator[Evidence]:
        for attention in attentions:
            for what, count in (("parameters", cost_model.model_parameters), ("FLOPs", cost_model.forward_flops)):
                saved, shares = [], []
                for heads in reversed(HALVED):
                    model = ModelSpec(attention, heads)
                    mine = count(sizes_of_paper(model)).value
                    theirs = count(sizes_of_paper(model.baseline(2 * heads))).value
                    saved.append(theirs - mine)
                    shares.append(f"{mine / theirs:.2f} ({heads} of {2 * heads})")
                holds = min(saved) > 0 and all(more > less for less, more in pairwise(saved))
                yield Evidence(
                    CONFIRMED if holds else CONTRADICTED,
                    f"{attention}, {what} as a share of the baseline's with twice the heads: {', '.join(shares)}.",
                )

    return rule


def _techniques(findings: Findings) -> Iterator[Evidence]:
    names = {name: ModelSpec("mgk", 1, **options) for name, options in TECHNIQUES.items() if name != "smgk"}
    for heads in HALVED:
        smgk = cost_model.model_parameters(sizes_of_paper(ModelSpec("smgk", heads))).value
        others = [
            cost_model.model_parameters(sizes_of_paper(replace(model, heads=heads))).value for model in names.values()
        ]
        yield Evidence(
            CONFIRMED if smgk < min(others) else CONTRADICTED,
            f"parameters with H = {heads}: smgk {smgk:,}, the others {min(others):,} or more.",
        )


TECHNIQUES: Mapping[str, Mapping[str, Any]] = {
    "smgk": {},
    "mgk": {},
    "mgk + Hard-E": {"e_step": "hard"},
    "mgk + Soft-E": {"prior": "em"},
}

CLAIMS = (
    Claim(
        "half-the-heads",
        "mgk and smgk with half the heads are as accurate as softmax or more.",
        "abstract, Section 3.1, Table 1",
        ("table1",),
        _pairs("table1", half=True, is_comparable=True),
    ),
    Claim(
        "half-the-heads-better",
        "mgk and smgk with half the heads are consistently more accurate than softmax.",
        "Section 3.1, Table 1",
        ("table1",),
        _pairs("table1", half=True, is_comparable=False),
    ),
    Claim(
        "same-heads",
        "With the same heads, mgk and smgk are more accurate than softmax.",
        "Section 3.1, Table 1",
        ("table1",),
        _pairs("table1", half=False, is_comparable=False),
    ),
    Claim("smgk-best", "smgk is the best across the tasks.", "Section 3.1, Table 1", ("table1",), _smgk_best),
    Claim(
        "linear-half-the-heads",
        "mlk and smlk with half the heads are as accurate as linear attention or more.",
        "Section 3.1, Table 2",
        ("table2",),
        _pairs("table2", half=True, is_comparable=True),
    ),
    Claim(
        "linear-same-heads",
        "With the same heads, mlk and smlk are more accurate than linear attention.",
        "Section 3.1, Table 2",
        ("table2",),
        _pairs("table2", half=False, is_comparable=False),
    ),
    Claim(
        "throughout-training",
        "On Retrieval, mgk and mlk with 1 and 2 heads are always better than 2-head softmax and linear attention while"
        " they train.",
        "Section 3.1, Figure 1",
        ("fig1",),
        _throughout,
    ),
    Claim(
        "language-half-the-heads",
        "A language model of mgk with half the heads has a lower test perplexity than softmax.",
        "Section 3.2, Table 3",
        ("table3",),
        _pairs("table3", half=True, is_comparable=False, only=("mgk",)),
    ),
    Claim(
        "language-same-heads",
        "With the same heads, mgk and smgk have a lower test perplexity than softmax.",
        "Section 3.2, Table 3, Figure 4",
        ("table3", "fig4"),
        _pairs("table3", half=False, is_comparable=False, only=("mgk", "smgk")),
    ),
    Claim(
        "language-linear-half-the-heads",
        "A language model of mlk with half the heads has a test perplexity comparable to linear attention's.",
        "Section 3.2, Table 3",
        ("table3",),
        _pairs("table3", half=True, is_comparable=True, only=("mlk",)),
    ),
    Claim(
        "language-linear-same-heads",
        "With the same heads, mlk has a lower test perplexity than linear attention.",
        "Section 3.2, Table 3, Figure 4",
        ("table3", "fig4"),
        _pairs("table3", half=False, is_comparable=False, only=("mlk",)),
    ),
    Claim(
        "ranks",
        "On Retrieval, attention matrices of mgk have higher ranks than those of softmax.",
        "Section 3.3, Figure 2",
        ("fig2",),
        _ranks("fig2"),
    ),
    Claim(
        "language-ranks",
        "In language models, attention matrices of mgk have higher ranks than those of softmax.",
        "Appendix A.2, Figure 6",
        ("fig6",),
        _ranks("fig6"),
    ),
    Claim(
        "redundancy",
        "The heads of mgk are less redundant than those of softmax.",
        "abstract, Section 3.3, Figures 2 and 5 (argued there, measured here)",
        ("fig2", "fig5"),
        _redundancy,
    ),
    Claim(
        "costs",
        "mgk and smgk with half the heads have fewer parameters and FLOPs than softmax, and the advantage grows with"
        " the heads.",
        "Section 3.3, Figure 3",
        ("fig3",),
        _costs("mgk", "smgk"),
    ),
    Claim(
        "linear-costs",
        "mlk and smlk with half the heads have fewer parameters and FLOPs than linear attention, and the advantage"
        " grows with the heads.",
        "Section 3.3, Figure 3",
        ("fig3",),
        _costs("mlk", "smlk"),
    ),
    Claim(
        "techniques",
        "smgk has fewer parameters than mgk, with a soft or a hard E-step.",
        "Appendix A.3, Figure 7",
        ("fig7",),
        _techniques,
    ),
    Claim(
        "hard-e",
        "smgk with a hard E-step is comparable to the best model of each task.",
        "Section 3.3, Table 4",
        ("table4",),
        _hard_e,
    ),
    Claim(
        "hard-e-costs",
        "smgk with a hard E-step is the most efficient of the models of Table 4.",
        "Section 3.3, Table 4, Figure 7",
        ("table4", "fig7"),
        _cheapest,
    ),
)


def verdicts(findings: Findings) -> dict[str, Verdict]:
    """The verdict on every claim, by its name."""
    return {claim.id: claim.verdict(findings) for claim in CLAIMS}


def verdicts_json(findings: Findings) -> dict[str, Any]:
    """All claims with their verdicts, as JSON data; an interval without bounds has null for them."""
    data = {}
    for claim in CLAIMS:
        verdict = claim.verdict(findings)
        evidence = [asdict(item) for item in verdict.evidence]
        for item in evidence:
            interval = item["interval"]
            item["interval"] = interval and {k: v if isfinite(v) else None for k, v in interval.items()}
        data[claim.id] = {"text": claim.text, "where": claim.where, "verdict": verdict.word, "evidence": evidence}
    return {"format": 1, "preset": findings.preset, "claims": data}
