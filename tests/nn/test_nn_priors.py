"""Priors: learned on the simplex, or updated by the M-step from the training forwards since the last (Eq. 11)."""

import copy
import warnings

import pytest
import torch
from recompute import (
    GAUSSIAN,
    KEY_MASK,
    MASKS,
    MIXTURES,
    both_masks,
    expected_output,
    expected_responsibilities,
    log_prior_and_variance,
    make,
    padding_mask,
    project,
    shifted,
    tokens,
)
from torch.utils.checkpoint import checkpoint

import mgk
from mgk.nn import EMPrior, LearnedPrior, MixtureAttention, m_step_after, m_step_all
from support.versions import needs_fullgraph

H, M = 3, 2


def make_em(variant, *, num_mixtures=M, **options):
    return make(variant, num_mixtures=num_mixtures, prior=EMPrior(H, num_mixtures, **options))


def expected_counts(attn, x, *, key_mask=None, is_causal=False):
    """N_jr (B, H, M, S): by ``mgk.m_step``, or for the linear family from the responsibilities written out."""
    if attn.is_linear:
        return expected_responsibilities(attn, x, key_mask=key_mask, is_causal=is_causal).sum(2)
    query, keys, _ = project(attn, x)
    log_prior, variance = log_prior_and_variance(attn)
    options = {"attn_mask": both_masks(None, key_mask), "is_causal": is_causal, "query_mask": key_mask}
    return mgk.m_step(
        query, shifted(attn, keys), log_prior, variance=variance, e_step=attn.e_step, **options
    ).counts.detach()


def shared(counts):
    """pi_r (H, M, 1) = sum_j N_jr / sum_j N_j, over the batch and the positions."""
    total = counts.sum((0, 3))
    return (total / total.sum(1, keepdim=True)).unsqueeze(-1)


@pytest.mark.parametrize("num_mixtures", [1, 2, 3], ids=lambda m: f"M{m}")
def test_a_learned_prior_starts_uniform(num_mixtures):
    pi = LearnedPrior(4, num_mixtures)(9).exp()
    torch.testing.assert_close(pi, torch.full((1, 4, num_mixtures, 1), 1 / num_mixtures))


@pytest.mark.parametrize("variant", MIXTURES)
def test_a_learned_prior_stays_on_the_simplex_while_sgd_moves_it(variant):
    attn = MixtureAttention(12, H, variant=variant)
    optimizer = torch.optim.SGD(attn.prior.parameters(), lr=50.0)
    for _ in range(5):
        optimizer.zero_grad()
        attn(tokens(2, 7, dtype=torch.float32)).square().sum().backward()
        optimizer.step()
    pi = attn.prior(7).exp()
    assert (pi - 0.5).abs().max() > 0.01
    assert (pi >= 0).all()
    torch.testing.assert_close(pi.sum(2), torch.ones(1, H, 1))


@pytest.mark.parametrize("masks", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("variant", MIXTURES)
def test_the_m_step_sets_counts_over_their_sum(variant, masks):
    attn = make_em(variant, num_mixtures=3)
    batches = [tokens(2, 7), tokens(2, 7)]
    counts = sum(expected_counts(attn, x, **masks) for x in batches)
    before = attn.prior.pi.clone()
    for x in batches:
        attn(x, **masks)
    assert torch.equal(attn.prior.pi, before)
    torch.testing.assert_close(attn.prior.counts, counts.sum((0, 3)).unsqueeze(-1))
    attn.m_step()
    torch.testing.assert_close(attn.prior.pi, shared(counts))
    assert not attn.prior.counts.any()
    assert (attn.prior.pi - before).abs().max() > 1e-3


@pytest.mark.parametrize("masks", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("variant", MIXTURES)
def test_counts_are_the_admitted_pairs_of_real_tokens(variant, masks):
    attn = make_em(variant)
    attn(tokens(2, 7), **masks)
    pairs = {"none": 2 * 49, "key": 49 + 16, "causal": 2 * 28, "key-causal": 28 + 10}
    name = next(name for name, value in MASKS.items() if value is masks)
    torch.testing.assert_close(
        attn.prior.counts.sum((1, 2)), torch.full((H,), float(pairs[name]), dtype=torch.float64)
    )


@pytest.mark.parametrize("variant", GAUSSIAN)
def test_pairs_that_an_attn_mask_excludes_do_not_count(variant):
    attn, x = make_em(variant), tokens(2, 7)
    allowed = torch.rand(2, 1, 7, 7) > 0.5
    gamma = expected_responsibilities(attn, x, attn_mask=allowed, key_mask=KEY_MASK)
    expected = gamma.sum((0, 2, 4)).unsqueeze(-1)
    attn(x, attn_mask=allowed, key_mask=KEY_MASK)
    torch.testing.assert_close(attn.prior.counts, expected)
    additive = torch.zeros(2, 1, 7, 7, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    attn(x, attn_mask=additive, key_mask=KEY_MASK)
    torch.testing.assert_close(attn.prior.counts, 2 * expected)


@pytest.mark.parametrize("variant", GAUSSIAN)
def test_a_hard_e_step_counts_the_nearest_component(variant):
    attn, x = make(variant, prior="em", e_step="hard"), tokens(2, 7)
    expected = shared(expected_counts(attn, x))
    attn(x)
    assert torch.equal(attn.prior.counts, attn.prior.counts.round())
    attn.m_step()
    torch.testing.assert_close(attn.prior.pi, expected)


@pytest.mark.parametrize("variant", MIXTURES)
def test_several_forwards_count_as_one_bigger_batch(variant):
    attn, x = make_em(variant), tokens(4, 7)
    attn(x)
    whole = attn.prior.counts.clone()
    attn.prior.counts.zero_()
    for part in x.split([1, 3]):
        attn(part)
    torch.testing.assert_close(attn.prior.counts, whole)


@pytest.mark.parametrize("variant", MIXTURES)
def test_a_training_forward_uses_the_prior_as_it_stood_before_it(variant):
    attn, x = make_em(variant), tokens(2, 7)
    expected = expected_output(attn, x)
    for _ in range(2):  # the second time with statistics waiting for the M-step
        torch.testing.assert_close(attn(x), expected)
    attn.m_step()
    assert (attn(x) - expected).abs().max() > 1e-4
    torch.testing.assert_close(attn(x), expected_output(attn, x))


@pytest.mark.parametrize("variant", MIXTURES)
def test_a_backward_after_the_m_step_has_the_gradients_of_its_forward(variant):
    attn, x = make_em(variant), tokens(2, 7)
    expected = torch.autograd.grad(attn(x).square().sum(), list(attn.parameters()))
    out = attn(x)
    attn.m_step()
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), list(attn.parameters())), expected)


@pytest.mark.parametrize("variant", MIXTURES)
def test_momentum_keeps_a_part_of_the_old_prior(variant):
    attn, x = make_em(variant, momentum=0.75), tokens(2, 7)
    expected = 0.75 * attn.prior.pi + 0.25 * shared(expected_counts(attn, x))
    attn(x)
    attn.m_step()
    torch.testing.assert_close(attn.prior.pi, expected)


@pytest.mark.parametrize("masks", MASKS.values(), ids=list(MASKS))
@pytest.mark.parametrize("variant", MIXTURES)
def test_a_table_gives_each_position_its_own_prior(variant, masks):
    attn, x = make_em(variant, max_positions=9), tokens(2, 7)
    before = attn.prior.pi.clone()
    used = make(variant, prior=EMPrior(H, M, max_positions=7))
    used.load_state_dict(
        attn.state_dict() | {f"prior.{name}": getattr(attn.prior, name)[..., :7] for name in ("pi", "counts")}
    )
    torch.testing.assert_close(attn(x, **masks), expected_output(used, x, **masks))
    counts = expected_counts(used, x, **masks).sum(0)
    attn.m_step()
    torch.testing.assert_close(attn.prior.pi[..., :7], counts / counts.sum(1, keepdim=True))
    assert torch.equal(attn.prior.pi[..., 7:], before[..., 7:])  # positions that no forward reached


@pytest.mark.parametrize("variant", MIXTURES)
def test_a_position_whose_keys_are_all_padding_keeps_its_prior(variant):
    attn = make_em(variant, max_positions=7)
    before = attn.prior.pi.clone()
    attn(tokens(2, 7), key_mask=padding_mask(5, 5, total=7))
    attn.m_step()
    assert torch.equal(attn.prior.pi[..., 5:], before[..., 5:])
    assert not torch.equal(attn.prior.pi[..., :5], before[..., :5])


@pytest.mark.parametrize("variant", MIXTURES)
def test_a_table_follows_the_positions_of_a_cache_and_ends_with_an_error(variant):
    attn, x = make_em(variant, max_positions=7), tokens(2, 8)
    whole, cache = attn(x[:, :7], is_causal=True), attn.new_cache()
    parts = [attn(part, is_causal=True, cache=cache) for part in x[:, :7].split([3, 4], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    with pytest.raises(ValueError, match="max_positions=7 positions, got 8 keys"):
        attn(x)
    with pytest.raises(ValueError, match="max_positions=7 positions, got 8 keys"):
        attn(x[:, 7:], is_causal=True, cache=cache)
    assert cache.length == 7


@pytest.mark.parametrize("variant", MIXTURES)
def test_forwards_in_eval_mode_or_with_a_cache_do_not_count(variant):
    attn, x = make_em(variant), tokens(2, 7)
    attn(x, is_causal=True, cache=attn.new_cache())
    attn.eval()
    attn(x)
    assert not attn.prior.counts.any()
    before = attn.prior.pi.clone()
    attn.m_step()
    assert torch.equal(attn.prior.pi, before)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("variant", MIXTURES)
def test_recomputation_in_checkpointing_counts_once(variant, use_reentrant):
    options = {"variance": "em"} if variant in GAUSSIAN else {}
    attn, x = make(variant, prior="em", **options), tokens(2, 7).requires_grad_()
    attn(x)
    once = {name: value.clone() for name, value in attn.named_buffers()}
    for name in ("counts", "distances"):
        for part in (attn.prior, attn.variance):
            getattr(part, name, torch.zeros(())).zero_()
    checkpoint(attn, x, use_reentrant=use_reentrant).square().sum().backward()
    for name, value in attn.named_buffers():
        assert torch.equal(value, once[name]), name
    attn(x)  # after the backward, counting goes on
    torch.testing.assert_close(attn.prior.counts, 2 * once["prior.counts"])


@pytest.mark.parametrize("variant", MIXTURES)
def test_an_m_step_without_em_does_nothing(variant):
    attn = make(variant)
    before = {name: value.clone() for name, value in attn.state_dict().items()}
    attn(tokens(2, 7))
    attn.m_step()
    assert all(torch.equal(value, before[name]) for name, value in attn.state_dict().items())


def test_m_step_all_reaches_every_module_of_a_model_once():
    model = torch.nn.Sequential(
        make("mgk", prior="em"),
        torch.nn.Linear(12, 12).double(),
        make("smgk", prior="em", variance="em"),
        make("mlk"),
    )
    model.append(model[0])  # shared: counted twice, but one M-step
    model(tokens(2, 7))
    expected = model[0].prior.counts / model[0].prior.counts.sum(1, keepdim=True)
    m_step_all(model)
    torch.testing.assert_close(model[0].prior.pi, expected)
    assert not model[2].prior.counts.any()
    assert not model[2].variance.counts.any()


def test_training_with_em_moves_the_prior_towards_the_component_that_is_used():
    attn = MixtureAttention(12, H, prior="em")
    with torch.no_grad():  # component 1 lies far away from every query
        attn.k_proj.bias.view(H, M, 4)[:, 1] = 30.0
    attn(tokens(2, 7, dtype=torch.float32))
    attn.m_step()
    torch.testing.assert_close(attn.prior.pi.squeeze(-1), torch.tensor([[1.0, 0.0]] * H))
    out = attn(tokens(2, 7, dtype=torch.float32))
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in attn.parameters())


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=needs_fullgraph)])
@pytest.mark.parametrize(
    ("variant", "options"), [("mgk", {"prior": "em"}), ("smgk", {"variance": "em"}), ("mlk", {"prior": "em"})]
)
def test_a_forgotten_m_step_is_said_once(variant, options, is_compiled, monkeypatch):
    monkeypatch.setattr("mgk.nn.em.PATIENCE", 3)
    attn, x = MixtureAttention(12, 3, variant=variant, **options), torch.randn(2, 4, 12)
    if is_compiled:
        attn.compile(backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # of torch's compiler
        for _ in range(9):  # gradient accumulation within patience, and evaluation, say nothing
            attn(x)
            attn(x)
            attn.m_step()
            attn.eval()(x)
            attn.train()
        assert not said
        for _ in range(9):
            attn(x)
    assert len(said) == 1
    assert "3 training forwards without m_step()" in str(said[0].message)


def test_the_m_step_can_follow_every_optimizer_step():
    attn, x = MixtureAttention(12, 3, prior="em", variance="em"), torch.randn(2, 4, 12)
    by_hand = copy.deepcopy(attn)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (attn, by_hand)]
    handle = m_step_after(optimizers[0], attn)
    for _ in range(3):
        for module, optimizer in zip((attn, by_hand), optimizers, strict=True):
            module(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        by_hand.m_step()
    for name, value in attn.state_dict().items():
        assert torch.equal(value, by_hand.state_dict()[name]), name
    assert (attn.prior.pi != 0.5).any()
    handle.remove()
    before = attn.prior.pi.clone()
    attn(x).sum().backward()
    optimizers[0].step()
    assert torch.equal(attn.prior.pi, before)
