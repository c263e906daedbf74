"""Models with grouped heads, windows and packed rows: equal to separate sequences, with every name of the collator."""

import pytest
import torch
from tiny_models import GROWING, LINEAR, VARIANTS, config, moved, tokens
from transformers import DataCollatorWithFlattening

from mgk.models import MgkForCausalLM, MgkForDocumentRetrieval, MgkForSequenceClassification, MgkModel
from mgk.models.transformers_cache import cache_bytes

LENGTHS = (5, 1, 1, 7, 3)


def make(kind=MgkForCausalLM, attention="mgk", **options):
    torch.manual_seed(0)
    return moved(kind(config(attention, num_attention_heads=4, num_key_value_heads=2, **options)))


def packed(**options):
    rows = [{"input_ids": tokens(n, seed=n).tolist(), "labels": tokens(n, seed=n).tolist()} for n in LENGTHS]
    return [torch.tensor(row["input_ids"])[None] for row in rows], DataCollatorWithFlattening(**options)(rows)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_position_ids": False, "return_seq_idx": True},
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
        {"return_seq_idx": True, "return_flash_attn_kwargs": True},
    ],
    ids=["positions", "seq_idx", "cu_seq_lens", "all"],
)
@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_a_flattened_batch_equals_its_sequences(position, options):
    for attention in VARIANTS:
        model = make(attention=attention, position=position)
        rows, batch = packed(**options)
        out = model(**batch)
        parts = out.logits.split(LENGTHS, 1)
        for row, part in zip(rows, parts, strict=True):
            torch.testing.assert_close(part, model(row).logits)
        losses = [model(row, labels=row).loss * (row.shape[1] - 1) for row in rows if row.shape[1] > 1]
        expected = sum(losses) / sum(n - 1 for n in LENGTHS)
        torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize("attention", VARIANTS)
def test_a_packed_classifier_gives_the_logits_of_each_sequence_in_row_order(attention):
    model = make(MgkForSequenceClassification, attention)
    rows = [tokens(1, n, seed=n) for n in (4, 3, 2, 5)]
    first, second = torch.cat(rows[:2], 1), torch.cat(rows[2:], 1)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4]])
    labels = torch.tensor([0, 2, 1, 0])
    out = model(torch.cat([first, second]), position_ids=positions, labels=labels)
    alone = torch.cat([model(row).logits for row in rows])
    torch.testing.assert_close(out.logits, alone)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(alone, labels))
    # padding at the end of a row is no sequence
    ids = torch.nn.functional.pad(torch.cat([first, second]), (0, 3))
    mask = torch.nn.functional.pad(torch.ones(2, 7), (0, 3))
    seq_idx = torch.tensor([[0] * 4 + [1] * 3 + [2] * 3, [0] * 2 + [1] * 5 + [2] * 3])
    torch.testing.assert_close(model(ids, attention_mask=mask, seq_idx=seq_idx).logits, alone)


def test_gradients_of_packed_rows_equal_those_of_separate_ones():
    model = make(MgkForSequenceClassification, "smgk").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for layer in model.model.layers:
        layer.attention.dropout = 0.0
    rows, labels = [tokens(1, n, seed=n) for n in (4, 3, 2)], torch.tensor([0, 2, 1])
    seq_idx = torch.tensor([[0] * 4 + [1] * 3 + [2] * 2])
    packed_loss = model(torch.cat(rows, 1), seq_idx=seq_idx, labels=labels).loss
    loss = sum(model(row, labels=label[None]).loss for row, label in zip(rows, labels, strict=True)) / 3
    parameters = list(model.parameters())
    grads = [torch.autograd.grad(x, parameters) for x in (packed_loss, loss)]
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", GROWING)
def test_a_sliding_window_is_that_of_transformers(attention):
    decoder = make(attention=attention, sliding_window=3)
    assert decoder.model.layers[0].attention.window == (2, 0)
    weights = decoder(tokens(1, 9), output_attentions=True).attentions[0][0, 0] > 0
    distance = torch.arange(9)[:, None] - torch.arange(9)
    assert (weights == ((distance >= 0) & (distance < 3))).all()
    encoder = make(MgkModel, attention, sliding_window=3)
    weights = encoder(tokens(1, 9), output_attentions=True).attentions[0][0, 0] > 0
    assert (weights == (distance.abs() <= 3)).all()


@pytest.mark.parametrize("attention", VARIANTS)
def test_generation_with_groups_and_a_window_equals_uncached_generation(attention):
    window = {} if attention in LINEAR else {"sliding_window": 4}
    model = make(attention=attention, position="rotary", **window)
    prompt, mask = tokens(2, 6), torch.ones(2, 6, dtype=torch.int64)
    mask[1, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 100, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(prompt, **options)
    assert (cached == model.generate(prompt, use_cache=False, **options)).all()
    out = model.generate(prompt, return_dict_in_generate=True, **options)
    past = out.past_key_values
    assert past.get_seq_length() == 105
    if window:  # 3 keys before the query's own, and 64 that may be cropped
        keys = 2 * 2 * model.model.layers[0].attention.keys_per_token * 67 * 6
        assert cache_bytes(past) == 2 * 4 * (keys + 2 * 2 * 67 * 6)


@pytest.mark.parametrize("attention", GROWING)
def test_assisted_decoding_crops_a_cache_with_a_window(attention):
    model = make(attention=attention, position="rotary", sliding_window=4)
    other = make(attention=attention, position="rotary", sliding_window=4, num_hidden_layers=1)
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(tokens(1, 6), **options)
    assert (model.generate(tokens(1, 6), assistant_model=other, **options) == plain).all()


def test_configurations_round_trip_and_bad_values_raise_by_name(tmp_path):
    model = make(attention="smgk", sliding_window=5)
    model.save_pretrained(tmp_path)
    loaded = MgkForCausalLM.from_pretrained(tmp_path)
    assert (loaded.config.num_key_value_heads, loaded.config.sliding_window) == (2, 5)
    torch.testing.assert_close(loaded(tokens(1, 9)).logits, model(tokens(1, 9)).logits)
    with pytest.raises(ValueError, match="num_key_value_heads must divide num_attention_heads=2, got 3"):
        config(num_key_value_heads=3)
    with pytest.raises(ValueError, match="sliding_window must be at least 1, got 0"):
        config(sliding_window=0, is_decoder=True)
    with pytest.raises(ValueError, match="sliding_window must be None for attention='mlk'"):
        config("mlk", sliding_window=3)
    with pytest.raises(ValueError, match="pooling='cls' sees nothing beyond sliding_window"):
        config(sliding_window=3, pooling="cls")


def test_em_priors_belong_to_key_heads():
    model = make(attention="mgk", prior="em", variance="em").train()
    model(tokens(2, 9))
    model.m_step()
    attention = model.model.layers[0].attention
    assert attention.prior.pi.shape == (2, 2, 1)
    assert attention.variance.sigma2.shape == (2, 2)


def test_misplaced_packing_raises_by_name():
    ids = tokens(1, 6)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q must go from 0 to the row's 5 tokens"):
        make()(ids[:, :5], cu_seq_lens_q=bounds)
    with pytest.raises(ValueError, match="cu_seq_lens_q must be 1-D, for one row"):
        make()(ids.expand(2, 6), cu_seq_lens_q=bounds)
    with pytest.raises(ValueError, match="packed sequences need pooling='mean'"):
        make(MgkForSequenceClassification, pooling="cls")(ids, cu_seq_lens_q=bounds)
    with pytest.raises(ValueError, match="cu_seq_lens_q has no meaning for retrieval"):
        make(MgkForDocumentRetrieval)(ids, input_ids_2=ids, cu_seq_lens_q=bounds)


def test_an_encoder_without_neighbours_and_positions_sees_a_bag_of_tokens():
    model = make(MgkModel, "softmax", sliding_window=0, position="none")
    ids = torch.randint(1, 16, (2, 9))
    order = torch.randperm(9)
    with torch.no_grad():
        one, other = (model(input_ids=x).last_hidden_state for x in (ids, ids[:, order]))
    torch.testing.assert_close(other, one[:, order])
