"""Feature maps phi of linear attention, as modules."""

import torch
from torch import Tensor, nn

from mgk.functional import validation
from mgk.functional.linear import feature_maps


class Elu(nn.Module):
    """phi(x) = elu(x) + 1 (Katharopoulos 2020)."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., D)."""
        return feature_maps.elu_features(x)


class Dpfp(nn.Module):
    """phi(x) = [y roll(y, 1), ..., y roll(y, nu)], y = [relu(x), relu(-x)]."""

    def __init__(self, nu: int = 1) -> None:
        super().__init__()
        validation.positive_int("nu", nu)
        self.nu = nu

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) -> (..., 2 D nu)."""
        return feature_maps.dpfp_features(x, self.nu)

    def extra_repr(self) -> str:
        """The order."""
        return f"nu={self.nu}"


class Favor(nn.Module):
    """Random features of the softmax kernel (Performer, Choromanski 2021).

    Args:
        head_dim: D.
        num_features: F; None: 2 D.
        seed: Of the projection; None: from torch's generator.
    """

    projection: Tensor

    def __init__(self, head_dim: int, num_features: int | None = None, *, seed: int | None = None) -> None:
        super().__init__()
        validation.positive_int("head_dim", head_dim)
        if num_features is not None:
            validation.positive_int("num_features", num_features)
        self.head_dim = head_dim
        self.num_features = num_features or feature_maps.default_num_features(head_dim)
        self.register_buffer("projection", torch.empty(self.num_features, head_dim))
        self.redraw(seed)

    @torch.no_grad()
    def redraw(self, seed: int | None = None) -> None:
        """Draw a new projection, the same for a seed on every device."""
        if seed is None:
            seed = int(torch.randint(2**31, (), device="cpu"))
        drawn = feature_maps.favor_projection(self.head_dim, self.num_features, seed)
        self.projection = drawn.to(self.projection.device, self.projection.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Features of keys: (..., D) -> (..., F)."""
        return feature_maps.favor_features(x, self.projection)

    def features_of_queries(self, x: Tensor) -> Tensor:
        """Features of queries, scaled not to vanish: (..., D) -> (..., F)."""
        return feature_maps.favor_features(x, self.projection, is_query=True)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.head_dim}, {self.num_features}"


def make_feature_map(feature_map: feature_maps.FeatureMap, head_dim: int) -> feature_maps.FeatureMap:
    """The module of that name, or the callable as it is."""
    if feature_map == "elu":
        return Elu()
    if feature_map == "dpfp":
        return Dpfp()
    return Favor(head_dim) if feature_map == "favor" else feature_map
