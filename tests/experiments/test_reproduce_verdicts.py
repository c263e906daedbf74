"""Differences, tables and verdicts from records whose truth is known."""

import json
from dataclasses import replace
from math import inf, isinf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_results import MGK, SMGK, SOFTMAX, analysis, everything, record

from mgk.analysis.confidence_intervals import Interval, paired_difference, student_interval
from mgk.experiments.evidence.claims import CLAIMS, verdicts, verdicts_json
from mgk.experiments.evidence.decision_rules import (
    CONFIRMED,
    CONTRADICTED,
    EQUIVALENT,
    INCONCLUSIVE,
    NOT_MEASURED,
    Claim,
    Evidence,
    decide_better,
    decide_comparable,
)
from mgk.experiments.evidence.effects import (
    PresetResults,
    detectable_difference,
    difference_of_means,
    is_above_chance,
    mean_of,
)
from mgk.experiments.model_spec import ModelSpec
from mgk.experiments.render.tables import make_table
from mgk.experiments.reproduce.published import LRA
from mgk.experiments.reproduce.registry import EXPERIMENTS

SOFTMAX_1 = ModelSpec("softmax", 1)


def results(*records, analyses=()):
    return PresetResults("laptop", records, analyses)


def table_1(shares, *, seeds=3, tasks=LRA, chance=0.5):
    return [
        record(task, model, seed, share=share, chance=chance)
        for model, share in shares.items()
        for task in tasks
        for seed in range(seeds)
    ]


@pytest.mark.parametrize(
    ("low", "high", "better", "comparable"),
    [
        (0.1, 2.0, CONFIRMED, CONFIRMED),
        (-0.5, 2.0, INCONCLUSIVE, CONFIRMED),
        (-0.9, -0.1, CONTRADICTED, CONFIRMED),
        (-3.0, 2.0, INCONCLUSIVE, INCONCLUSIVE),
        (-3.0, -0.5, CONTRADICTED, INCONCLUSIVE),
        (-3.0, -1.5, CONTRADICTED, CONTRADICTED),
        (-inf, inf, INCONCLUSIVE, INCONCLUSIVE),
    ],
)
def test_the_rules(low, high, better, comparable):
    interval = Interval((low + high) / 2, low, high)
    assert decide_better(interval) == better
    assert decide_comparable(interval, margin=1.0) == comparable


@pytest.mark.parametrize(
    ("interval", "at_90", "outcome"),
    [
        ((-0.8, 0.9), (-0.7, 0.8), EQUIVALENT),
        ((-1.2, 1.1), (-0.99, 0.9), EQUIVALENT),  # the tests are one-sided: the 90% interval decides
        ((-1.2, 1.1), (-1.01, 0.9), INCONCLUSIVE),
        ((-0.2, 1.3), (-0.1, 1.1), INCONCLUSIVE),
        ((0.1, 0.5), (0.2, 0.4), CONFIRMED),  # better, if by little
        ((-0.5, -0.1), (-0.4, -0.2), CONTRADICTED),
    ],
)
def test_models_within_the_margin_are_equivalent(interval, at_90, outcome):
    middle = sum(interval) / 2
    found = decide_better(Interval(middle, *interval), at_90=Interval(middle, *at_90), margin=1.0)
    assert found == outcome


def test_equivalent_pairs_make_an_equivalent_claim():
    def verdict(*outcomes):
        return Claim("c", "", "", lambda results: (Evidence(outcome, "") for outcome in outcomes)).verdict(
            results()
        )

    assert verdict(CONFIRMED, EQUIVALENT).outcome == EQUIVALENT
    assert verdict(EQUIVALENT, INCONCLUSIVE).outcome == INCONCLUSIVE
    assert verdict(EQUIVALENT, CONTRADICTED).outcome == CONTRADICTED


def test_models_of_nearly_the_same_perplexity_are_equivalent():
    models = ModelSpec("mgk", 1), ModelSpec("softmax", 2)
    noise = (0.0, 0.4, -0.4, 0.2)
    found = results(
        *(
            record(
                "wikitext-2", model, seed, perplexity=100.0 + 0.01 * seed * (model == models[0]) + noise[seed]
            )
            for model in models
            for seed in range(4)
        )
    )
    claim = verdicts(found)["language-half-the-heads"].evidence[0]
    assert (claim.outcome, claim.unit, claim.seeds) == (EQUIVALENT, "% of perplexity", 4)


def test_the_detectable_difference_is_found_in_four_of_five_experiments():
    generator = np.random.Generator(np.random.PCG64(0))
    seeds, sd = 5, 1.0
    expected = detectable_difference(Interval(0.0, -2.776 / 5**0.5, 2.776 / 5**0.5), seeds)  # s = 1
    values = generator.normal(expected, sd, (4000, seeds))
    share = np.mean([student_interval(row).low > 0 for row in values.tolist()])
    assert 0.75 < share < 0.87
    assert detectable_difference(Interval(0.0, -1.0, 1.0), 5, 20) < 0.5 * detectable_difference(
        Interval(0.0, -1.0, 1.0), 5
    )
    assert isinf(detectable_difference(Interval(0.0, -1.0, 1.0), 5, 1))


def test_the_90_percent_interval_is_narrower():
    generator = np.random.Generator(np.random.PCG64(0))
    ours, theirs = (generator.random((3, 200)) < share for share in (0.7, 0.6))
    wide, narrow = (paired_difference(ours, theirs, confidence=level).difference for level in (0.95, 0.9))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_student_interval_is_the_textbooks():
    found = student_interval([1.0, 2.0, 3.0])
    assert (found.estimate, found.low, found.high) == pytest.approx((2.0, -0.484, 4.484), abs=1e-3)
    assert isinf(student_interval([1.0]).high)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=6), st.floats(0.1, 5))
def test_the_mean_over_tasks_is_surer_than_one_task(values, reach):
    found = mean_of([Interval(value, value - reach, value + reach) for value in values])
    assert found.estimate == pytest.approx(sum(values) / len(values), abs=1e-9)
    assert found.high - found.estimate == pytest.approx(reach / len(values) ** 0.5)


def test_a_difference_of_large_samples():
    found = difference_of_means([10.0, 12.0] * 50, [10.0, 10.5] * 50)
    assert found.estimate == pytest.approx(0.75)
    assert 0 < found.low < 0.75 < found.high
    assert isinf(difference_of_means([1.0], [2.0, 3.0]).low)


def test_every_claim_is_tested_by_experiments_that_exist():
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    named = {name for claim in CLAIMS for name in claim.experiments}
    assert named <= set(EXPERIMENTS)
    # Figure 8 has no claim but that it shows maps; ours ask instead of claiming.
    assert set(EXPERIMENTS) - named == {"fig8", *(name for name, item in EXPERIMENTS.items() if item.is_ours)}


def test_nothing_measured_leaves_only_the_formulas():
    outcomes = {name: verdict.outcome for name, verdict in verdicts(results()).items()}
    by_formula = {"costs", "linear-costs", "techniques", "hard-e-costs"}
    assert {name for name, outcome in outcomes.items() if outcome != NOT_MEASURED} == by_formula
    assert all(outcomes[name] == CONFIRMED for name in by_formula)


def test_better_models_confirm():
    records = table_1({SOFTMAX: 0.70, SOFTMAX_1: 0.68, MGK: 0.75, SMGK: 0.80})
    found = verdicts(results(*records))
    for name in ("half-the-heads", "half-the-heads-better", "same-heads", "smgk-best"):
        assert found[name].outcome == CONFIRMED, name
    sentence = found["half-the-heads"].evidence[0].sentence
    assert sentence.startswith("smgk, 1 head vs softmax, 2 heads: +")
    assert "3 seeds" in sentence
    assert "PeerRead pairs in place of AAN" in sentence


def test_worse_models_contradict():
    found = verdicts(results(*table_1({SOFTMAX: 0.80, SOFTMAX_1: 0.80, MGK: 0.70, SMGK: 0.65})))
    for name in ("half-the-heads", "half-the-heads-better", "same-heads", "smgk-best"):
        assert found[name].outcome == CONTRADICTED, name


def test_equal_models_are_comparable_and_not_better():
    found = verdicts(results(*table_1({SOFTMAX: 0.80, SOFTMAX_1: 0.80, MGK: 0.80, SMGK: 0.80})))
    assert found["half-the-heads"].outcome == CONFIRMED
    assert found["half-the-heads-better"].outcome == EQUIVALENT


def test_models_that_have_learned_nothing_say_nothing():
    records = table_1({SOFTMAX: 0.5, SOFTMAX_1: 0.5, MGK: 0.5, SMGK: 0.5}, chance=0.52)
    found = verdicts(results(*records))
    assert not is_above_chance(records[:3])
    assert found["half-the-heads"].outcome == INCONCLUSIVE
    assert "both at chance on ListOps" in found["half-the-heads"].evidence[0].sentence


def test_one_pair_that_fails_contradicts_the_claim():
    found = verdicts(results(*table_1({SOFTMAX: 0.75, SMGK: 0.80, MGK: 0.65})))
    outcomes = [item.outcome for item in found["half-the-heads"].evidence]
    assert outcomes == [CONFIRMED, CONTRADICTED]
    assert found["half-the-heads"].outcome == CONTRADICTED


def test_tasks_that_are_missing_are_said():
    found = verdicts(results(*table_1({SOFTMAX: 0.7, MGK: 0.8, SMGK: 0.8}, tasks=("text",))))
    assert "2 of 3 tasks not measured" in found["half-the-heads"].evidence[0].sentence


def test_perplexities_are_compared_by_seed():
    records = [
        record("wikitext-2", model, seed, perplexity=value + 3 * seed)
        for model, value in (
            (SOFTMAX, 150),
            (MGK, 140),
            (ModelSpec("mgk", 2), 130),
            (ModelSpec("smgk", 2), 151),
        )
        for seed in range(3)
    ]
    found = verdicts(results(*records))
    assert found["language-half-the-heads"].outcome == CONFIRMED
    assert "% of perplexity" in found["language-half-the-heads"].evidence[0].sentence
    assert [item.outcome for item in found["language-same-heads"].evidence] == [CONTRADICTED, CONFIRMED]
    one = verdicts(results(*(item for item in records if item.trial.seed == 0)))
    assert one["language-half-the-heads"].outcome == INCONCLUSIVE
    assert "one seed: no confidence interval" in one["language-half-the-heads"].evidence[0].sentence


def test_ranks_and_head_similarity():
    softmax, mgk_2 = ModelSpec("softmax", 2), ModelSpec("mgk", 2)
    analyses = [
        analysis("retrieval", softmax, rank=20, similarity=0.8),
        analysis("retrieval", mgk_2, rank=30, similarity=0.6),
        analysis("retrieval", MGK, rank=25),
        analysis("wikitext-2", softmax, rank=30, similarity=0.5),
        analysis("wikitext-2", mgk_2, rank=20, similarity=0.5),
        analysis("wikitext-2", MGK, rank=20),
    ]
    found = verdicts(results(analyses=analyses))
    assert found["ranks"].outcome == CONFIRMED
    assert found["language-ranks"].outcome == CONTRADICTED
    assert [item.outcome for item in found["redundancy"].evidence] == [CONFIRMED, INCONCLUSIVE]


def test_ranks_and_head_similarity_of_several_seeds_are_decided_by_the_variance_over_seeds():
    softmax, mgk_2 = ModelSpec("softmax", 2), ModelSpec("mgk", 2)
    analyses = [
        analysis("retrieval", model, seed, rank=rank, similarity=similarity)
        for model, ranks, similarities in (
            (softmax, (20, 20, 20), (0.8, 0.8, 0.8)),
            (mgk_2, (29, 30, 31), (0.2, 0.8, 0.9)),
            (MGK, (5, 20, 50), (0.0, 0.0, 0.0)),
        )
        for seed, (rank, similarity) in enumerate(zip(ranks, similarities, strict=True))
    ]
    found = verdicts(results(analyses=analyses))
    assert [item.outcome for item in found["ranks"].evidence] == [CONFIRMED, INCONCLUSIVE]
    assert "mean difference +10.00" in found["ranks"].evidence[0].sentence
    assert found["ranks"].evidence[0].sentence.endswith("3 seeds.")
    redundancy = found["redundancy"].evidence[0]
    assert redundancy.outcome == INCONCLUSIVE
    assert "head similarity 0.653 vs 0.820 within a layer" in redundancy.sentence


def test_curves_are_compared_at_every_evaluation():
    models = EXPERIMENTS["fig1"].models_at("laptop")
    records = [record("retrieval", model, 0, share=0.8 if model.is_mixture else 0.7) for model in models]
    assert verdicts(results(*records))["throughout-training"].outcome == CONFIRMED
    worse = [
        record("retrieval", model, seed, share=0.6 if model.is_mixture else 0.7)
        for seed in range(3)
        for model in models
    ]
    assert verdicts(results(*worse))["throughout-training"].outcome == CONTRADICTED
    of_one_seed = [item for item in worse if item.trial.seed == 0]
    assert verdicts(results(*of_one_seed))["throughout-training"].outcome == INCONCLUSIVE


def test_hard_e_is_compared_to_the_best_of_each_task():
    hard, others = ModelSpec("smgk", 1, e_step="hard"), EXPERIMENTS["table4"].models_at("laptop")
    records = table_1(
        {model: 0.78 if model == MGK else 0.7 for model in others if model != hard} | {hard: 0.78}
    )
    found = verdicts(results(*records))["hard-e"]
    assert found.outcome == CONFIRMED
    assert "mgk, 1 head on listops, mgk, 1 head on text" in found.evidence[0].sentence


def test_a_table_has_our_numbers_beside_the_papers():
    records = table_1({SOFTMAX: 0.70, MGK: 0.75, SMGK: 0.80})
    table = make_table(EXPERIMENTS["table1"], results(*records))
    assert table is not None
    assert [row.model for row in table.rows] == ["softmax, 2 heads", "smgk, 1 head", "mgk, 1 head"]
    softmax, smgk, _ = table.rows
    values = [
        sum(item.test for item in records if item.trial.model == SOFTMAX and item.trial.seed == s) / 3
        for s in range(3)
    ]
    average = softmax.entries["average"]
    assert average.values == pytest.approx(values, abs=1e-4)
    assert (average.mean, average.paper) == (pytest.approx(sum(values) / 3), 60.25)
    assert softmax.entries["text"].difference is None
    assert smgk.reference == "softmax, 2 heads"
    difference = smgk.entries["listops"].difference
    assert difference is not None
    assert (
        difference.low
        < 100 * (smgk.entries["listops"].mean - softmax.entries["listops"].mean) / 100
        < difference.high
    )
    assert table.header[3:5] == ["ListOps (200 tokens)", "paper"]
    assert table.text_rows[0][4] == "36.76"
    assert len(table.differences[2]) == 2
    assert "not the paper's" in " ".join(table.notes)
    lines = table.markdown().splitlines()
    assert lines[0].startswith("| model | seeds | parameters | ListOps (200 tokens) | paper |")
    assert all(line.count("|") == lines[0].count("|") for line in lines[:5])


def test_extra_tasks_are_columns_of_ours_once_all_models_have_them():
    shares = {SOFTMAX: 0.70, SOFTMAX_1: 0.7, MGK: 0.75, SMGK: 0.80}
    records = table_1(shares, tasks=(*LRA, "image"))
    table = make_table(EXPERIMENTS["table1"], results(*records))
    assert table is not None
    assert table.columns == (*LRA, "average", "image")
    assert table.labels["image"].endswith(", ours")
    assert table.rows[0].entries["image"].paper is None
    assert "--tasks listops,text,retrieval,image" in table.command
    assert any("the average leaves them out" in note for note in table.notes)
    ours = EXPERIMENTS["variances"]
    every = [record(task, model, 0) for task in (*LRA, "image") for model in ours.models_at("laptop")]
    table = make_table(ours, results(*every))
    assert table is not None
    assert table.columns == (*LRA, "average", "image")
    some = [item for item in records if item.trial.task != "image" or item.trial.model != MGK]
    table = make_table(EXPERIMENTS["table1"], results(*some))
    assert table is not None
    assert "image" not in table.columns


def test_a_table_says_where_nothing_was_learned_and_where_one_seed_tells_little():
    table = make_table(EXPERIMENTS["table1"], results(*table_1({SOFTMAX: 0.5, MGK: 0.5}, seeds=1)))
    assert table is not None
    assert "no model here is above it" in table.notes[0]
    assert table.differences is None
    for seeds in (1, 3):
        table = make_table(EXPERIMENTS["table1"], results(*table_1({SOFTMAX: 0.5, MGK: 0.8}, seeds=seeds)))
        assert "no model" not in " ".join(table.notes)
        caption, _, _ = table.differences
        assert ("one seed" in caption) == (seeds == 1)


def test_language_rows_stand_beside_the_papers_with_four_times_the_heads():
    records, _ = everything()
    table = make_table(EXPERIMENTS["table3"], results(*records))
    assert table is not None
    assert table.columns == ("validation", "test")
    row = next(row for row in table.rows if row.model == "mgk, 1 head")
    assert row.paper_model == "mgk, 4 heads"
    assert row.entries["test"].paper == 34.21
    assert row.entries["validation"].paper == 33.28
    assert any("WikiText-103" in note for note in table.notes)


def test_cells_of_different_recipes_are_noted():
    records = table_1({SOFTMAX: 0.7, MGK: 0.8}, seeds=1, tasks=("text",))
    training = records[0].recipe.training.model_copy(update={"max_steps": 9})
    records[0] = replace(records[0], recipe=records[0].recipe.model_copy(update={"training": training}))
    table = make_table(EXPERIMENTS["table1"], results(*records))
    assert table is not None
    assert any("different recipes" in note for note in table.notes)


def test_verdicts_as_data_have_no_infinity():
    records = [record("wikitext-2", model, 0, perplexity=150.0) for model in (SOFTMAX, MGK)]
    data = verdicts_json(results(*records))
    assert json.loads(json.dumps(data, allow_nan=False)) == data
