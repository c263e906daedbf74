"""Ranks, redundancy and the use of mixtures, against matrices and models whose answers are known."""

import numpy as np
import pytest
import torch

from mgk.analysis.attention_rank import effective_rank, rank, rank_distributions, singular_values
from mgk.analysis.mixture_usage import mixture_usage
from mgk.analysis.redundancy import Redundancy, redundancy, similarity
from mgk.models import MgkConfig, MgkForCausalLM, MgkForSequenceClassification

SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16, "head_dim": 8}


def make_model(attention="mgk", heads=2, **options):
    torch.manual_seed(0)
    config = MgkConfig(**SIZES, attention=attention, num_attention_heads=heads, num_labels=3, **options)
    return MgkForSequenceClassification(config).eval()


def make_examples(count=3, length=11):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(20, (length + n,), generator=generator)} for n in range(count)]


def stochastic(*shape):
    rows = np.random.default_rng(0).random(shape)
    return (rows / rows.sum(-1, keepdims=True)).astype(np.float32)


def test_ranks_of_known_matrices():
    equal_rows = np.tile(stochastic(1, 9), (9, 1))
    values = singular_values(np.stack([equal_rows, np.eye(9, dtype=np.float32), stochastic(9, 9)]))
    assert rank(values).tolist() == [1, 9, 9]
    assert effective_rank(values)[:2] == pytest.approx([1.0, 9.0])
    assert 1 < effective_rank(values)[2] < 9
    assert effective_rank(np.zeros(3)) == 1


def test_singular_values_are_not_drowned_in_float32_noise():
    low = stochastic(200, 3) @ stochastic(3, 200)
    assert rank(singular_values(low)) == 3


def test_rank_distributions_draw_the_asked_number_of_matrices():
    data, steps = make_examples(5), []
    options = {"count": 7, "on_step": lambda *step: steps.append(step)}
    found = rank_distributions(make_model(), data, **options)
    assert [part.layer for part in found] == [0, 1]
    for part in found:
        assert part.ranks.shape == part.effective.shape == part.lengths.shape == (7,)
        assert (part.ranks <= part.lengths).all()
        assert (part.effective <= part.lengths).all()
    assert steps == [(n, 4) for n in range(1, 5)]
    again = rank_distributions(make_model(), data, count=7)
    assert all((a.effective == b.effective).all() for a, b in zip(found, again, strict=True))
    assert len(rank_distributions(make_model(), data, count=1000)[0].ranks) == 10
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        rank_distributions(make_model(), data, count=0)


def test_similarity_of_known_maps():
    one = stochastic(6, 6)
    eye = np.eye(6, dtype=np.float32)
    assert similarity(one, one) == pytest.approx(1.0)
    assert similarity(eye, eye[::-1].copy()) == pytest.approx(0.0)
    assert similarity(one, eye) == pytest.approx(similarity(eye, one))


def test_redundancy_of_copied_heads():
    model = make_model(heads=2)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.attention.q_proj, layer.attention.k_proj):
                half = projection.weight.shape[0] // 2
                projection.weight[half:] = projection.weight[:half]
    found = redundancy(model, make_examples())
    assert found.heads == ((0, 0), (0, 1), (1, 0), (1, 1))
    assert found.within_layers == pytest.approx(1.0)
    assert found.across_layers is not None
    assert found.across_layers < 1
    assert (found.similarity == found.similarity.T).all()
    with pytest.raises(ValueError, match="examples must be at least one"):
        redundancy(model, [])


def test_redundancy_of_one_head_has_no_pairs_within_a_layer():
    assert Redundancy(np.eye(1), ((0, 0),)).within_layers is None
    assert redundancy(make_model(heads=1), make_examples()).within_layers is None


@pytest.mark.parametrize("attention", ["mgk", "smgk", "mlk", "smlk"])
@pytest.mark.parametrize("mixtures", [2, 3])
def test_mixture_usage_adds_up(attention, mixtures):
    model = make_model(attention, num_mixtures=mixtures)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.attention.prior.logits.normal_()
    for number, part in enumerate(mixture_usage(model, make_examples())):
        assert part.layer == number
        logits = model.model.layers[number].attention.prior.logits
        torch.testing.assert_close(part.prior, logits.detach().softmax(-1))
        torch.testing.assert_close(part.share.sum(-1), torch.ones(2))
        assert (part.certainty > 1 / mixtures).all()
        assert (part.certainty <= 1 + 1e-6).all()
        assert (part.distance.diagonal(dim1=-2, dim2=-1) == 0).all()
        torch.testing.assert_close(part.distance, part.distance.mT)


def test_distance_of_shifted_keys_is_that_of_the_shifts():
    model = make_model("smgk")
    attention = model.model.layers[1].attention
    gap = (attention.shifts[:, 0] - attention.shifts[:, 1]).norm(dim=-1) / 8**0.25
    torch.testing.assert_close(mixture_usage(model, make_examples())[1].distance[:, 0, 1], gap.detach())


@pytest.mark.parametrize(
    "options", [{"e_step": "hard"}, {"prior": "em"}, {"prior": "uniform"}, {"variance": "learned"}]
)
def test_mixture_usage_of_every_setting(options):
    usage = mixture_usage(make_model("mgk", **options), make_examples())
    for part in usage:
        torch.testing.assert_close(part.share.sum(-1), torch.ones(2))
    if options == {"e_step": "hard"}:
        torch.testing.assert_close(usage[0].certainty, torch.ones(2))


def test_mixture_usage_of_a_causal_model_with_rotary_positions():
    config = MgkConfig(**SIZES, attention="mgk", num_attention_heads=2, position="rotary")
    torch.manual_seed(0)
    for part in mixture_usage(MgkForCausalLM(config), make_examples()):
        torch.testing.assert_close(part.share.sum(-1), torch.ones(2))


def test_mixture_usage_needs_a_mixture_and_examples():
    with pytest.raises(ValueError, match="attention='softmax' has one key a position"):
        mixture_usage(make_model("softmax"), make_examples())
    with pytest.raises(ValueError, match="examples must be at least one"):
        mixture_usage(make_model(), [])
