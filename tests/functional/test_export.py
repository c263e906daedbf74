"""torch.export and torch.compile with a length that is left open: no guard, and plain operators in an export."""

import pytest
import torch
from torch.export import Dim, export

import mgk
from support.cases import make_case
from support.versions import needs_fullgraph

pytestmark = needs_fullgraph


class Call(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", ["softmax", "linear", "mgk", "smgk", "mlk", "smlk"])
def test_every_variant_exports_with_an_open_length(variant, is_causal):
    attn = mgk.nn.MixtureAttention(8, 2, variant=variant).eval()
    module = Call(lambda x: attn(x, is_causal=is_causal))
    with torch.no_grad():
        program = export(
            module, (torch.randn(2, 300, 8),), dynamic_shapes={"x": {1: Dim("n", min=2, max=4096)}}
        )
        assert not any("mgk" in str(node.target) for node in program.graph.nodes)
        for length in (5, 40, 700):  # on both sides of what "auto" would compute eagerly
            x = torch.randn(2, length, 8)
            torch.testing.assert_close(program.module()(x), module(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_hard_mixture_with_a_key_mask_exports(is_causal):
    attn = mgk.nn.MixtureAttention(8, 2, variant="mgk", e_step="hard", prior="uniform").eval()

    class Masked(torch.nn.Module):
        def forward(self, x, mask):
            return attn(x, key_mask=mask, is_causal=is_causal)

    length = Dim("n", min=2, max=4096)
    with torch.no_grad():
        example = (torch.randn(2, 300, 8), torch.rand(2, 300) > 0.2)
        program = export(Masked(), example, dynamic_shapes={"x": {1: length}, "mask": {1: length}})
        for size in (5, 700):
            x, mask = torch.randn(2, size, 8), torch.rand(2, size) > 0.3
            torch.testing.assert_close(program.module()(x, mask), Masked()(x, mask), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_kernels", [True, False])
def test_one_compiled_graph_serves_every_length(is_causal, has_kernels, monkeypatch):
    """The threshold of "auto" lies between the lengths: as a guard it would compile twice."""
    if not has_kernels:
        monkeypatch.setattr("mgk.functional.mixture.backends.cpu_kernels.STATUS", "not built")
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    function = torch.compile(
        lambda q, k, v: mgk.mixture_attention(q, k, v, is_causal=is_causal),
        fullgraph=True,
        dynamic=True,
        backend=count,
    )
    for length in (40, 50, 300):
        x = make_case(sizes=(1, 2, length, length, 4, 4, 2)).tensors
        inputs = (x["query"], x["keys"], x["value"])
        expected = mgk.mixture_attention(*inputs, is_causal=is_causal, backend="reference")
        torch.testing.assert_close(function(*inputs), expected)
    assert len(graphs) == 1
