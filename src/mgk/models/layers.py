"""The pre-norm layer of all models."""

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from mgk.models.configuration import MgkConfig
from mgk.nn import EMPrior, EMVariance, MixtureAttention
from mgk.nn.attention import Cache


class MgkLayer(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: MgkConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = make_attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = MgkFeedForward(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output (B, L, hidden_size), and the attention weights (B, H, L, S) when they are asked for."""
        attended = self.attention(
            self.attention_norm(hidden),
            key_mask=key_mask,
            is_causal=is_causal,
            rotary=rotary,
            cache=cache,
            need_weights=need_weights,
        )
        out, weights = attended if need_weights else (attended, None)
        hidden = hidden + self._dropped(out)
        return hidden + self._dropped(self.mlp(self.mlp_norm(hidden))), weights

    def _dropped(self, x: Tensor) -> Tensor:
        return self.dropout(x) if self.training else x  # decoding one token, every call of a module counts


class MgkFeedForward(nn.Module):
    """W_2 act(W_1 x)."""

    def __init__(self, config: MgkConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act = ACT2FN[config.hidden_act]
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_size) -> (..., hidden_size)."""
        return self.down_proj(self.act(self.up_proj(x)))


def make_attention(config: MgkConfig) -> MixtureAttention:
    """The attention of one layer."""
    heads, momentum = config.num_attention_heads, config.prior_momentum
    width = config.head_dim or config.hidden_size // heads
    mixtures = 1 if config.attention in ("softmax", "linear") else config.num_mixtures
    prior = EMPrior(heads, mixtures, momentum=momentum) if config.prior == "em" else config.prior
    variance = config.variance
    return MixtureAttention(
        config.hidden_size,
        heads,
        variant=config.attention,  # type: ignore[arg-type]  # checked by the configuration
        head_dim=width,
        num_mixtures=config.num_mixtures,
        e_step=config.e_step,  # type: ignore[arg-type]
        prior=prior,
        variance=EMVariance(heads, mixtures, width, momentum=momentum) if variance == "em" else variance,
        feature_map=config.feature_map,  # type: ignore[arg-type]
        dropout=config.attention_dropout,
        backend=config.backend,
    )
