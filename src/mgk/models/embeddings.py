"""From tokens, pixels or patches and their positions to vectors."""

import math

import torch
from torch import Tensor, nn

from mgk.models.configuration import MgkConfig

_BASE = 10000.0


class MgkEmbeddings(nn.Module):
    """x_t = token or patch vector + position vector, with a learned vector in front where pooling is "cls".

    With sinusoidal positions the token vectors are multiplied by sqrt(hidden_size) first (Vaswani 2017), as the sines
    are far larger than they at the start.
    """

    def __init__(self, config: MgkConfig) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.position = config.position
        self.max_positions = config.max_position_embeddings
        self.tokens: nn.Embedding | None = None
        self.patches: MgkPatches | None = None
        if config.patch_size is None:
            self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            self.patches = MgkPatches(config)
        self.positions: nn.Embedding | None = None
        if config.position == "learned":
            self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.cls = nn.Parameter(torch.empty(config.hidden_size)) if config.pooling == "cls" else None
        self.scale = math.sqrt(config.hidden_size) if config.position == "sinusoidal" else 1.0
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def look_up(self, input_ids: Tensor) -> Tensor:
        """The vectors of tokens (B, L) -> (B, L, hidden_size)."""
        if self.tokens is None:
            raise ValueError("input_ids were given to a model of patches (patch_size is set): give pixel_values")
        return _look_up(self.tokens, input_ids, "input_ids", "vocab_size")

    def forward(self, vectors: Tensor, position_ids: Tensor) -> Tensor:
        """Add positions (B or 1, L) to vectors (B, L, hidden_size)."""
        if self.scale != 1.0:
            vectors = vectors * self.scale
        if self.positions is not None:
            vectors = vectors + _look_up(self.positions, position_ids, "positions", "max_position_embeddings")
        elif self.position == "sinusoidal":
            vectors = vectors + sinusoids(position_ids, self.hidden_size).to(vectors.dtype)
        if self.cls is not None:
            vectors = torch.cat([self.cls.to(vectors.dtype).expand(vectors.shape[0], 1, -1), vectors], 1)
        return self.dropout(vectors)


class MgkPatches(nn.Module):
    """Vectors of the square patches of an image, row by row, as in ViT: a linear map of each patch's pixels."""

    def __init__(self, config: MgkConfig) -> None:
        super().__init__()
        assert config.patch_size is not None
        self.shape = (config.num_channels, config.image_size, config.image_size)
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, config.patch_size, config.patch_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, patches, hidden_size)."""
        if pixel_values.ndim != 4 or pixel_values.shape[1:] != self.shape:
            raise ValueError(
                f"pixel_values must have shape (B, num_channels, image_size, image_size) = (B, {self.shape[0]},"
                f" {self.shape[1]}, {self.shape[2]}), got {tuple(pixel_values.shape)}"
            )
        return self.projection(pixel_values.to(self.projection.weight.dtype)).flatten(2).mT


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """[sin(p w_0), ..., cos(p w_0), ...] with w_m = 10000^(-2m/width) (Vaswani 2017): (..., L) -> (..., L, width)."""
    rates = _BASE ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    angles = positions.unsqueeze(-1).float() * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


def _look_up(table: nn.Embedding, ids: Tensor, name: str, limit: str) -> Tensor:
    """The rows of the ids. The CPU's lookup finds those out of range by itself: no pass over them beforehand."""
    if torch.compiler.is_compiling():
        return table(ids)
    try:
        return table(ids)
    except IndexError:
        raise ValueError(
            f"{name} must be from 0 to {table.num_embeddings - 1} ({limit} - 1),"
            f" got {int(ids.min())} to {int(ids.max())}"
        ) from None
