"""Ring attention over 2 and 4 gloo ranks: outputs and gradients of one process with the whole sequence."""

import itertools

import pytest
import torch
from torch import distributed, multiprocessing

import mgk
from mgk.parallel import gather_sequence, ring_attention, shard_sequence
from mgk.training.distributed import hard_exit

LENGTH, HEADS, GROUP = 24, 2, 2
# keys of a head and whether they are shifted, the options, and the shape of prior and variance
VARIANTS = {
    "softmax": (1, False, {"kernel": "dot"}),
    "mgk": (2, False, {}),
    "mgk hard": (2, False, {"e_step": "hard"}),
    "smgk": (3, True, {}),
    "smgk hard": (3, True, {"e_step": "hard"}),
}


def make(name, seed=0):
    """The whole sequence, the same on every rank."""
    mixtures, is_shifted, options = VARIANTS[name]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    x = {"query": normal(2, HEADS * GROUP, LENGTH, 4), "value": normal(2, HEADS, LENGTH, 3)}
    x["keys"] = normal(2, HEADS, LENGTH, 4) if is_shifted else normal(2, HEADS, mixtures, LENGTH, 4)
    if is_shifted:
        x["shifts"] = normal(HEADS, mixtures, 4)
        x["variance"] = normal(HEADS, mixtures).exp() if "e_step" not in options else normal(HEADS, 1).exp()
    elif name == "mgk":
        x["log_prior"] = normal(2, HEADS, mixtures, LENGTH).log_softmax(2)
        x["variance"] = normal(1, HEADS, mixtures, 1).exp()
    mask = torch.rand(2, LENGTH, generator=generator) > 0.3
    mask[0, : LENGTH // 2] = False  # whole parts without a key
    return x, normal(2, HEADS * GROUP, LENGTH, 3), mask, options


def truth(name, is_causal, with_mask):
    x, upstream, mask, options = make(name)
    leaves = {key: value.requires_grad_() for key, value in x.items()}
    given = dict(leaves)
    options = {**options, "is_causal": is_causal, "backend": "reference"}
    options["attn_mask"] = mask[:, None, None] if with_mask else None
    if "shifts" in given:
        out = mgk.shifted_mixture_attention(given.pop("query"), given.pop("keys"), **given, **options)
    else:
        out = mgk.mixture_attention(**given, **options)
    return out, dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), upstream), strict=True))


POSITIONS = {"query": 2, "value": 2, "log_prior": 3}


def run(name, is_causal, with_mask):
    x, upstream, mask, options = make(name)

    def shard(key, tensor):
        dim = tensor.ndim - 2 if key == "keys" else POSITIONS.get(key)
        return tensor if dim is None else shard_sequence(tensor, dim, zigzag=is_causal)

    leaves = {key: shard(key, value).clone().requires_grad_() for key, value in x.items()}
    out = ring_attention(
        **leaves,
        **options,
        is_causal=is_causal,
        key_mask=shard_sequence(mask, 1, zigzag=is_causal) if with_mask else None,
    )
    part = shard_sequence(upstream, zigzag=is_causal)
    grads = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), part), strict=True))
    whole = {}
    for key, grad in grads.items():
        dim = grad.ndim - 2 if key == "keys" else POSITIONS.get(key)
        if dim is None:  # the same parameter on every rank
            distributed.all_reduce(grad)
            whole[key] = grad
        else:
            whole[key] = gather_sequence(grad, dim, zigzag=is_causal)
    return gather_sequence(out.detach(), zigzag=is_causal), whole


CASES = list(itertools.product(VARIANTS, (False, True), (False, True)))


def work(rank, ranks, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=ranks)
    results = [run(*case) for case in CASES]
    half = distributed.new_group(list(range(ranks // 2)))  # rings of some of the processes
    if rank < ranks // 2:
        x, _, _, _ = make("mgk")
        parts = {
            key: shard_sequence(x[key], dim, group=half)
            for key, dim in (("query", 2), ("keys", 3), ("value", 2))
        }
        out = ring_attention(**parts, is_causal=True, group=half)
        results.append(gather_sequence(out, group=half))
    if rank == 0:
        torch.save(results, f"{folder}/results")
    distributed.destroy_process_group()
    hard_exit(0)  # gloo's threads abort an interpreter that finalizes


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_equals_one_process(ranks, tmp_path):
    multiprocessing.spawn(work, (ranks, str(tmp_path)), nprocs=ranks)
    *results, of_half = torch.load(tmp_path / "results")
    for case, (out, grads) in zip(CASES, results, strict=True):
        expected, expected_grads = truth(*case)
        torch.testing.assert_close(
            out, expected.detach(), atol=1e-5, rtol=1e-5, msg=lambda m, c=case: f"{c}: {m}"
        )
        for name, grad in expected_grads.items():
            torch.testing.assert_close(
                grads[name], grad, atol=1e-5, rtol=1e-4, msg=lambda m, c=case, n=name: f"{c} {n}: {m}"
            )
    x, _, _, _ = make("mgk")
    whole = mgk.mixture_attention(x["query"], x["keys"], x["value"], is_causal=True)
    torch.testing.assert_close(of_half, whole, atol=1e-5, rtol=1e-5)


def test_one_process_is_a_ring_of_one():
    x, _, mask, _ = make("smgk")
    out = ring_attention(**x, key_mask=mask, is_causal=True)
    given = dict(x)
    expected = mgk.shifted_mixture_attention(
        given.pop("query"), given.pop("keys"), **given, attn_mask=mask[:, None, None], is_causal=True
    )
    torch.testing.assert_close(out, expected)
    assert torch.equal(gather_sequence(shard_sequence(x["query"])), x["query"])


def test_what_a_ring_does_not_have_raises():
    x, _, mask, _ = make("mgk")
    for options in ({"window": 3}, {"segment_ids": mask.long()}, {"dropout_p": 0.1}, {"attn_mask": mask}):
        with pytest.raises(TypeError, match=next(iter(options))):
            ring_attention(**x, **options)
    with pytest.raises(TypeError, match="key_mask must have one of the dtypes bool"):
        ring_attention(**x, key_mask=mask.float())
    with pytest.raises(ValueError, match="dimension 2 of x must be a multiple of 2 for 1 ranks, got 23"):
        shard_sequence(x["query"][:, :, 1:])
