"""merge_attention: pieces of the keys equal the whole, in values and gradients, and empty pieces add nothing."""

import pytest
import torch

import mgk
from support.cases import BACKENDS, make_case

WITH_LSE = tuple(name for name in BACKENDS if name != "sdpa")


@pytest.mark.parametrize("e_step", ["soft", "hard"])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("backend", WITH_LSE)
def test_pieces_of_the_keys_equal_the_whole(backend, group, e_step):
    case = make_case(sizes=(2, 2, 40, 70, 4, 3, 3), prior="position", mask="pair", group=group, e_step=e_step)
    x = {name: t.requires_grad_() if t.is_floating_point() else t for name, t in case.tensors.items()}
    leaves = [x[name] for name in ("query", "keys", "value", "log_prior")]
    options = {"e_step": e_step, "return_lse": True, "backend": backend}

    def attend(part):
        keys, mask = x["keys"][:, :, :, part], x["attn_mask"][..., part]
        prior = x["log_prior"][..., part]
        return mgk.mixture_attention(x["query"], keys, x["value"][:, :, part], prior, attn_mask=mask, **options)

    cuts = [slice(0, 1), slice(1, 30), slice(30, 30), slice(30, 70)]
    merged, whole = mgk.merge_attention(map(attend, cuts)), attend(slice(0, 70))
    torch.testing.assert_close(merged, whole, atol=1e-10, rtol=0)
    upstream = torch.randn_like(whole[0]), torch.randn_like(whole[1])
    grads = [torch.autograd.grad(result, leaves, upstream, retain_graph=True) for result in (merged, whole)]
    torch.testing.assert_close(*grads, atol=1e-9, rtol=0)


def test_empty_pieces_add_nothing_and_make_no_nan():
    out, lse = torch.randn(3, 1, 2, 4, 5), torch.randn(3, 1, 2, 4)
    lse[1] = -torch.inf
    lse[:, :, :, 2] = -torch.inf
    out[1], out[:, :, :, 2] = torch.nan, torch.nan  # what an empty piece holds is of no effect
    pieces = [(o.requires_grad_(), m.requires_grad_()) for o, m in zip(out, lse, strict=True)]
    merged, total = mgk.merge_attention(pieces)
    expected, _ = mgk.merge_attention([pieces[0], pieces[2]])
    torch.testing.assert_close(merged, expected)
    assert not merged[:, :, 2].any()
    assert (total[:, :, 2] == -torch.inf).all()
    finite = total.masked_fill(total == -torch.inf, 0.0)
    grads = torch.autograd.grad(merged.sum() + finite.sum(), [x for piece in pieces for x in piece])
    assert all(grad.isfinite().all() for grad in grads)
    assert not grads[2].any()
    assert not grads[3].any()


def test_large_and_half_pieces_merge_in_float32():
    out, lse = (
        torch.randn(4, 1, 1, 3, 8).bfloat16(),
        torch.tensor([1e4, 1e4, -1e4, 9999.0]).view(4, 1, 1, 1).expand(4, 1, 1, 3),
    )
    merged, total = mgk.merge_attention(zip(out, lse, strict=True))
    assert merged.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    weights = (lse.double() - 1e4).exp()
    expected = (weights.unsqueeze(-1) * out.double()).sum(0) / weights.sum(0).unsqueeze(-1)
    torch.testing.assert_close(merged.double(), expected, atol=1e-2, rtol=1e-2)


def test_bad_pieces_raise_by_name():
    out, lse = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3)
    with pytest.raises(ValueError, match="at least one pair"):
        mgk.merge_attention([])
    with pytest.raises(TypeError, match=r"pieces\[0\] must be a pair"):
        mgk.merge_attention([out])
    with pytest.raises(ValueError, match=r"pieces\[1\]\[1\] must have shape"):
        mgk.merge_attention([(out, lse), (out, lse[:, :, :2])])
    with pytest.raises(ValueError, match=r"pieces\[1\]\[0\] must be"):
        mgk.merge_attention([(out, lse), (out.double(), lse)])
