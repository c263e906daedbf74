"""The language model's losses: plain and adaptive softmax, all positions or the ones that count."""

import pytest
import torch
from tiny_models import VOCAB, config, moved, tokens
from torch.nn.functional import cross_entropy

from mgk.data import SegmentDataset, sliding_window_loss
from mgk.models import MgkForCausalLM, causal_lm, linear_cross_entropy

ADAPTIVE = {"adaptive_cutoffs": [6, 15], "adaptive_div_value": 2.0}
KINDS = pytest.mark.parametrize(
    "options", [{}, {"tie_word_embeddings": False}, ADAPTIVE], ids=["tied", "free", "adaptive"]
)


def language_model(**options):
    return moved(MgkForCausalLM(config("smgk", **options)))


@KINDS
def test_labels_are_shifted_inside_and_shift_labels_are_not(options):
    model, ids = language_model(**options), tokens(3, 9)
    labels = ids.clone()
    labels[0, 4:] = -100
    logits = model(ids).logits
    targets = torch.cat([labels[:, 1:], torch.full((3, 1), -100)], 1)
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten())
    for given in ({"labels": labels}, {"shift_labels": targets}, {"labels": ids, "shift_labels": targets}):
        torch.testing.assert_close(model(ids, **given).loss, expected)
        torch.testing.assert_close(model(ids, **given, return_logits=False).loss, expected)
        torch.testing.assert_close(model(ids, **given, return_logits=True).logits, logits)
        torch.testing.assert_close(model(ids, **given, logits_to_keep=1).loss, expected)
    count = int((targets != -100).sum())
    whole = model(ids, labels=labels, num_items_in_batch=torch.tensor(2 * count)).loss
    torch.testing.assert_close(2 * whole, expected)


@KINDS
def test_logits_to_keep(options):
    model, ids = language_model(**options), tokens(2, 7)
    logits = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits, logits[:, -2:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([0, 3])).logits, logits[:, [0, 3]])


def test_adaptive_logits_are_log_probabilities_and_left_out_with_labels():
    model, ids = language_model(**ADAPTIVE), tokens(2, 7)
    torch.testing.assert_close(model(ids).logits.exp().sum(-1), torch.ones(2, 7))
    assert model(ids, labels=ids).logits is None
    assert model.lm_head is None
    assert model.get_output_embeddings() is None
    with pytest.raises(ValueError, match="an adaptive softmax cannot be resized"):
        model.resize_token_embeddings(VOCAB + 1)
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert generated.shape == (2, 11)


def test_tying():
    tied, free = language_model(), language_model(tie_word_embeddings=False)
    assert tied.lm_head.weight is tied.model.embeddings.tokens.weight
    assert free.lm_head.weight is not free.model.embeddings.tokens.weight


@KINDS
def test_token_losses_count_the_wanted_positions_only(options, monkeypatch):
    monkeypatch.setattr(causal_lm, "MAX_LOGITS", 3 * VOCAB)  # in pieces of 3 positions
    model, ids = language_model(**options), tokens(4, 8)
    targets = tokens(4, 8, seed=1)
    targets[1:, :-1] = -100
    logits = model(ids).logits
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(4, 8)
    torch.testing.assert_close(model.token_losses(ids, targets), expected)
    assert not model.token_losses(ids, torch.full_like(targets, -100)).any()
    with pytest.raises(ValueError, match=r"targets must have the shape of input_ids, \(4, 8\), got \(4, 7\)"):
        model.token_losses(ids, targets[:, 1:])


@KINDS
@torch.no_grad()
def test_the_sliding_window_of_the_data(options):
    model, text = language_model(**options), tokens(40).numpy()
    total, count = sliding_window_loss(model.token_losses, text, window=8, batch_size=5)
    assert count == 39
    expected = 0.0
    for at in range(1, 40):
        window = torch.from_numpy(text[max(0, at - 8) : at])[None]
        expected += cross_entropy(model(window).logits[:, -1], torch.tensor([text[at]])).item()
    assert total == pytest.approx(expected, rel=1e-5)


def test_segments_of_the_data_fit_as_they_come():
    model, data = language_model(), SegmentDataset(tokens(41).numpy(), 8)
    batch = torch.utils.data.default_collate([data[0], data[2]])
    expected = cross_entropy(model(batch["input_ids"]).logits.flatten(0, 1), batch["shift_labels"].flatten())
    torch.testing.assert_close(model(**batch).loss, expected)


def test_a_batch_without_targets_has_a_loss_of_zero_items():
    model, ids = language_model(**ADAPTIVE), tokens(2, 4)
    nothing = torch.full_like(ids, -100)
    assert model(ids, labels=nothing, num_items_in_batch=8).loss == 0


@pytest.mark.parametrize("chunk", [30, 10**6])
def test_the_chunked_adaptive_loss_has_the_gradients_of_torch_s(chunk, monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK", chunk)
    softmax = torch.nn.AdaptiveLogSoftmaxWithLoss(8, 40, [10, 25], div_value=2.0)
    hidden, targets = torch.randn(23, 8, requires_grad=True), torch.randint(40, (23,))
    targets[targets >= 25] -= 25  # the last cluster has no target
    leaves = [hidden, *softmax.parameters()]
    loss = linear_cross_entropy.sum_of_adaptive_losses(hidden, softmax, targets) / 7
    truth = -softmax(hidden, targets).output.sum() / 7
    torch.testing.assert_close(loss, truth)
    for grads in zip(*(torch.autograd.grad(x, leaves, allow_unused=True) for x in (loss, truth)), strict=True):
        torch.testing.assert_close(*(torch.zeros(()) if x is None else x for x in grads))
