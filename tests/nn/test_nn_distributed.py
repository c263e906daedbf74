"""Two ranks, each with half of the batch, end where one process with the whole batch ends."""

import contextlib
from functools import partial

import pytest
import torch
from recompute import make, padding_mask, tokens
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

from mgk.nn import m_step_all
from mgk.training.distributed import hard_exit

RANKS, LENGTH, STEPS, MICRO_BATCHES = 2, 7, 2, 3
VARIANTS = {"mgk": {"variance": "em"}, "smgk": {"variance": "em"}, "mlk": {}}
# the first rank has far fewer real tokens: ranks must be summed, not averaged
KEY_MASK = padding_mask(2, 3, 7, 6, total=LENGTH)


def make_model():
    """The same on every rank."""
    torch.manual_seed(7)
    return torch.nn.ModuleDict({name: make(name, prior="em", **options) for name, options in VARIANTS.items()})


def whole_batches(number):
    return tokens(number, 4, LENGTH)


def statistics_of_one_step(model, part):
    """One training forward of each module on a part of the batch, and the M-step."""
    (x,) = whole_batches(1)
    for attn in model.values():
        attn(x[part], key_mask=KEY_MASK[part], is_causal=True)
    m_step_all(model)
    return model.state_dict()


def train(model, part, wrap=None, *, accumulates_unsynced=False):
    """SGD with gradient accumulation and an M-step for each optimizer step."""
    attn = model["mgk"]
    forward = attn if wrap is None else wrap(attn)
    optimizer = torch.optim.SGD(attn.parameters(), lr=0.5)
    for *early, last in whole_batches(STEPS * MICRO_BATCHES).split(MICRO_BATCHES):
        with forward.no_sync() if accumulates_unsynced else contextlib.nullcontext():
            for x in early:
                forward(x[part], is_causal=True).square().mean().backward()
        forward(last[part], is_causal=True).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        attn.m_step()
    return attn.state_dict()


def work(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=RANKS)
    part = slice(2 * rank, 2 * rank + 2)
    results = {
        "one step": statistics_of_one_step(make_model(), part),
        "training": train(make_model(), part, DistributedDataParallel, accumulates_unsynced=True),
        "training in sync": train(
            make_model(), part, partial(DistributedDataParallel, broadcast_buffers=False)
        ),
    }
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()
    hard_exit(0)  # DistributedDataParallel keeps gloo's threads, which abort an interpreter that finalizes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(work, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


@pytest.mark.parametrize("run", ["one step", "training", "training in sync"])
def test_two_ranks_agree_with_one_process(ranks, run):
    everything = slice(None)
    start = make_model().state_dict() if run == "one step" else make_model()["mgk"].state_dict()
    expected = (
        statistics_of_one_step(make_model(), everything)
        if run == "one step"
        else train(make_model(), everything)
    )
    for name, value in expected.items():
        for state in ranks:
            torch.testing.assert_close(state[run][name], value, msg=lambda m, n=name: f"{n}: {m}")
        if name.endswith(("pi", "sigma2")):
            assert (value - start[name]).abs().max() > 1e-3
