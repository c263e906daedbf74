"""Feature maps phi of linear attention (Eq. 14): (..., D) -> (..., F).

``elu``: elu(x) + 1 (Katharopoulos 2020). ``favor``: positive random features
(Performer, Choromanski 2021). ``dpfp``: deterministic projection (Schlag 2021).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mgk.functional.backends import define_operator
from mgk.variants import CHOICES, FeatureMapName

FeatureMap = FeatureMapName | Callable[[Tensor], Tensor]

_FAVOR_SEED = 0


def elu_features(x: Tensor) -> Tensor:
    """phi(x) = max(x, 0) + exp(min(x, 0)) = elu(x) + 1."""
    # torch.compile knows no jvp of a Function
    function = _EluFeatures if torch.compiler.is_compiling() else _EluFeaturesWithTangent
    return function.apply(x)


class _EluFeatures(torch.autograd.Function):
    """phi'(x) = min(phi(x), 1): only the features are saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp_max(0.0).exp_().add_(x.relu())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors
        return features.clamp_max(1.0) * grad


class _EluFeaturesWithTangent(_EluFeatures):
    """The same with forward-mode differentiation."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors
        return features.clamp_max(1.0) * tangent


def dpfp_features(x: Tensor, nu: int = 1) -> Tensor:
    """phi(x) = [y * roll(y, 1), ..., y * roll(y, nu)] with y = [relu(x), relu(-x)]: F = 2 D nu."""
    y = torch.cat([x.relu(), (-x).relu()], -1)
    return torch.cat([y * y.roll(shift, -1) for shift in range(1, nu + 1)], -1)


def favor_features(x: Tensor, projection: Tensor, *, is_query: bool = False) -> Tensor:
    r"""phi(x)_f = exp(w_f . y - |y|^2 / 2) / sqrt(F) with y = x / D^(1/4).

    E[phi(q) . phi(k)] = exp(q . k / sqrt(D)). The scale of a query's features cancels in
    Eq. 14: their largest exponent is subtracted, so that they do not all underflow.

    Args:
        x: (..., D).
        projection: w, (F, D), rows drawn by :func:`favor_projection`.
        is_query: Whether x are queries.
    """
    y = x * x.shape[-1] ** -0.25
    exponent = y @ projection.to(y.dtype).mT - y.square().sum(-1, keepdim=True) / 2
    if is_query:
        exponent = exponent - exponent.detach().amax(-1, keepdim=True)
    return exponent.exp() * projection.shape[0] ** -0.5


def favor_projection(dim: int, num_features: int, seed: int) -> Tensor:
    """Rows w_f ~ N(0, I), orthogonal in groups of ``dim``, float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for _ in range(-(-num_features // dim)):
        directions, upper = torch.linalg.qr(_normal(dim, generator))
        directions = directions * upper.diagonal().sign()  # without bias
        lengths = _normal(dim, generator).norm(dim=1, keepdim=True)
        groups.append(directions.mT * lengths)
    return torch.cat(groups)[:num_features].float()


def _normal(dim: int, generator: torch.Generator) -> Tensor:
    """(dim, dim) on the CPU, also where another device is the default."""
    return torch.randn(dim, dim, generator=generator, dtype=torch.float64, device="cpu")


def default_num_features(dim: int) -> int:
    """2 D random features for heads of width D."""
    return 2 * dim


def check(feature_map: Any) -> None:
    """``feature_map`` is a known name or can be called."""
    names = CHOICES["feature_map"]
    if feature_map not in names and not callable(feature_map):
        raise ValueError(
            f"feature_map must be one of {', '.join(map(repr, names))} or a callable, got {feature_map!r}"
        )


def apply(feature_map: FeatureMap, x: Tensor, *, is_query: bool) -> Tensor:
    """phi(x). A callable with ``features_of_queries`` maps queries by that."""
    if feature_map == "elu":
        return elu_features(x)
    if feature_map == "dpfp":
        return dpfp_features(x)
    if feature_map == "favor":
        projection = torch.ops.mgk.favor_projection(x.detach(), default_num_features(x.shape[-1]), _FAVOR_SEED)
        return favor_features(x, projection, is_query=is_query)
    assert callable(feature_map)
    if is_query and hasattr(feature_map, "features_of_queries"):
        return feature_map.features_of_queries(x)
    return feature_map(x)


_drawn: dict[tuple[int, int, int, torch.device], Tensor] = {}


def _favor_projection_for(x: Tensor, num_features: int, seed: int) -> Tensor:
    key = (x.shape[-1], num_features, seed, x.device)
    if key not in _drawn:
        _drawn[key] = favor_projection(x.shape[-1], num_features, seed).to(x.device)
    return _drawn[key].clone()


# An operator: torch.compile cannot trace the generator.
define_operator(
    "favor_projection(Tensor x, int num_features, int seed) -> Tensor",
    _favor_projection_for,
    lambda x, num_features, seed: x.new_empty(num_features, x.shape[-1], dtype=torch.float32),
)
