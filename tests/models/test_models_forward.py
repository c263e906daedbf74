"""What each model computes, returns and refuses."""

import copy

import pytest
import torch
from tiny_models import VARIANTS, VOCAB, config, moved, tokens
from torch import nn
from transformers import DynamicCache

from mgk import models
from mgk.data import Collator

LENGTHS = (11, 4, 7)


def sequences(cls, *, seed=0):
    """Examples of different lengths, as mgk.data gives them."""
    names = ["input_ids", "input_ids_2"] if cls is models.MgkForDocumentRetrieval else ["input_ids"]
    examples = []
    for row, length in enumerate(LENGTHS):
        example = {
            name: tokens(length + 2 * place, seed=seed + 10 * row + place) for place, name in enumerate(names)
        }
        labels = example["input_ids"] if cls is models.MgkForCausalLM else torch.tensor(row)
        examples.append({**example, "labels": labels})
    return examples


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (models.MgkForSequenceClassification, {}),
        (models.MgkForSequenceClassification, {"pooling": "cls", "position": "rotary"}),
        (models.MgkForDocumentRetrieval, {"position": "sinusoidal"}),
        (models.MgkForImageClassification, {"position": "none"}),
        (models.MgkForCausalLM, {}),
    ],
    ids=["sequence", "cls-rotary", "retrieval", "image", "causal"],
)
def test_a_batch_equals_its_rows(variant, cls, options):
    """Logits and gradients do not depend on padding or neighbours."""
    model = moved(cls(config(variant, **options))).double()
    examples = sequences(cls)
    batch = Collator(pad_id=0)(examples)
    out = model(**batch)
    rows = [model(**Collator(pad_id=0)([example])) for example in examples]
    for number, row in enumerate(rows):
        mine = out.logits[number : number + 1]
        torch.testing.assert_close(
            mine[:, : row.logits.shape[1]] if cls is models.MgkForCausalLM else mine, row.logits
        )
    weights = torch.tensor([len(e["labels"]) - 1.0 if cls is models.MgkForCausalLM else 1.0 for e in examples])
    alone = sum(w * row.loss for w, row in zip(weights, rows, strict=True)) / weights.sum()
    torch.testing.assert_close(out.loss, alone)
    found, expected = (
        torch.autograd.grad(x, list(model.parameters())) for x in (out.loss, alone)
    )  # none is unused
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_may_be_on_either_side(variant):
    model = moved(models.MgkForSequenceClassification(config(variant)))
    ids = tokens(2, 6)
    right = model(nn.functional.pad(ids, (0, 3)), attention_mask=nn.functional.pad(torch.ones(2, 6), (0, 3)))
    left = model(
        nn.functional.pad(ids, (3, 0)), attention_mask=nn.functional.pad(torch.ones(2, 6), (3, 0)).bool()
    )
    torch.testing.assert_close(left.logits, right.logits)
    torch.testing.assert_close(left.logits, model(ids).logits)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "cls",
    [
        models.MgkForSequenceClassification,
        models.MgkForDocumentRetrieval,
        models.MgkForImageClassification,
        models.MgkForCausalLM,
    ],
)
def test_attentions_and_hidden_states(variant, cls):
    model = moved(cls(config(variant)))
    batch = Collator(pad_id=0)(sequences(cls))
    plain = model(**batch)
    out = model(**batch, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(out.logits, plain.logits, atol=0, rtol=0)
    pairs = [(batch["input_ids"], batch["attention_mask"], out.hidden_states, out.attentions)]
    if cls is models.MgkForDocumentRetrieval:
        pairs.append((batch["input_ids_2"], batch["attention_mask_2"], out.hidden_states_2, out.attentions_2))
    for ids, mask, hidden_states, attentions in pairs:
        length = ids.shape[1]
        assert [x.shape for x in hidden_states] == [(3, length, 16)] * 3
        assert [x.shape for x in attentions] == [(3, 2, length, length)] * 2
        last = model.model(ids, mask, use_cache=False).last_hidden_state
        torch.testing.assert_close(hidden_states[-1], last)
        for weights in attentions:
            torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, length))
            hidden = mask == 0
            assert not weights.masked_select(hidden[:, None, None]).any()
            if cls is models.MgkForCausalLM:
                assert not weights.triu(1).any()
    as_tuple = model(**batch, output_attentions=True, return_dict=False)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[1], plain.logits)


def test_retrieval_classifies_both_vectors_their_product_and_difference():
    model = moved(models.MgkForDocumentRetrieval(config("mgk")))
    first, second = tokens(2, 6), tokens(2, 9, seed=1)
    x1, x2 = (model.model(ids).last_hidden_state.mean(1) for ids in (first, second))
    expected = model.classifier.out(model.classifier.dense(torch.cat([x1, x2, x1 * x2, x1 - x2], -1)).relu())
    torch.testing.assert_close(model(input_ids=first, input_ids_2=second).logits, expected)


def test_the_layer_is_pre_norm():
    model = moved(models.MgkModel(config("smgk", num_hidden_layers=1)))
    layer, ids = model.layers[0], tokens(2, 5)
    x = model.embeddings.tokens(ids) + model.embeddings.positions(torch.arange(5))
    x = x + layer.attention(layer.attention_norm(x))
    x = x + layer.mlp.down_proj(nn.functional.gelu(layer.mlp.up_proj(layer.mlp_norm(x))))
    torch.testing.assert_close(model(ids).last_hidden_state, model.norm(x))


@pytest.mark.parametrize("variant", VARIANTS)
def test_patches(variant):
    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 3}
    model = moved(models.MgkForImageClassification(config(variant, **sizes)))
    assert model.main_input_name == "pixel_values"
    images = torch.rand(2, 3, 8, 8)
    out = model(pixel_values=images, labels=torch.tensor([0, 2]), output_hidden_states=True)
    assert out.logits.shape == (2, 3)
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    kernel = model.model.embeddings.patches.projection
    vectors = patches @ kernel.weight.flatten(1).T + kernel.bias + model.model.embeddings.positions.weight[:4]
    torch.testing.assert_close(out.hidden_states[0], vectors)
    with pytest.raises(
        ValueError, match=r"pixel_values must have shape .* = \(B, 3, 8, 8\), got \(2, 3, 8, 9\)"
    ):
        model(pixel_values=torch.rand(2, 3, 8, 9))
    with pytest.raises(ValueError, match="give pixel_values"):
        model(input_ids=tokens(2, 4))


def test_padded_embeddings_may_hold_anything():
    model, vectors = moved(models.MgkForSequenceClassification(config())), torch.randn(2, 7, 16)
    mask = torch.ones(2, 7)
    mask[1, 4:] = 0
    gradients = []
    for padding in (0.0, torch.nan, 1e30):
        x = vectors.masked_fill(mask[..., None] == 0, padding)
        loss = model(inputs_embeds=x, attention_mask=mask, labels=torch.tensor([0, 1])).loss
        gradients.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    for a, *others in zip(*gradients, strict=True):
        for b in others:
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b, a)


def test_embeddings_in_place_of_tokens():
    for options in ({}, {"position": "sinusoidal"}):
        model = moved(models.MgkForCausalLM(config(**options)))
        ids = tokens(2, 6)
        embedded = model(inputs_embeds=model.get_input_embeddings()(ids))
        torch.testing.assert_close(embedded.logits, model(ids).logits)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients_and_counts_once(variant, reentrant):
    options = {"prior": "em", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    plain = moved(models.MgkForCausalLM(config(variant, **options))).train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = tokens(2, 8)
    for model in (plain, checkpointed):
        model(ids, labels=ids).loss.backward()
    for (name, parameter), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, msg=name)
    counts = {name: count for name, count in plain.named_buffers() if name.endswith("counts")}
    assert bool(counts) is (variant not in ("softmax", "linear"))
    for name, count in counts.items():
        assert count.sum() > 0
        torch.testing.assert_close(checkpointed.get_buffer(name), count, msg=name)
    assert checkpointed(ids, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match="past_key_values cannot be used with gradient checkpointing"):
        checkpointed(ids, past_key_values=DynamicCache())


def test_training_keeps_no_cache_unless_asked():
    model = models.MgkForCausalLM(config())
    ids = tokens(2, 5)
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values is not None
    model.eval()
    assert model(ids).past_key_values is not None
    assert model(ids, use_cache=False).past_key_values is None


def test_the_m_step_updates_every_layer():
    model = models.MgkForSequenceClassification(config("mgk", prior="em", variance="em", prior_momentum=0.5))
    assert [layer.attention.prior.momentum for layer in model.model.layers] == [0.5, 0.5]
    before = {name: x.clone() for name, x in model.named_buffers() if name.endswith(("pi", "sigma2"))}
    model(tokens(4, 9), labels=torch.tensor([0, 1, 2, 0]))
    model.m_step()
    for name, buffer in model.named_buffers():
        if name in before:
            assert not torch.equal(buffer, before[name]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_dtypes_and_resized_vocabulary(variant):
    model = moved(models.MgkForCausalLM(config(variant)))
    ids = tokens(2, 6)
    exact = model(ids).logits
    assert model.to(torch.float64)(ids).logits.dtype == torch.float64
    half = model.to(torch.bfloat16)(ids, labels=ids)
    assert half.logits.dtype == torch.bfloat16
    torch.testing.assert_close(half.logits.float(), exact, atol=0.7, rtol=0.1)
    model.float()
    model.resize_token_embeddings(VOCAB + 5)
    assert model.config.vocab_size == VOCAB + 5
    assert model.lm_head.weight is model.get_input_embeddings().weight
    out = model(ids + 5)
    assert out.logits.shape == (2, 6, VOCAB + 5)
    classifier = models.MgkForSequenceClassification(config(variant))
    classifier.resize_token_embeddings(12)
    with pytest.raises(ValueError, match=r"input_ids must be from 0 to 11"):
        classifier(torch.full((1, 2), 12))


@pytest.mark.parametrize(
    "cls",
    [
        models.MgkModel,
        models.MgkForSequenceClassification,
        models.MgkForImageClassification,
        models.MgkForCausalLM,
    ],
)
def test_bad_input_is_one_clear_error(cls):
    model = moved(cls(config()))
    ids = tokens(2, 5)
    for bad, message in (
        (VOCAB, r"input_ids must be from 0 to 29 \(vocab_size - 1\), got \d+ to 30"),
        (-1, r"input_ids must be from 0 to 29 \(vocab_size - 1\), got -1 to \d+"),
    ):
        wrong = ids.clone()
        wrong[1, 2] = bad
        with pytest.raises(ValueError, match=message):
            model(wrong)
    for mask in (torch.ones(2, 4), torch.ones(5), torch.ones(3, 5), torch.ones(2, 1, 5, 5)):
        with pytest.raises(ValueError, match=r"attention_mask must have shape \(B, past \+ L\) = \(2, 5\)"):
            model(ids, attention_mask=mask)
    with pytest.raises(ValueError, match=r"input_ids must be whole numbers of shape \(B, L\)"):
        model(ids[0])
    with pytest.raises(
        ValueError, match=r"input_ids must be whole numbers of shape \(B, L\), got torch.float32"
    ):
        model(ids.float())
    with pytest.raises(ValueError, match=r"give one of input_ids.*got 0"):
        model()
    with pytest.raises(ValueError, match=r"the input reaches position 48.*max_position_embeddings=48"):
        model(tokens(1, 49))
    with pytest.raises(TypeError, match="unexpected"):
        model(ids, attention_msk=torch.ones(2, 5))
    assert torch.isfinite(model(tokens(1, 48))[0]).all()
    if cls is models.MgkModel:
        with pytest.raises(ValueError, match=r"inputs_embeds must have shape \(B, L, 16\), got \(2, 5, 9\)"):
            model(inputs_embeds=torch.rand(2, 5, 9))
        with pytest.raises(ValueError, match=r"positions must be from 0 to 47 .*got 3 to 60"):
            model(ids, position_ids=torch.tensor([[3, 4, 5, 6, 60]]))
        with pytest.raises(ValueError, match="give input_ids"):
            model(pixel_values=torch.rand(2, 3, 32, 32))


@pytest.mark.parametrize("cls", [models.MgkModel, models.MgkForSequenceClassification, models.MgkForCausalLM])
def test_masks_are_ones_and_zeros_of_any_dtype_and_additive_ones_raise(cls):
    model, ids = moved(cls(config())), tokens(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    expected = model(ids, attention_mask=mask)[0]
    for dtype in (torch.bool, torch.int32, torch.float32, torch.float16):
        torch.testing.assert_close(model(ids, attention_mask=mask.to(dtype))[0], expected)
    hidden = (mask == 0).float()
    for additive in (hidden * -1e9, hidden * torch.finfo(torch.float32).min, (hidden * -10000).long()):
        with pytest.raises(
            ValueError, match=r"attention_mask must be 1 for real tokens .* not additive, got -"
        ):
            model(ids, attention_mask=additive)
    with pytest.raises(ValueError, match="not additive, got -inf"):
        model(ids, attention_mask=torch.zeros(2, 5).masked_fill(mask == 0, -torch.inf))
    for other in (mask * 2, mask * 0.5, mask.float().masked_fill(mask == 0, torch.nan)):
        with pytest.raises(ValueError, match=r"attention_mask must be 1 for real .* got (2|0.5|nan)"):
            model(ids, attention_mask=other)


POSITIONS = ("learned", "sinusoidal", "rotary", "none")
HEADS = (
    *(
        models.MgkModel,
        models.MgkForSequenceClassification,
        models.MgkForDocumentRetrieval,
        models.MgkForImageClassification,
    ),
    *(
        models.MgkForCausalLM,
        models.MgkForTokenClassification,
        models.MgkForMaskedLM,
        models.MgkForQuestionAnswering,
    ),
)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "mask"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("cls", HEADS)
@pytest.mark.parametrize("position", POSITIONS)
@torch.no_grad()
def test_every_position_in_every_model_for_every_batch(position, cls, pooling, masked):
    if cls is models.MgkForCausalLM and pooling == "cls":
        pytest.skip("a decoder has no first vector that sees the sequence")
    for variant in VARIANTS:
        model = moved(cls(config(variant, position=position, pooling=pooling)))
        ids = tokens(3, 7)
        mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 3 + [0] * 4])
        given = [{"input_ids": ids}, {"attention_mask": mask} if masked else {}]
        if cls is models.MgkForDocumentRetrieval:
            given += [{f"{name}_2": value.flip(0) for name, value in part.items()} for part in given]
        batch = {name: value for part in given for name, value in part.items()}
        out = model(**batch)[0]
        for row in range(3):
            alone = model(**{name: value[row : row + 1] for name, value in batch.items()})[0]
            torch.testing.assert_close(out[row : row + 1], alone, atol=1e-5, rtol=1e-4)


def test_position_ids_for_all_rows_and_for_each():
    model, ids = moved(models.MgkModel(config(position="rotary"))), tokens(3, 5)
    steps = torch.arange(5)[None] * 2
    torch.testing.assert_close(
        model(ids, position_ids=steps).last_hidden_state,
        model(ids, position_ids=steps.expand(3, -1)).last_hidden_state,
    )
    assert not torch.allclose(model(ids, position_ids=steps)[0], model(ids)[0])


def test_bad_labels():
    ids = tokens(2, 5)
    with pytest.raises(ValueError, match=r"labels must be from 0 to 2 \(num_labels - 1\) or -100, got 1 to 3"):
        models.MgkForSequenceClassification(config())(ids, labels=torch.tensor([1, 3]))
    with pytest.raises(ValueError, match=r"labels must be from 0 to 29 \(vocab_size - 1\) or -100"):
        models.MgkForCausalLM(config())(ids, labels=ids + VOCAB)
    with pytest.raises(ValueError, match=r"labels must have the shape of input_ids, \(2, 5\), got \(2, 4\)"):
        models.MgkForCausalLM(config())(ids, labels=ids[:, 1:])
    with pytest.raises(ValueError, match="input_ids_2 is missing"):
        models.MgkForDocumentRetrieval(config())(ids)
    with pytest.raises(ValueError, match="input_ids_2 must have as many rows as input_ids, 2, got 1"):
        models.MgkForDocumentRetrieval(config())(ids, input_ids_2=ids[:1])


@pytest.mark.parametrize(
    ("labels", "num_labels", "expected"),
    [
        (torch.tensor([0, 2]), 3, lambda x, y: nn.functional.cross_entropy(x, y)),
        (torch.tensor([[0.0, 1, 1], [1, 0, 0]]), 3, nn.functional.binary_cross_entropy_with_logits),
        (torch.tensor([0.5, -1.0]), 1, lambda x, y: nn.functional.mse_loss(x[:, 0], y)),
    ],
    ids=["classes", "independent", "regression"],
)
def test_kinds_of_problems(labels, num_labels, expected):
    model = moved(models.MgkForSequenceClassification(config(num_labels=num_labels)))
    out = model(tokens(2, 5), labels=labels)
    torch.testing.assert_close(out.loss, expected(out.logits, labels))
    half = model(tokens(2, 5), labels=labels, num_items_in_batch=2 * labels.numel()).loss
    torch.testing.assert_close(2 * half, out.loss)


def test_a_row_without_tokens_has_no_nan():
    model = moved(models.MgkForSequenceClassification(config("smgk")))
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    out = model(tokens(2, 3), attention_mask=mask, labels=torch.tensor([0, 1]))
    assert out.logits.isfinite().all()
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


TOKEN_HEADS = (models.MgkForTokenClassification, models.MgkForMaskedLM, models.MgkForQuestionAnswering)


def targets_of(cls, ids):
    if cls is models.MgkForQuestionAnswering:
        return {"start_positions": torch.tensor([2, 0, 99]), "end_positions": torch.tensor([3, 1, 99])}
    labels = ids.clone() if cls is models.MgkForMaskedLM else ids % 3
    labels[:, ::2] = -100
    return {"labels": labels}


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cls", TOKEN_HEADS)
def test_heads_of_tokens(cls, variant, pooling):
    """Logits of each row alone, the loss over targets, none of them of a padded or a first vector; gradients."""
    model = moved(cls(config(variant, pooling=pooling))).double()
    ids = tokens(3, 7)
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 4 + [0] * 3])
    targets = targets_of(cls, ids)
    if "labels" in targets:
        targets["labels"][mask == 0] = -100
    out = model(ids, attention_mask=mask, **targets, output_attentions=True, output_hidden_states=True)
    logits = [out.start_logits, out.end_logits] if cls is models.MgkForQuestionAnswering else [out.logits]
    hidden = model.model(ids, mask).last_hidden_state[:, int(pooling == "cls") :]
    width = 3 if cls is models.MgkForTokenClassification else VOCAB
    assert [x.shape for x in logits] == ([(3, 7)] * 2 if len(logits) == 2 else [(3, 7, width)])
    torch.testing.assert_close(
        torch.stack(logits, -1) if len(logits) == 2 else logits[0], model.get_submodule(model.head_name)(hidden)
    )
    wanted = [targets["labels"]] if "labels" in targets else list(targets.values())
    losses = []
    for scores, places in zip(logits, wanted, strict=True):
        kept = (places != -100) & (places < 99)
        losses.append(nn.functional.cross_entropy(scores[kept], places[kept]))
    torch.testing.assert_close(out.loss, sum(losses) / len(losses))
    assert len(out.attentions) == 2
    assert all(x.shape[-1] == 7 + int(pooling == "cls") for x in out.attentions)
    half = model(ids, attention_mask=mask, **targets, num_items_in_batch=2 * int(kept.sum())).loss
    torch.testing.assert_close(2 * half, out.loss)
    out.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    for row, length in enumerate((7, 5, 4)):
        alone = model(ids[row : row + 1, :length])
        found = alone.start_logits if cls is models.MgkForQuestionAnswering else alone.logits
        torch.testing.assert_close(found, logits[0][row : row + 1, :length])


def test_masked_language_modelling_ties_its_weights_and_is_no_decoder():
    model = models.MgkForMaskedLM(config())
    assert model.lm_head.weight is model.get_input_embeddings().weight
    model.resize_token_embeddings(VOCAB + 2)
    assert model(tokens(2, 5)).logits.shape == (2, 5, VOCAB + 2)
    assert models.MgkForMaskedLM(config(tie_word_embeddings=False)).lm_head.weight.shape == (VOCAB, 16)
    for options in ({"is_decoder": True}, {"adaptive_cutoffs": [5], "adaptive_div_value": 2.0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must not be set for MgkForMaskedLM"):
            models.MgkForMaskedLM(config(**options))


@pytest.mark.parametrize("cls", [models.MgkForTokenClassification, models.MgkForMaskedLM])
def test_bad_labels_of_tokens(cls):
    ids = tokens(2, 5)
    with pytest.raises(ValueError, match=r"labels must have the shape of input_ids, \(2, 5\), got \(2, 4\)"):
        cls(config())(ids, labels=ids[:, 1:])
    with pytest.raises(
        ValueError, match=r"labels must be from 0 to \d+ \((num_labels|vocab_size) - 1\) or -100"
    ):
        cls(config())(ids, labels=ids + VOCAB)
