"""Generation: the cached run equals the one without a cache, for every variant and every way to generate."""

import copy

import pytest
import torch
from tiny_models import GROWING, LINEAR, VARIANTS, config, left_padded, moved, tokens
from transformers import DynamicCache, StaticCache

from mgk.models import MgkForCausalLM, MgkModel, cache_bytes

OPTIONS = [
    *((variant, {}) for variant in VARIANTS),
    ("mgk", {"prior": "em", "variance": "em"}),
    ("smgk", {"e_step": "hard"}),
    ("smgk", {"num_mixtures": 3, "variance": "learned", "position": "rotary"}),
    ("mgk", {"num_mixtures": 3, "position": "rotary", "prior": "uniform"}),
    ("mlk", {"position": "rotary", "num_mixtures": 3, "prior": "em", "feature_map": "favor"}),
    ("smlk", {"position": "sinusoidal", "feature_map": "dpfp"}),
    ("softmax", {"position": "none"}),
]
IDS = ["-".join([variant, *map(str, options.values())]) for variant, options in OPTIONS]


def language_model(variant: str = "smgk", **options) -> MgkForCausalLM:
    return moved(MgkForCausalLM(config(variant, **options)))


@pytest.mark.parametrize(("variant", "options"), OPTIONS, ids=IDS)
@torch.no_grad()
def test_cached_logits_are_those_without_a_cache_at_every_step(variant, options):
    model = language_model(variant, **options)
    rows = [tokens(20, seed=1), tokens(13, seed=2), tokens(17, seed=3)]
    ids, mask = left_padded(rows)
    cache = None
    steps = [(0, 7), (7, 8), (8, 9), (9, 14), *((at, at + 1) for at in range(14, 20))]
    pieces = []
    for start, end in steps:
        out = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
        assert cache.get_seq_length() == end
    cached = torch.cat(pieces, 1)
    for row, tokens_of_row in enumerate(rows):
        alone = model(tokens_of_row[None], use_cache=False).logits[0]
        torch.testing.assert_close(cached[row, -len(tokens_of_row) :], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "way",
    [
        {"do_sample": False},
        {"do_sample": True, "top_k": 5},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": False, "prefill_chunk_size": 4},
    ],
    ids=["greedy", "sampling", "beam", "chunks"],
)
def test_generate_with_left_padding_equals_no_cache_and_no_padding(variant, way):
    model = language_model(variant)
    rows = [tokens(9, seed=1), tokens(5, seed=2)]
    ids, mask = left_padded(rows)
    options = {"max_new_tokens": 8, "pad_token_id": 0, **way}
    torch.manual_seed(3)
    cached = model.generate(ids, attention_mask=mask, **options)
    torch.manual_seed(3)
    without = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
    uncached = model.generate(ids, attention_mask=mask, use_cache=False, **without)
    assert torch.equal(cached, uncached)
    if not way.get("do_sample"):
        repeats = way.get("num_return_sequences", 1)
        for number, row in enumerate(rows):
            alone = model.generate(row[None], attention_mask=torch.ones(1, len(row)).long(), **without)
            assert torch.equal(alone[:, len(row) :], cached[number * repeats : (number + 1) * repeats, 9:])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("make", [lambda model: DynamicCache(), lambda model: DynamicCache(config=model.config)])
def test_continuing_from_a_cache(variant, make):
    model = language_model(variant)
    ids = tokens(2, 6)
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    first = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=4,
        do_sample=False,
        past_key_values=make(model),
        return_dict_in_generate=True,
    )
    prompt = copy.deepcopy(first.past_key_values)
    for _ in range(2):  # one prompt serves several continuations
        rest = model.generate(
            first.sequences,
            attention_mask=torch.ones_like(first.sequences),
            max_new_tokens=5,
            do_sample=False,
            past_key_values=copy.deepcopy(prompt),
        )
        assert torch.equal(rest, whole)


@pytest.mark.parametrize("variant", GROWING)
def test_assisted_decoding_crops_the_cache(variant):
    model = language_model(variant)
    ids = tokens(1, 6).repeat(1, 3)
    mask = torch.ones_like(ids)
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    assisted = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False, prompt_lookup_num_tokens=3)
    assert torch.equal(assisted, plain)


@pytest.mark.parametrize("variant", LINEAR)
def test_assisted_decoding_is_refused_for_a_state(variant):
    model, ids = language_model(variant), tokens(1, 6)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_cache_answers_as_transformers_expects(variant):
    model, ids = language_model(variant), tokens(3, 8)
    cache = model(ids).past_key_values
    layer = cache.layers[0]
    assert (len(cache), cache.get_seq_length(), cache.get_mask_sizes(2, 0)) == (2, 8, (10, 0))
    assert cache.get_max_length() == -1
    assert cache.is_initialized is False  # no layer is to be filled before its first use
    assert not cache.is_compileable
    assert cache.is_croppable is (variant in GROWING)
    selected, repeated, cropped = (copy.deepcopy(cache) for _ in range(3))
    selected.batch_select_indices(torch.tensor([2, 0]))
    repeated.batch_repeat_interleave(2)
    following = tokens(3, 1, seed=5)
    expected = model(torch.cat([ids, following], 1), use_cache=False).logits[:, -1:]
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(model(following[[2, 0]], past_key_values=selected).logits, expected[[2, 0]], **close)
    doubled = following.repeat_interleave(2, 0)
    torch.testing.assert_close(
        model(doubled, past_key_values=repeated).logits, expected.repeat_interleave(2, 0), **close
    )
    cropped.crop(0)
    assert cropped.get_seq_length() == 8
    if variant in GROWING:
        assert layer.keys.shape == (3, 2, 2 if variant == "mgk" else 1, 8, 6)
        assert layer.values.shape == (3, 2, 8, 6)
        cropped.crop(-3)
        assert cropped.get_seq_length() == 5
        again = model(torch.cat([ids[:, 5:], following], 1), past_key_values=cropped).logits[:, -1:]
        torch.testing.assert_close(again, expected, **close)
    else:
        assert layer.keys is None
        with pytest.raises(ValueError, match="cannot be cropped"):
            cropped.crop(-3)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache_bytes(cache) == 0


@torch.no_grad()
def test_smgk_caches_half_of_softmax_with_twice_the_heads_and_a_state_does_not_grow():
    sizes = {}
    for variant, heads in (("softmax", 4), ("smgk", 2), ("mgk", 2), ("mlk", 2)):
        model = language_model(variant, num_attention_heads=heads)
        sizes[variant] = [cache_bytes(model(tokens(2, length)).past_key_values) for length in (10, 20)]
    assert sizes["softmax"][1] == 2 * sizes["smgk"][1] == 2 * sizes["smgk"][0] * 2
    assert sizes["mgk"][1] * 4 == sizes["softmax"][1] * 3
    assert sizes["mlk"][0] == sizes["mlk"][1]


def test_generation_beyond_the_learned_positions_is_refused_at_once():
    model, ids = language_model(), tokens(1, 40)
    mask = torch.ones_like(ids)
    assert model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False).shape == (1, 49)
    with pytest.raises(ValueError, match=r"generation to 50 tokens needs 49 positions.*max_position_embeddings=48"):
        model.generate(ids, attention_mask=mask, max_new_tokens=10)


@pytest.mark.parametrize("position", ["sinusoidal", "rotary", "none"])
def test_other_positions_go_on_beyond_the_training_length(position):
    model, ids = language_model(position=position), tokens(1, 40)
    mask = torch.ones_like(ids)
    long = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    assert torch.equal(
        long, model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, use_cache=False)
    )


@torch.no_grad()
def test_caches_of_another_kind_are_refused():
    model, ids = language_model("smgk"), tokens(2, 5)
    filled = DynamicCache()
    filled.update(torch.zeros(2, 2, 3, 6), torch.zeros(2, 2, 3, 6), 0)
    with pytest.raises(ValueError, match="got the cache of another model in layer 0"):
        model(ids, past_key_values=filled)
    with pytest.raises(ValueError, match="got StaticLayer in layer 0"):
        model(ids, past_key_values=StaticCache(model.config, max_cache_len=9))
    with pytest.raises(ValueError, match="StaticLayer"):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, cache_implementation="static")
    with pytest.raises(TypeError, match="cache must be what new_cache"):
        model(ids, past_key_values=language_model("mlk")(ids).past_key_values)
    with pytest.raises(ValueError, match="cache holds a batch of 2 sequences, got x with 1"):
        model(ids[:1], past_key_values=model(ids).past_key_values)
    with pytest.raises(ValueError, match="past_key_values has no meaning for an encoder"):
        moved(MgkModel(config()))(ids, past_key_values=DynamicCache())


@pytest.mark.parametrize("variant", VARIANTS)
def test_attentions_in_generation(variant):
    model, ids = language_model(variant), tokens(2, 5)
    options = {"max_new_tokens": 3, "do_sample": False, "output_attentions": True, "return_dict_in_generate": True}
    if variant in LINEAR:
        with pytest.raises(ValueError, match="output_attentions cannot be computed from the state"):
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        options["use_cache"] = False
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert len(out.attentions) == 3
    for step in out.attentions:
        assert len(step) == 2
        torch.testing.assert_close(step[1].sum(-1), torch.ones(step[1].shape[:3]))
