"""Generation: the cached run equals the one without a cache, for every variant and every way to generate."""

import copy

import pytest
import torch
from tiny_models import GROWING, LINEAR, VARIANTS, config, left_padded, moved, tokens
from torch import nn
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.cache_utils import Cache, StaticSlidingWindowLayer

from mgk.data import byte_tokenizer
from mgk.models import MgkForCausalLM, MgkModel, cache_bytes
from support.versions import needs_fullgraph

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


def transformers_cache(layer) -> Cache:
    return Cache(layers=[layer, layer])


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
@pytest.mark.parametrize(
    "make", [lambda model: DynamicCache(), lambda model: DynamicCache(config=model.config)]
)
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
    assisted = model.generate(
        ids, attention_mask=mask, max_new_tokens=10, do_sample=False, prompt_lookup_num_tokens=3
    )
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
    torch.testing.assert_close(
        model(following[[2, 0]], past_key_values=selected).logits, expected[[2, 0]], **close
    )
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
    with pytest.raises(
        ValueError, match=r"generation to 50 tokens needs 49 positions.*max_position_embeddings=48"
    ):
        model.generate(ids, attention_mask=mask, max_new_tokens=10)


@pytest.mark.parametrize("position", ["sinusoidal", "rotary", "none"])
def test_other_positions_go_on_beyond_the_training_length(position):
    model, ids = language_model(position=position), tokens(1, 40)
    mask = torch.ones_like(ids)
    long = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    assert torch.equal(
        long, model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, use_cache=False)
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "way", [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}], ids=["greedy", "beam", "chunks"]
)
def test_a_static_cache_generates_the_same(variant, way):
    for position in ("learned", "rotary"):
        model = language_model(variant, position=position)
        ids, mask = left_padded([tokens(9, seed=1), tokens(5, seed=2)])
        options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **way}
        static = model.generate(ids, **options, cache_implementation="static")
        assert torch.equal(static, model.generate(ids, **options))


@needs_fullgraph
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_static_cache_compiles_one_step_for_every_length(variant):
    model = language_model(variant)
    ids, mask = left_padded([tokens(9, seed=1), tokens(5, seed=2)])
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiling = CompileConfig(fullgraph=True, backend="eager", mode=None, dynamic=False)
    compiling._compile_all_devices = True
    static = model.generate(ids, **options, cache_implementation="static", compile_config=compiling)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(static, model.generate(ids, **options))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_a_static_cache_called_by_hand(variant):
    """With a mask that grows, without a mask, without positions, and to the end of its places."""
    model = language_model(variant)
    ids, mask = left_padded([tokens(9, seed=1), tokens(5, seed=2)])
    for given in (mask, None):
        whole = model(ids, attention_mask=given, use_cache=False).logits
        cache, pieces = StaticCache(model.config, max_cache_len=9), []
        for start, end in ((0, 4), (4, 5), (5, 9)):
            part = None if given is None else given[:, :end]
            out = model(ids[:, start:end], attention_mask=part, past_key_values=cache)
            pieces.append(out.logits)
        assert (cache.get_seq_length(), cache.get_max_length(), cache.is_compileable) == (9, 9, True)
        found = torch.cat(pieces, 1)
        kept = slice(None) if given is None else mask.bool()
        torch.testing.assert_close(found[kept], whole[kept], atol=1e-4, rtol=1e-4)
        with pytest.raises(ValueError, match="the cache has max_length=9 places, got 10 tokens"):
            model(ids[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 9
        with pytest.raises(
            ValueError, match=r"attention_mask must have shape \(B, past \+ L\) = \(2, 10\), got \(2, 3\)"
        ):
            model(ids[:, :1], attention_mask=mask[:, :3], past_key_values=cache)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_refused_forward_leaves_every_layer_of_the_cache_as_it_was(variant):
    model, ids = language_model(variant), tokens(2, 6)
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
    before = [layer.core._entries() for layer in cache.layers]
    last = model.model.layers[-1].attention
    fitting, last.o_proj = last.o_proj, nn.Linear(3, 3)  # the first layer has been appended to
    with torch.no_grad(), pytest.raises(RuntimeError):
        model(ids[:, 4:], past_key_values=cache)
    for labels in (torch.full((2, 2), 10**6), torch.zeros(2, 3, dtype=torch.long)):
        with torch.no_grad(), pytest.raises(ValueError, match="labels must"):
            model(ids[:, 4:], past_key_values=cache, labels=labels)
    for layer, held in zip(cache.layers, before, strict=True):
        assert layer.get_seq_length() == 4
        for entry, old in zip(layer.core._entries(), held, strict=True):
            assert torch.equal(entry, old)
    last.o_proj = fitting
    with torch.no_grad():
        out = model(ids[:, 4:], past_key_values=cache)
        torch.testing.assert_close(out.logits, model(ids).logits[:, 4:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_read_in_inference_mode_is_continued_without(variant):
    model, ids = language_model(variant), tokens(2, 6)
    for cache in (DynamicCache(), StaticCache(model.config, max_cache_len=8)):
        with torch.inference_mode():
            model(ids[:, :4], past_key_values=cache)
        with torch.no_grad():
            out = model(ids[:, 4:], past_key_values=cache)
            torch.testing.assert_close(out.logits, model(ids).logits[:, 4:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_generation_stops_at_strings_and_passes_the_tokenizer_on(variant):
    model, tokenizer = language_model(variant, vocab_size=256), byte_tokenizer(shift=0)
    ids = tokens(1, 6)
    mask = torch.ones_like(ids)
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    options = {"max_new_tokens": 8, "do_sample": False, "stop_strings": ["never"], "tokenizer": tokenizer}
    assert torch.equal(model.generate(ids, attention_mask=mask, **options), whole)
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(ids, attention_mask=mask, **{**options, "tokenizer": None})


def test_continuous_batching_is_refused():
    model, ids = language_model(), tokens(1, 6)
    for call in (
        lambda: model.generate_batch(ids.tolist(), max_new_tokens=2),
        lambda: model.generate(ids, max_new_tokens=2, cache_implementation="paged"),
    ):
        with pytest.raises(ValueError, match=r"continuous batching \(a paged cache\) is not supported"):
            call()


@pytest.mark.parametrize("variant", GROWING)
def test_a_cache_that_holds_keys_and_values_is_a_prefix_with_gradients(variant):
    """As prefix tuning makes it: the output of every layer's attention to [prefix, tokens]."""
    model, ids = language_model(variant, num_hidden_layers=1), tokens(2, 4)
    keys, values = (torch.randn(2, 2, 3, 6, requires_grad=True) for _ in range(2))
    cache = DynamicCache()
    cache.update(keys, values, 0)
    out = model(ids, past_key_values=cache, use_cache=True)
    assert out.past_key_values.get_seq_length() == 7
    attention = model.model.layers[0].attention
    x = model.model.embeddings(model.get_input_embeddings()(ids), torch.arange(3, 7)[None])
    normed = model.model.layers[0].attention_norm(x)
    query, own, value = attention.project(normed)
    prefix = keys[:, :, None].expand(-1, -1, own.shape[2], -1, -1)
    heads = (query, torch.cat([prefix, own], 3), torch.cat([values, value], 2))
    hidden = x + attention.attend(*heads, is_causal=True)[0]
    layer = model.model.layers[0]
    expected = model.lm_head(model.model.norm(hidden + layer.mlp(layer.mlp_norm(hidden))))
    torch.testing.assert_close(out.logits, expected, atol=1e-5, rtol=1e-4)
    found, wanted = (torch.autograd.grad(x.square().sum(), [keys, values]) for x in (out.logits, expected))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)


def test_a_state_takes_no_prefix():
    filled = DynamicCache()
    filled.update(torch.zeros(2, 2, 3, 6), torch.zeros(2, 2, 3, 6), 0)
    with pytest.raises(ValueError, match="got the cache of another model in layer 0"):
        language_model("mlk")(tokens(2, 5), past_key_values=filled)


@torch.no_grad()
def test_caches_of_another_kind_are_refused():
    model, ids = language_model("smgk"), tokens(2, 5)
    filled = DynamicCache()
    filled.update(torch.zeros(2, 4, 3, 6), torch.zeros(2, 4, 3, 6), 0)
    offloaded = StaticCache(model.config, max_cache_len=9)
    offloaded.offloading = True  # as the argument, which asks for a GPU where torch is built for one
    with pytest.raises(ValueError, match="got the cache of another model in layer 0"):
        model(ids, past_key_values=filled)
    with pytest.raises(ValueError, match="past_key_values must not be offloaded"):
        model(ids, past_key_values=offloaded)
    with pytest.raises(ValueError, match="got StaticSlidingWindowLayer in layer 0"):
        model(
            ids, past_key_values=transformers_cache(StaticSlidingWindowLayer(max_cache_len=9, sliding_window=4))
        )
    with pytest.raises(TypeError, match="cache must be what new_cache"):
        model(ids, past_key_values=language_model("mlk")(ids).past_key_values)
    with pytest.raises(ValueError, match="cache holds a batch of 2 sequences, got x with 1"):
        model(ids[:1], past_key_values=model(ids).past_key_values)
    with pytest.raises(ValueError, match="past_key_values has no meaning for an encoder"):
        moved(MgkModel(config()))(ids, past_key_values=DynamicCache())


@pytest.mark.parametrize("variant", VARIANTS)
def test_attentions_in_generation(variant):
    model, ids = language_model(variant), tokens(2, 5)
    options = {
        "max_new_tokens": 3,
        "do_sample": False,
        "output_attentions": True,
        "return_dict_in_generate": True,
    }
    if variant in LINEAR:
        with pytest.raises(ValueError, match="output_attentions cannot be computed from the state"):
            model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        options["use_cache"] = False
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert len(out.attentions) == 3
    for step in out.attentions:
        assert len(step) == 2
        torch.testing.assert_close(step[1].sum(-1), torch.ones(step[1].shape[:3]))
