"""Dropout acts on position weights: unbiased, reproducible, the same in forward, backward and recomputation."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mgk
from mgk.functional.dropout import add_dropout
from support.cases import WITH_HARD

BACKENDS = WITH_HARD
SEEDED = tuple(name for name in BACKENDS if name not in ("reference", "eager"))


def make_inputs(length=70, mixtures=2):
    return torch.randn(2, 3, length, 5), torch.randn(2, 3, mixtures, length, 5), torch.randn(2, 3, length, 4)


def run(backend, inputs, seed=0, p=0.3, **options):
    torch.manual_seed(seed)
    return mgk.mixture_attention(*inputs, dropout_p=p, backend=backend, **options)


def dropped_weights(backend, query, keys, p, seed=0, **options):
    """The weights after dropout, made visible by an identity matrix of values."""
    length = keys.shape[3]
    return run(backend, (query, keys, torch.eye(length).expand(*query.shape[:2], -1, -1)), seed, p, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("e_step", ["soft", "hard"])
def test_each_weight_is_dropped_whole_or_scaled_up(backend, e_step):
    query, keys, _ = make_inputs()
    kept = dropped_weights(backend, query, keys, 0.25, e_step=e_step)
    ratio = kept / mgk.mixture_weights(query, keys, e_step=e_step)
    is_kept = ratio > 0.5
    torch.testing.assert_close(ratio, is_kept / 0.75, rtol=1e-4, atol=1e-6)
    assert abs(is_kept.float().mean() - 0.75) < 0.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_seed_gives_the_same_mask_and_another_seed_another(backend):
    inputs = make_inputs()
    assert torch.equal(run(backend, inputs, seed=1), run(backend, inputs, seed=1))
    assert not torch.equal(run(backend, inputs, seed=1), run(backend, inputs, seed=2))
    torch.manual_seed(1)
    first, second = (mgk.mixture_attention(*inputs, dropout_p=0.3, backend=backend) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("e_step", ["soft", "hard"])
@pytest.mark.parametrize("backend", SEEDED)
def test_backward_uses_the_mask_of_forward(backend, e_step, is_causal):
    """Finite differences with the seed held fixed."""
    torch.manual_seed(0)
    inputs = [x.double().requires_grad_() for x in make_inputs(length=9)]
    options = {"e_step": e_step, "is_causal": is_causal}
    assert torch.autograd.gradcheck(lambda *x: run(backend, x, **options), inputs)


@pytest.mark.parametrize("backend", SEEDED)
def test_blocks_have_masks_of_their_own(backend):
    """33 million scores are cut into many blocks; equal masks in two of them would repeat."""
    query, keys = torch.zeros(1, 1, 2048, 1), torch.zeros(1, 1, 1, 2048, 1)
    is_kept = dropped_weights(backend, query, keys, 0.5)[0, 0] > 0
    quarters = [is_kept[i : i + 1024, j : j + 1024] for i in (0, 1024) for j in (0, 1024)]
    for a in range(4):
        for b in range(a):
            assert abs((quarters[a] == quarters[b]).float().mean() - 0.5) < 0.01


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_recomputation_in_gradient_checkpointing_drops_the_same(backend, use_reentrant):
    results = []
    for checkpointed in (False, True):
        inputs = [x.requires_grad_() for x in make_inputs_seeded()]
        torch.manual_seed(5)

        def function(*x):
            return mgk.mixture_attention(*x, dropout_p=0.4, backend=backend)

        out = checkpoint(function, *inputs, use_reentrant=use_reentrant) if checkpointed else function(*inputs)
        results.append(
            torch.autograd.grad(out.square().sum(), inputs) if not use_reentrant else grads_of(out, inputs)
        )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def grads_of(out, inputs):
    """Reentrant checkpointing works with backward() only."""
    out.square().sum().backward()
    return [x.grad for x in inputs]


def make_inputs_seeded():
    torch.manual_seed(7)
    return make_inputs()


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_unbiased(backend):
    inputs = make_inputs(length=20)
    mean = torch.stack([run(backend, inputs, seed=s, p=0.2) for s in range(600)]).mean(0)
    exact = mgk.mixture_attention(*inputs)
    assert (mean - exact).abs().max() < 0.12


@pytest.mark.parametrize("backend", SEEDED)
def test_rows_are_not_renormalised(backend):
    query, keys, _ = make_inputs()
    assert dropped_weights(backend, query, keys, 0.5).sum(-1).std() > 0.05


def test_shifted_attention_drops_too():
    query, keys, value = make_inputs()
    torch.manual_seed(0)
    out = mgk.shifted_mixture_attention(query, keys[:, :, 0], torch.randn(3, 2, 5), value, dropout_p=0.5)
    assert out.isfinite().all()


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "sdpa"])
@pytest.mark.parametrize("dropout_p", [0.999999, 1 - 1e-12, 1e-6])
def test_probabilities_near_0_and_1(backend, dropout_p):
    """What is kept is weighed by 1 / (1 - p): the expected output is the one without dropout."""
    torch.manual_seed(0)
    query, keys = torch.zeros(1, 1, 2000, 1), torch.zeros(1, 1, 2, 2000, 1)
    value = torch.ones(1, 1, 2000, 1, requires_grad=True)
    out = mgk.mixture_attention(query, keys, value, dropout_p=dropout_p, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), value)
    assert out.isfinite().all()
    assert grad.isfinite().all()
    if dropout_p < 1 - 1e-9:  # four of four million weights are kept
        assert abs(out.mean().item() - 1) < (2.0 if dropout_p > 0.5 else 1e-3)
        assert (out != 1).any()


@pytest.mark.parametrize("shape", [(3, 70, 31), (1, 5), (2, 4096, 3)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_hidden_dropout_is_unbiased_and_the_same_in_the_backward(shape, has_residual):
    x, residual = torch.randn(shape).requires_grad_(), torch.randn(shape).requires_grad_()
    torch.manual_seed(5)
    out = add_dropout(x, residual if has_residual else None, 0.25)
    factor = ((out - residual if has_residual else out) / x).detach()
    is_kept = factor > 0.5
    torch.testing.assert_close(factor, is_kept / 0.75, rtol=1e-2, atol=1e-2)
    if x.numel() > 5000:
        assert abs(is_kept.float().mean() - 0.75) < 0.02
        pairs = is_kept.flatten().float()
        assert abs((pairs[1:] * pairs[:-1]).mean() - 0.75**2) < 0.03
    upstream = torch.randn(shape)
    out.backward(upstream)
    torch.testing.assert_close(x.grad, upstream * is_kept / 0.75)
    if has_residual:
        assert torch.equal(residual.grad, upstream)
    torch.manual_seed(5)
    assert torch.equal(out, add_dropout(x, residual if has_residual else None, 0.25))
    assert not torch.equal(out, add_dropout(x, residual if has_residual else None, 0.25))


def test_hidden_dropout_in_other_modes_is_torch_s():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(1)
    out = add_dropout(x, x, 0.5)
    torch.manual_seed(1)
    torch.testing.assert_close(out, x + torch.dropout(x, 0.5, True))
    assert torch.equal(add_dropout(x, x, 0.0), 2 * x)
    single = torch.randn(40, 5, requires_grad=True)
    loss = add_dropout(single, None, 0.5).square().sum()
    (first,) = torch.autograd.grad(loss, single, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), single)  # 2 m^2 / (1 - p)^2
    torch.testing.assert_close(second, (first != 0) * 8.0)
