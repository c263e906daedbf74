"""torch.compile(fullgraph=True): the same output, gradients and statistics as without it."""

import pytest
import torch
from recompute import GAUSSIAN, MIXTURES, VARIANTS, make, padding_mask, tokens
from torch.utils.checkpoint import checkpoint

from mgk.nn import rotary_tables
from support.versions import needs_fullgraph

pytestmark = needs_fullgraph


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(function, attn, x, **options):
    """The output and the gradients of all parameters."""
    out = function(x, **options)
    grads = torch.autograd.grad(out.square().sum(), list(attn.parameters()))
    return [out.detach(), *grads]


def compiled(attn):
    return torch.compile(attn, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("variant", VARIANTS)
def test_output_and_gradients_do_not_change(variant):
    attn, x = make(variant), tokens(2, 7)
    options = {
        "key_mask": padding_mask(7, 4, total=7),
        "is_causal": True,
        "rotary": rotary_tables(torch.arange(7), attn.head_dim),
    }
    torch.testing.assert_close(run(compiled(attn), attn, x, **options), run(attn, attn, x, **options))


@pytest.mark.parametrize("backend", ["blockwise", "sdpa"])
@pytest.mark.parametrize("variant", GAUSSIAN)
def test_the_other_backends_compile_too(variant, backend):
    attn, x = make(variant, backend=backend, variance="learned"), tokens(2, 7)
    torch.testing.assert_close(run(compiled(attn), attn, x), run(attn, attn, x))


@pytest.mark.parametrize("variant", MIXTURES)
def test_compiled_forwards_count(variant):
    attn, x = make(variant, prior="em", **({"variance": "em"} if variant in GAUSSIAN else {})), tokens(2, 7)
    attn(x, is_causal=True)
    once = {name: value.clone() for name, value in attn.named_buffers()}
    function = compiled(attn)
    function(x, is_causal=True).sum().backward()
    for name in ("counts", "distances"):
        for label, part in (("prior", attn.prior), ("variance", attn.variance)):
            if hasattr(part, name):
                torch.testing.assert_close(getattr(part, name), 2 * once[f"{label}.{name}"])
    attn.m_step()
    expected = attn(x, is_causal=True)
    torch.testing.assert_close(function(x, is_causal=True), expected)  # the new prior, not a traced constant


@pytest.mark.parametrize("variant", ["mgk", "mlk"])
def test_a_compiled_module_counts_once_under_checkpointing(variant):
    attn, x = make(variant, prior="em"), tokens(2, 7).requires_grad_()
    checkpoint(compiled(attn), x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(attn.prior.counts.sum((1, 2)), torch.full((3,), 2 * 49.0, dtype=torch.float64))
