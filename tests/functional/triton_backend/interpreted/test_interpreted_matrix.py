"""The option matrix that every backend passes, in float32: output, lse and all gradients against float64.

Grouped heads, windows, segments and the log-sum-exp rotate through it. By default every 29th call; with
MGK_TRITON=all, as ``make triton`` sets it, all of them.
"""

import itertools
import os

import pytest
import torch

import mgk
from support.cases import FUNCTIONS, OPTIONS, SIZES, largest_errors, make_case

STEP = 1 if os.environ.get("MGK_TRITON") == "all" else 29
# in place of (2, 3): a head, or an example, costs as much as another
MATRIX_SIZES = [(2, 1, 13, 17, 5, 4, 2), (1, 2, 13, 17, 5, 4, 3)]
EXTRAS = [
    {},
    {"group": 2},
    {"window": (4, 2), "return_lse": True},
    {"segments": 3},
    {"group": 3, "return_lse": True},
    {"window": 3, "segments": 2, "group": 2},
    {"return_lse": True},
]
CALLS = [
    pytest.param(
        *option.values,
        e_step,
        EXTRAS[number % len(EXTRAS)] | {"sizes": MATRIX_SIZES[number // 2 % 2]},
        id=f"{option.id}-{e_step}-{number}",
    )
    for number, (option, e_step) in enumerate(itertools.product(OPTIONS, ("soft", "hard")))
]


def assert_agrees(case, limit=2e-5):
    case.tensors = {n: x.float().double() if x.is_floating_point() else x for n, x in case.tensors.items()}
    errors = largest_errors(case.run("triton", torch.float32), case.run("reference"))
    assert max(errors.values()) < limit, errors


@pytest.mark.parametrize(
    ("function", "kernel", "prior", "variance", "mask", "is_causal", "e_step", "extra"), CALLS[::STEP]
)
def test_options(function, kernel, prior, variance, mask, is_causal, e_step, extra):
    options = {"kernel": kernel, "prior": prior, "variance": variance, "mask": mask, "e_step": e_step}
    assert_agrees(make_case(function, is_causal=is_causal, **options, **extra))


@pytest.mark.parametrize("sizes", SIZES if STEP == 1 else SIZES[:4], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_odd_sizes(function, sizes):
    assert_agrees(make_case(function, sizes=sizes, prior="component", is_causal=sizes[2] != 7))


@pytest.mark.parametrize("e_step", ["soft", "hard"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_query_of_a_cache(function, e_step):
    extra = {"group": 2, "window": (50, None), "return_lse": True, "mask": "key"}
    case = make_case(function, sizes=(2, 2, 1, 90, 8, 6, 3), prior="component", e_step=e_step, **extra)
    attend = mgk.mixture_attention if function == "mixture" else mgk.shifted_mixture_attention
    tensors = {n: x.float() if x.is_floating_point() else x for n, x in case.tensors.items() if n != "upstream"}
    results = [attend(**tensors, **case.options, backend=name) for name in ("triton", "reference")]
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


def poisoned(options, function, rows):
    """Output and gradients of some rows, with finite keys and with others that are not at position 70."""
    case = make_case(function, sizes=(1, 2, 90, 90, 4, 3, 2)).tensors
    tensors = {name: x.float() for name, x in case.items() if name != "upstream"}
    attend = mgk.mixture_attention if function == "mixture" else mgk.shifted_mixture_attention
    keys = "keys" if function == "mixture" else "key"
    for content in (None, torch.nan, torch.inf):
        leaves = {name: x.clone() for name, x in tensors.items()}
        if content is not None:
            leaves[keys][..., 70, 1], leaves["value"][:, 1, 75] = content, content
        for x in leaves.values():
            x.requires_grad_()
        out = attend(**leaves, **options, backend="triton")
        loss = out[:, :, rows].square().sum()
        yield [out[:, :, rows], *torch.autograd.grad(loss, list(leaves.values()))], out


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kind", ["causal", "window", "key mask", "pair mask"])
def test_keys_that_are_not_finite_reach_the_queries_that_see_them_alone(kind, function):
    alive = torch.arange(90) < 70
    rows, options = {
        "causal": (slice(0, 70), {"is_causal": True}),
        "window": (slice(85, 90), {"window": (5, 1)}),
        "key mask": (slice(None), {"attn_mask": alive[None, None, None]}),
        "pair mask": (
            slice(0, 60),
            {"attn_mask": (torch.rand(90, 90) > 0.4) & alive | (torch.arange(90) >= 60)[:, None]},
        ),
    }[kind]
    (truth, _), *others = poisoned(options, function, rows)
    for results, out in others:
        assert kind == "key mask" or out[:, 1, 80].isnan().all()
        for result, expected in zip(results, truth, strict=True):
            torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("scale", "offset"), [(10, 0), (10_000, 0), (1, 1000)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_large_and_offset_inputs(function, scale, offset):
    case = make_case(function, sizes=(1, 1, 70, 80, 8, 4, 2), prior="component", scale=scale, offset=offset)
    case.tensors = {n: x.float().double() for n, x in case.tensors.items()}
    result = case.run("triton", torch.float32)
    assert all(x.isfinite().all() for x in result.values())
    assert largest_errors(result, case.run("reference"))["output"] < 1e-5 * scale


@pytest.mark.parametrize("number", [torch.finfo(torch.float32).min, -1e300], ids=str)
@pytest.mark.parametrize("num_queries", [1, 9])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_lowest_number_is_a_number(function, num_queries, number):
    case = make_case(function, sizes=(1, 2, num_queries, 70, 8, 4, 2)).tensors
    attend = mgk.mixture_attention if function == "mixture" else mgk.shifted_mixture_attention
    tensors = {name: x.float() for name, x in case.items() if name != "upstream"}
    for shape in ((1, 70), (num_queries, 70)):
        mask = torch.full(shape, number, dtype=torch.float64)
        out = attend(**tensors, attn_mask=mask, backend="triton")
        torch.testing.assert_close(
            out, tensors["value"].mean(2, keepdim=True).expand_as(out), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize(
    ("function", "e_step", "kind"),
    [("mixture", "hard", "pair"), ("shifted", "hard", "pair"), ("shifted", "soft", "key")],
)
def test_beside_a_mask_that_swamps_the_scores_components_tie(function, e_step, kind):
    """As in the reference: 1e38 rounds scores away, also in float64."""
    case = make_case(function, sizes=(2, 2, 9, 70, 4, 4, 2), prior="component", e_step=e_step)
    mask = torch.full((1, 1, 1 if kind == "key" else 9, 70), -torch.inf)
    mask[..., -30:] = torch.finfo(torch.float32).min
    if kind == "pair":
        mask[:, :, 3] = torch.linspace(-1, 1, 70)
    result = case.run("triton", torch.float32, attn_mask=mask)
    errors = largest_errors(result, case.run("reference", torch.float32, attn_mask=mask.double()))
    assert max(errors.values()) < 1e-5, errors


def test_half_precision_priors_and_masks_are_added_in_float32():
    """A mask of 20 added in bfloat16 would err by 4%; weights and output are rounded to bfloat16."""
    case = make_case(sizes=(1, 2, 40, 60, 8, 8, 2), prior="position")
    tensors = {name: x.bfloat16() for name, x in case.tensors.items() if name != "upstream"}
    mask = (torch.randn(1, 1, 1, 60) * 20).bfloat16()
    out = mgk.mixture_attention(**tensors, attn_mask=mask, backend="triton")
    exact = {name: x.double() for name, x in tensors.items()}
    want = mgk.mixture_attention(**exact, attn_mask=mask.double(), backend="reference")
    assert (out.double() - want).abs().max() < 2**-7 * want.abs().max()
