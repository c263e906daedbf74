"""Swap ``nn.MultiheadAttention`` for ``MixtureAttention`` with half the heads, and train both on the same task.

The task is associative recall: 24 tokens each carry a key and a value, the last token carries a key alone, and the
model names the value that went with it. Run it with ``make demo`` or ``python examples/swap_multihead_attention.py``.
"""

import argparse
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mgk.nn import MixtureAttention

if TYPE_CHECKING:
    from collections.abc import Callable

EMBED_DIM, NUM_KEYS, NUM_VALUES, NUM_PAIRS = 64, 48, 16, 24


class SoftmaxAttention(nn.Module):
    """PyTorch's own module, called as ours is."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(EMBED_DIM, num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, C) -> (B, L, C)."""
        return self.attention(x, x, x, need_weights=False)[0]


class Recall(nn.Module):
    """One pre-norm transformer block over tokens that carry a key and a value."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.keys = nn.Embedding(NUM_KEYS, EMBED_DIM)
        self.values = nn.Embedding(NUM_VALUES + 1, EMBED_DIM)  # the last one says "which?"
        self.attention = attention
        self.attention_norm, self.mlp_norm = nn.LayerNorm(EMBED_DIM), nn.LayerNorm(EMBED_DIM)
        self.mlp = nn.Sequential(nn.Linear(EMBED_DIM, 128), nn.GELU(), nn.Linear(128, EMBED_DIM))
        self.head = nn.Linear(EMBED_DIM, NUM_VALUES)

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        """Logits (B, NUM_VALUES) of the value that belongs to the last key."""
        x = self.keys(keys) + self.values(values)
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return self.head(x[:, -1])


def make_batch(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values (B, NUM_PAIRS + 1) and the answers (B,)."""
    keys = torch.rand(size, NUM_KEYS, generator=generator).argsort(-1)[:, :NUM_PAIRS]
    values = torch.randint(NUM_VALUES, (size, NUM_PAIRS), generator=generator)
    asked = torch.randint(NUM_PAIRS, (size, 1), generator=generator)
    question = torch.full((size, 1), NUM_VALUES)
    keys, answers = torch.cat([keys, keys.gather(1, asked)], 1), values.gather(1, asked)[:, 0]
    return keys, torch.cat([values, question], 1), answers


def train(model: Recall, steps: int) -> tuple[float, float]:
    """The accuracy on fresh examples, and the milliseconds of a step."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = time.perf_counter()
    for _ in range(steps):
        keys, values, answers = make_batch(64, generator)
        loss = cross_entropy(model(keys, values), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    milliseconds = 1000 * (time.perf_counter() - start) / steps
    keys, values, answers = make_batch(2000, generator)
    with torch.no_grad():
        accuracy = (model.eval()(keys, values).argmax(-1) == answers).float().mean().item()
    return accuracy, milliseconds


def main() -> None:
    """Train each model for the same number of steps and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    candidates: dict[str, Callable[[], nn.Module]] = {
        "nn.MultiheadAttention, 4 heads": lambda: SoftmaxAttention(4),
        "MixtureAttention mgk, 2 heads": lambda: MixtureAttention(EMBED_DIM, 2, variant="mgk", head_dim=16),
        "MixtureAttention smgk, 2 heads": lambda: MixtureAttention(EMBED_DIM, 2, variant="smgk", head_dim=16),
    }
    print(f"{'':32}{'parameters':>12}{'accuracy':>10}{'ms/step':>9}")
    for name, make in candidates.items():
        torch.manual_seed(0)
        attention = make()
        accuracy, milliseconds = train(Recall(attention), steps)
        count = sum(p.numel() for p in attention.parameters())
        print(f"{name:32}{count:>12,}{accuracy:>10.1%}{milliseconds:>9.1f}", flush=True)


if __name__ == "__main__":
    main()
