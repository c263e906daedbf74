"""Tokens per second and cache size in generation, against softmax and GPT-2."""

import copy
from collections.abc import Mapping
from functools import partial
from statistics import median

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, PreTrainedModel
from transformers.cache_utils import Cache

from mgk.bench import timing
from mgk.bench.registry import GenerateSettings
from mgk.bench.runner import BenchError, OnStep, Outcome, Row
from mgk.bench.timing import Steps, Work
from mgk.models import MgkConfig, MgkForCausalLM
from mgk.models.transformers_cache import CoreCacheLayer

BASELINES = SOFTMAX, GPT2 = "softmax", "gpt2"
_STATE_VARIANT = "mlk"


class Generation:
    """One model with a prompt in its cache, continued again and again."""

    def __init__(self, model: PreTrainedModel, prompt: Tensor) -> None:
        self.model = model
        with torch.no_grad():
            self.cache: Cache = model(prompt[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        self.prompt = prompt
        self.cache_bytes = 0

    def run(self, tokens: int) -> Tensor:
        """Generate greedily through ``generate``, then restore the cache."""
        length = self.cache.get_seq_length()
        layer = self.cache.layers[0]
        is_state = isinstance(layer, CoreCacheLayer) and not layer.is_croppable
        cache = copy.deepcopy(self.cache) if is_state else self.cache
        out = self.model.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            past_key_values=cache,
            generation_config=GenerationConfig(
                max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None
            ),
        )
        self.cache_bytes = cache_bytes(cache)
        if not is_state:
            self.cache.crop(length - self.cache.get_seq_length())
        return out

    @torch.no_grad()
    def steps(self, tokens: int) -> None:
        """Decode without ``generate``, which copies the text at every step."""
        cache, token = copy.deepcopy(self.cache), self.prompt[:, -1:]
        for _ in range(tokens):
            out = self.model(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)


def run(settings: GenerateSettings, on_step: OnStep) -> Outcome:
    """One row per model, softmax and GPT-2 first, then one per position."""
    if settings.width % settings.head_dim:
        width = f"the width {settings.width}"
        raise BenchError(f"{width} is no multiple of the head width {settings.head_dim}")
    names = (*BASELINES, *(name for name in settings.variants if name not in BASELINES))
    steps = Steps(on_step, (settings.rounds + 1) * (len(names) + len(settings.positions)))
    rows = _speeds(settings, names, steps)
    if settings.positions:
        rows += _positions(settings, steps)
    return Outcome(rows)


def make_model(name: str, settings: GenerateSettings) -> PreTrainedModel:
    """An untrained model in evaluation mode."""
    last = max(settings.prompt + settings.tokens, *settings.positions, 1)
    num_positions = last + settings.position_tokens
    model: PreTrainedModel
    if name == GPT2:
        config = GPT2Config(
            vocab_size=settings.vocab_size,
            n_positions=num_positions,
            n_embd=settings.width,
            n_layer=settings.layers,
            n_head=_num_heads(name, settings),
            bos_token_id=None,
            eos_token_id=None,
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    else:
        model = MgkForCausalLM(
            MgkConfig(
                attention=name,
                vocab_size=settings.vocab_size,
                hidden_size=settings.width,
                num_hidden_layers=settings.layers,
                num_attention_heads=_num_heads(name, settings),
                head_dim=settings.head_dim,
                intermediate_size=4 * settings.width,
                num_mixtures=settings.mixtures,
                max_position_embeddings=num_positions,
            )
        )
    return model.eval().to(settings.device)


def cache_bytes(cache: Cache) -> int:
    """The bytes of the entries in use."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, CoreCacheLayer):
            total += layer.core.nbytes
        else:
            tensors = [x for x in (layer.keys, layer.values) if x is not None]
            total += sum(x.numel() * x.element_size() for x in tensors)
    return total


def _speeds(settings: GenerateSettings, names: tuple[str, ...], steps: Steps) -> list[Row]:
    prompt = _prompt(settings, settings.prompt + 1)  # the last is decoded first
    models = {name: Generation(make_model(name, settings), prompt) for name in names}
    works = {name: partial(model.run, settings.tokens) for name, model in models.items()}
    seconds = _measure(works, settings, steps)
    rows = []
    for name, generation in models.items():
        row = {
            "experiment": "speed",
            "model": name,
            "heads": _num_heads(name, settings),
            "tokens_per_second": settings.batch * settings.tokens / median(seconds[name]),
        }
        for baseline in BASELINES:
            pairs = zip(seconds[baseline], seconds[name], strict=True)
            times = [theirs / mine for theirs, mine in pairs]
            row[f"times_{baseline}"] = median(times)
            row |= {f"times_{baseline}_min": min(times), f"times_{baseline}_max": max(times)}
        rows.append({**row, "cache_bytes": generation.cache_bytes})
    return rows


def _positions(settings: GenerateSettings, steps: Steps) -> list[Row]:
    model, tokens = make_model(_STATE_VARIANT, settings), settings.position_tokens
    works, rows = {}, []
    for at in settings.positions:
        works[str(at)] = partial(Generation(model, _prompt(settings, at + 1)).steps, tokens)
    for at, times in zip(settings.positions, _measure(works, settings, steps).values(), strict=True):
        row = {"experiment": "position", "model": _STATE_VARIANT, "position": at}
        rows.append({**row, "milliseconds": median(times) / tokens * 1e3})
    return rows


def _measure(works: Mapping[str, Work], settings: GenerateSettings, steps: Steps) -> dict[str, list[float]]:
    device = torch.device(settings.device)
    return timing.measure(works, rounds=settings.rounds, device=device, on_run=steps)


def _num_heads(name: str, settings: GenerateSettings) -> int:
    return settings.width // settings.head_dim if name in BASELINES else settings.heads


def _prompt(settings: GenerateSettings, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(settings.vocab_size, (settings.batch, length), generator=generator)
    return ids.to(settings.device)
