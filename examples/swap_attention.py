"""Replace the attention of an existing model by a mixture of Gaussian keys: ``nn.TransformerEncoder``, then BERT.

    python examples/swap_attention.py                          # seconds, nothing to download
    python examples/swap_attention.py --bert bert-base-uncased # part 3 with your own BERT, a folder or a name

Run it as a script, or cell by cell in an editor that supports ``# %%``.
"""

# %%
import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertModel
from transformers.masking_utils import sdpa_mask

import mgk
from mgk.nn import MixtureAttention

parser = argparse.ArgumentParser(description="Swap attention in existing models.")
parser.add_argument("--steps", type=int, default=300, help="training steps before the swap and after it")
parser.add_argument("--bert", help="a folder or a name; a small one with random weights if not given")
options = parser.parse_args()
torch.manual_seed(0)
WIDTH, HEADS, KEYS, VALUES = 64, 4, 8, 8

# %% 1. An existing model and its task, associative recall: 8 pairs of key and value, then a key; predict its value.
layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
model = nn.Sequential(nn.Embedding(KEYS * (VALUES + 1), WIDTH), encoder, nn.Linear(WIDTH, VALUES))


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Tokens (B, KEYS + 1) and answers (B,)."""
    keys, values = torch.rand(size, KEYS).argsort(-1), torch.randint(VALUES, (size, KEYS))
    asked = torch.randint(KEYS, (size, 1))
    question = KEYS * VALUES + keys.gather(1, asked)
    return torch.cat([keys * VALUES + values, question], 1), values.gather(1, asked)[:, 0]


def train(steps: int) -> None:
    """AdamW on new examples."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=2e-3)
    for _ in range(steps):
        tokens, answers = batch(64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens)[:, -1], answers).backward()
        optimizer.step()


@torch.no_grad()
def report(name: str) -> None:
    """Print the parameters, the shape of the encoder's output, and the accuracy."""
    tokens, answers = batch(2000)
    accuracy = (model.eval()(tokens)[:, -1].argmax(-1) == answers).float().mean()
    shape, count = tuple(encoder(model[0](tokens)).shape), sum(p.numel() for p in model.parameters())
    print(f"{name:28}{count:>8,} parameters, output {shape}, accuracy {accuracy:.1%}", flush=True)


train(options.steps)
report(f"softmax, {HEADS} heads")


# %% 2. The swap: two neighbouring heads become one, whose key is a mixture of both of their keys.
class Mixture(nn.Module):
    """Initialised from an ``nn.MultiheadAttention`` and called like it; drops every second head's query and value."""

    batch_first, in_proj_bias = True, None  # PyTorch's layers then skip their own fused softmax

    def __init__(self, old: nn.MultiheadAttention) -> None:
        super().__init__()
        heads, width = old.num_heads // 2, old.head_dim
        self.attention = MixtureAttention(old.embed_dim, heads, head_dim=width, variant="mgk")
        out = old.out_proj.weight.unflatten(1, (heads, 2, width))[:, :, 0].flatten(1)
        state = {"o_proj.weight": out, "o_proj.bias": old.out_proj.bias}
        for name, projections in (("weight", old.in_proj_weight), ("bias", old.in_proj_bias)):
            query, keys, value = projections.unflatten(0, (3, heads, 2, width))
            state |= {f"q_proj.{name}": query[:, 0].flatten(0, 1), f"v_proj.{name}": value[:, 0].flatten(0, 1)}
            state[f"k_proj.{name}"] = keys.flatten(0, 2)  # rows are (heads, components, width)
        self.attention.load_state_dict(state, strict=False)  # the prior alone is new and starts uniform

    def forward(self, x: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, **given: Any) -> Any:
        """The output and None for the weights; PyTorch's masks are True for tokens that do *not* take part."""
        padding, mask = given.get("key_padding_mask"), given.get("attn_mask")
        masks = {
            "key_mask": None if padding is None else padding == 0,
            "attn_mask": None if is_causal else mask,
        }
        return self.attention(x, context=None if key is x else key, is_causal=is_causal, **masks), None


for layer in encoder.layers:
    layer.self_attn = Mixture(layer.self_attn)
report(f"mgk, {HEADS // 2} heads, as swapped")
train(options.steps)  # recovers from the dropped queries and values
report(f"mgk, {HEADS // 2} heads, trained on")


# %% 3. A Hugging Face model keeps all of its weights; only the shifts of smgk, k_jr = k_j + b_r, are new.
def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """Eq. 9 with the prior exp(|k_j|^2 / 2 sigma^2), which cancels the keys' norms: Eq. 1 where the shifts are 0."""
    prior = key.square().sum(-1).unsqueeze(2) / (2 * math.sqrt(key.shape[-1]))  # (B, H, 1, S)
    masks = {"attn_mask": mask, "is_causal": mask is None and module.is_causal, "dropout_p": given["dropout"]}
    return mgk.shifted_mixture_attention(query, key, module.shifts, value, prior, **masks).transpose(1, 2), None


AttentionInterface.register("smgk", attend)
AttentionMaskInterface.register("smgk", sdpa_mask)  # True takes part, as in mgk
small = BertConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=1000
)
bert = (BertModel.from_pretrained(options.bert) if options.bert else BertModel(small)).eval()
inputs = {
    "input_ids": torch.randint(1, 1000, (2, 20)),
    "attention_mask": (torch.arange(20) < 15).long().expand(2, 20),
}
before, kept = bert(**inputs).last_hidden_state, bert.num_parameters()
for layer in bert.encoder.layer:
    old = layer.attention.self
    old.shifts = nn.Parameter(0.02 * torch.randn(old.num_attention_heads, 2, old.attention_head_size))
bert.set_attn_implementation("smgk")
after = bert(**inputs).last_hidden_state
print(f"BERT: {kept:,} parameters kept, {bert.num_parameters() - kept:,} added, output {tuple(after.shape)}")
print(
    f"BERT: the output changed by at most {(after - before).abs().max():.0e}; train all weights and shifts as before"
)
