"""Tiny models of every kind, moved away from where they start, and batches for them."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mgk import variants
from mgk.models import MgkConfig, MgkPreTrainedModel

VARIANTS = tuple(variants.VARIANTS)
LINEAR = tuple(name for name, spec in variants.VARIANTS.items() if spec.is_linear)
GROWING = tuple(name for name in VARIANTS if name not in LINEAR)
VOCAB = 30

Model = TypeVar("Model", bound=MgkPreTrainedModel)


def config(attention: str = "mgk", **options: Any) -> MgkConfig:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 6,
        "intermediate_size": 20,
        "max_position_embeddings": 48,
        "num_labels": 3,
    }
    return MgkConfig(attention=attention, **{**sizes, **options})


def moved(model: Model) -> Model:
    """The model in evaluation, as if training had moved what starts at a constant (biases, norms, priors)."""
    generator = torch.Generator().manual_seed(1)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "logits", "log_variance")) or "norm" in name:
                parameter.add_(noise(parameter) / 2)
            elif isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding):
                parameter.mul_(20)
        for name, buffer in model.named_buffers():
            if name.endswith("prior.pi"):
                buffer.copy_(noise(buffer).softmax(1))
            elif name.endswith("sigma2"):
                buffer.mul_((noise(buffer) / 2).exp())
    return model.eval()


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The rows padded with 0 on the left, and their mask."""
    length = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([row.new_zeros(length - len(row)), row]) for row in rows])
    mask = torch.stack([torch.arange(length) >= length - len(row) for row in rows])
    return ids, mask.long()
