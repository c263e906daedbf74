"""Packed training has the losses of padded training, and packed evaluation the results of padded evaluation."""

import pytest
from training_cases import tiny, trajectory

from mgk.training import train
from mgk.training.errors import RecipeError

NO_DROPOUT = {"model__hidden_dropout_prob": 0.0, "model__attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize("attention", ["smgk", "mlk"])
def test_packed_training_equals_padded_training(tmp_path, attention):
    runs = {}
    for packing in (False, True):
        recipe = tiny(model__attention=attention, data__packing=packing, **NO_DROPOUT)
        summary = train(recipe, tmp_path / f"{packing}")
        runs[packing] = trajectory(tmp_path / f"{packing}"), summary
    (padded, summary), (packed, packed_summary) = runs[False], runs[True]
    assert len(padded) == len(packed)
    for one, other in zip(padded, packed, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert summary.correct == packed_summary.correct
    assert summary.examples == packed_summary.examples


def test_what_cannot_be_packed_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"data\.packing is for tasks with one sequence an example"):
        train(tiny("retrieval", data__packing=True), tmp_path / "pair")
    with pytest.raises(RecipeError, match=r"data\.packing needs model\.pooling: mean"):
        train(tiny(data__packing=True, model__pooling="cls"), tmp_path / "cls")
