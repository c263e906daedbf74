"""Tokens per second and bytes of the cache in generation, against softmax that fills the width and GPT-2."""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.cache_utils import Cache

from mgk._util import machine
from mgk._util.machine import Machine
from mgk.bench import timing
from mgk.bench.conditions import measuring, usable_device
from mgk.bench.errors import BenchError
from mgk.bench.generate_settings import GenerateSettings
from mgk.models import MgkConfig, MgkForCausalLM
from mgk.models.transformers_cache import CoreCacheLayer

SOFTMAX, GPT2 = "softmax", "gpt2"
_STATE_VARIANT = "mlk"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One model while it generates."""

    model: str
    heads: int
    tokens_per_second: float  # of the whole batch, the median over rounds
    times_softmax: float  # how many times as fast as softmax in the same round, the median over rounds
    times_softmax_min: float
    times_softmax_max: float
    times_gpt2: float
    times_gpt2_min: float
    times_gpt2_max: float
    cache_bytes: int  # after the last token


@dataclass(frozen=True, kw_only=True)
class AtPosition:
    """The time for one token of the whole batch, so many tokens after the start."""

    model: str
    position: int
    milliseconds: float  # the median over rounds


@dataclass(frozen=True, kw_only=True)
class GenerateReport:
    """Every row, with what is needed to measure it again."""

    settings: GenerateSettings
    machine: Machine
    speeds: tuple[Speed, ...]
    positions: tuple[AtPosition, ...]

    def to_json(self) -> dict[str, Any]:
        """The report in the types of JSON."""
        data = asdict(self)
        data["settings"] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in data["settings"].items()
        }
        return {"benchmark": "generate", **data, "speeds": list(data["speeds"]), "positions": list(data["positions"])}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "GenerateReport":
        """The report that ``to_json`` made this of."""
        values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in data["settings"].items()}
        return cls(
            settings=GenerateSettings(**values),
            machine=Machine(**data["machine"]),
            speeds=tuple(Speed(**row) for row in data["speeds"]),
            positions=tuple(AtPosition(**row) for row in data["positions"]),
        )


class Generation:
    """One model with a prompt in its cache, to be continued again and again."""

    def __init__(self, model: PreTrainedModel, prompt: Tensor) -> None:
        self.model = model
        with torch.no_grad():
            self.cache: Cache = model(prompt[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        self.prompt = prompt
        self.cache_bytes = 0

    def run(self, tokens: int) -> Tensor:
        """Generate so many tokens greedily through ``generate``, and bring the cache back to where it was."""
        length = self.cache.get_seq_length()
        is_state = _is_state(self.cache)
        cache = copy.deepcopy(self.cache) if is_state else self.cache
        options = GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        out = self.model.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            past_key_values=cache,
            generation_config=options,
        )
        self.cache_bytes = cache_bytes(cache)
        if not is_state:
            self.cache.crop(length - self.cache.get_seq_length())
        return out

    @torch.no_grad()
    def steps(self, tokens: int) -> None:
        """Decode so many tokens by the model alone: ``generate`` copies the text so far at every step."""
        cache, token = copy.deepcopy(self.cache), self.prompt[:, -1:]
        for _ in range(tokens):
            out = self.model(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)


def run(settings: GenerateSettings, on_step: Callable[[int, int], None] = lambda done, total: None) -> GenerateReport:
    """Measure what the settings ask for.

    Args:
        settings: shapes and options.
        on_step: told after each run how many of how many are done.

    Raises:
        BenchError: when the sizes do not fit, the device is missing or the memory does not suffice.
    """
    if settings.width % settings.head_dim:
        raise BenchError(f"the width {settings.width} is no multiple of the head width {settings.head_dim}")
    device = usable_device(settings.device)
    with measuring(settings.threads, smaller="batch or prompt"):
        return _run(settings, device, on_step)


def make_model(name: str, settings: GenerateSettings) -> PreTrainedModel:
    """An untrained model in evaluation; its speed does not depend on its weights."""
    positions = max(settings.prompt + settings.tokens, *settings.positions, 1) + settings.position_tokens
    if name == GPT2:
        options = GPT2Config(
            vocab_size=settings.vocab_size,
            n_positions=positions,
            n_embd=settings.width,
            n_layer=settings.layers,
            n_head=_softmax_heads(settings),
            bos_token_id=None,
            eos_token_id=None,
        )
        return GPT2LMHeadModel._from_config(options, attn_implementation="sdpa").eval()
    config = MgkConfig(
        attention=name,
        vocab_size=settings.vocab_size,
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=_softmax_heads(settings) if name == SOFTMAX else settings.heads,
        head_dim=settings.head_dim,
        intermediate_size=4 * settings.width,
        num_mixtures=settings.mixtures,
        max_position_embeddings=positions,
    )
    return MgkForCausalLM(config).eval()


def cache_bytes(cache: Cache) -> int:
    """The bytes of the entries in use, of our caches and of those of transformers."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, CoreCacheLayer):
            total += layer.core.nbytes
        else:
            total += sum(x.numel() * x.element_size() for x in (layer.keys, layer.values) if x is not None)
    return total


def _run(settings: GenerateSettings, device: torch.device, on_step: Callable[[int, int], None]) -> GenerateReport:
    names = (SOFTMAX, GPT2, *(name for name in settings.variants if name not in (SOFTMAX, GPT2)))
    total = (settings.rounds + 1) * (len(names) + len(settings.positions))
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        on_step(done, total)

    speeds = _speeds(settings, names, device, step)
    positions = _positions(settings, device, step) if settings.positions else ()
    return GenerateReport(settings=settings, machine=machine.describe(device), speeds=speeds, positions=positions)


def _speeds(
    settings: GenerateSettings, names: tuple[str, ...], device: torch.device, step: Callable[[], None]
) -> tuple[Speed, ...]:
    prompt = _prompt(settings, settings.prompt + 1, device)  # the last token is the first that is decoded
    models = {name: Generation(make_model(name, settings).to(device), prompt) for name in names}
    work = {name: _bind(generation.run, settings.tokens) for name, generation in models.items()}
    seconds = timing.measure(work, rounds=settings.rounds, device=device, on_run=step)
    rows = []
    for name, generation in models.items():
        softmax, gpt2 = ([a / b for a, b in zip(seconds[y], seconds[name], strict=True)] for y in (SOFTMAX, GPT2))
        rows.append(
            Speed(
                model=name,
                heads=_softmax_heads(settings) if name in (SOFTMAX, GPT2) else settings.heads,
                tokens_per_second=settings.batch * settings.tokens / median(seconds[name]),
                times_softmax=median(softmax),
                times_softmax_min=min(softmax),
                times_softmax_max=max(softmax),
                times_gpt2=median(gpt2),
                times_gpt2_min=min(gpt2),
                times_gpt2_max=max(gpt2),
                cache_bytes=generation.cache_bytes,
            )
        )
    return tuple(rows)


def _positions(settings: GenerateSettings, device: torch.device, step: Callable[[], None]) -> tuple[AtPosition, ...]:
    model = make_model(_STATE_VARIANT, settings).to(device)
    places = {at: Generation(model, _prompt(settings, at + 1, device)) for at in settings.positions}
    work = {str(at): _bind(generation.steps, settings.position_tokens) for at, generation in places.items()}
    seconds = timing.measure(work, rounds=settings.rounds, device=device, on_run=step)
    return tuple(
        AtPosition(
            model=_STATE_VARIANT,
            position=at,
            milliseconds=median(seconds[str(at)]) / settings.position_tokens * 1e3,
        )
        for at in settings.positions
    )


def _softmax_heads(settings: GenerateSettings) -> int:
    return settings.width // settings.head_dim


def _prompt(settings: GenerateSettings, length: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(settings.vocab_size, (settings.batch, length), generator=generator).to(device)


def _bind(work: Callable[[int], object], tokens: int) -> Callable[[], object]:
    return lambda: work(tokens)


def _is_state(cache: Cache) -> bool:
    return isinstance(cache.layers[0], CoreCacheLayer) and not cache.layers[0].is_croppable
