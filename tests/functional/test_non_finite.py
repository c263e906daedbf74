"""NaN and Inf in keys and values: without effect where they are dead, NaN where a query sees them."""

import itertools

import pytest
import torch

import mgk
from mgk.functional.mixture.backends import cpu_kernels
from support.cases import BACKENDS, FUNCTIONS, make_case
from support.versions import needs_fullgraph

LENGTH, BAD = 90, 70  # more than a tile of the kernels, and a position inside the second
# NaNs with payload bits, as uninitialised memory holds them
PAYLOADS = torch.tensor([0x7FC00001, 0x7F800001, -1, 0x7FFFFFFF], dtype=torch.int32)
CONTENTS = [torch.nan, torch.inf, -torch.inf]


def poison(x: torch.Tensor, dim: int, content: float, start: int = BAD, stop: int = BAD + 1) -> torch.Tensor:
    x = x.clone()
    x.narrow(dim, start, stop - start).fill_(content)
    return x


def run(function, case, backend, rows=slice(None), **options):
    """The output, and the gradients of a sum over some of its rows."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in case.items() if name != "upstream"}
    attend = {
        "mixture": mgk.mixture_attention,
        "shifted": mgk.shifted_mixture_attention,
        "linear": mgk.linear_mixture_attention,
    }[function]
    out = attend(**leaves, **options, backend=backend)
    grads = torch.autograd.grad((out * case["upstream"])[:, :, rows].sum(), list(leaves.values()))
    return out, dict(zip(leaves, grads, strict=True))


CALLS = [(function, name) for function, name in itertools.product(FUNCTIONS, BACKENDS)]
CALLS += [("linear", "blockwise"), ("linear", "reference")]


def inputs(function):
    case = make_case(
        "shifted" if function == "shifted" else "mixture", sizes=(2, 2, LENGTH, LENGTH, 4, 3, 2)
    ).tensors
    return case, "key" if function == "shifted" else "keys", 2 if function == "shifted" else 3


@pytest.mark.parametrize("content", CONTENTS, ids=str)
@pytest.mark.parametrize(("function", "backend"), CALLS)
def test_masked_keys_and_values_touch_nothing(function, backend, content):
    case, key, dim = inputs(function)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[:, BAD:] = False
    masks = [{"key_mask": mask}]
    if function != "linear":
        pairs = torch.rand(2, 1, LENGTH, LENGTH) > 0.5
        additive = torch.zeros(2, 1, 1, LENGTH).masked_fill(~mask[:, None, None], -torch.inf)
        masks = [{"attn_mask": mask[:, None, None]}, {"attn_mask": mask[:, None, None] & pairs}]
        masks.append({"attn_mask": additive})
    for options, is_causal in itertools.product(masks, (False, True)):
        options = options | {"is_causal": is_causal}
        out, grads = run(function, case, backend, **options)
        dirty = case | {
            key: poison(case[key], dim, content, BAD, LENGTH),
            "value": poison(case["value"], 2, content, BAD, LENGTH),
        }
        dirty_out, dirty_grads = run(function, dirty, backend, **options)
        torch.testing.assert_close(dirty_out, out, atol=1e-12, rtol=0)
        for name, grad in grads.items():
            torch.testing.assert_close(dirty_grads[name], grad, atol=1e-12, rtol=0, msg=name)


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize(("function", "backend"), CALLS)
def test_a_later_key_touches_no_earlier_query(function, backend, where):
    case, key, dim = inputs(function)
    dirty = dict(case)
    name, at = (key, dim) if where == "key" else ("value", 2)
    dirty[name] = poison(case[name], at, torch.nan)
    out, grads = run(function, case, backend, slice(0, BAD), is_causal=True)
    dirty_out, dirty_grads = run(function, dirty, backend, slice(0, BAD), is_causal=True)
    torch.testing.assert_close(dirty_out[:, :, :BAD], out[:, :, :BAD], atol=1e-10, rtol=0)
    assert dirty_out[:, :, BAD:].isnan().all()  # they see it
    for other, grad in grads.items():
        torch.testing.assert_close(dirty_grads[other], grad, atol=1e-10, rtol=0, msg=other)


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("content", [1e25, torch.finfo(torch.float32).max, torch.nan], ids=str)
@pytest.mark.parametrize(("function", "backend"), CALLS)
def test_dead_numbers_that_overflow_in_products_touch_nothing(function, backend, content, where):
    case, key, dim = inputs(function)
    case = {name: x.float() for name, x in case.items()}
    alive = torch.arange(LENGTH).expand(2, -1) < BAD
    ids = (torch.arange(LENGTH) >= BAD).long().expand(2, -1)
    key_mask = {"key_mask": alive} if function == "linear" else {"attn_mask": alive[:, None, None]}
    rows = slice(0, BAD)  # which do not see the later keys
    dead = [(key_mask, slice(None)), ({"is_causal": True}, rows), ({"segment_ids": ids}, rows)]
    if function != "linear":
        dead.append(({"window": (5, 0)}, rows))
    name, at = (key, dim) if where == "key" else ("value", 2)
    dirty = case | {name: poison(case[name], at, content, BAD, LENGTH)}
    for options, rows in dead:
        out, grads = run(function, case, backend, rows, **options)
        dirty_out, dirty_grads = run(function, dirty, backend, rows, **options)
        torch.testing.assert_close(dirty_out[:, :, rows], out[:, :, rows], atol=1e-5, rtol=0)
        for other, grad in grads.items():
            torch.testing.assert_close(dirty_grads[other], grad, atol=1e-4, rtol=0, msg=f"{other} {options}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_pair_mask_shields_the_queries_that_it_excludes(function, backend):
    case, key, dim = inputs(function)
    mask = torch.rand(2, 1, LENGTH, LENGTH) > 0.5
    dirty = case | {key: poison(case[key], dim, torch.nan)}
    out, _ = run(function, case, backend, attn_mask=mask)
    dirty_out, _ = run(function, dirty, backend, attn_mask=mask)
    sees = mask[..., BAD].expand(2, 2, -1)
    assert dirty_out[sees].isnan().all()
    torch.testing.assert_close(dirty_out[~sees], out[~sees], atol=1e-10, rtol=0)


@pytest.mark.parametrize("payload", range(len(PAYLOADS)))
@pytest.mark.parametrize("where", ["query", "keys", "value"])
@pytest.mark.parametrize("e_step", ["soft", "hard"])
def test_a_live_nan_shows_in_every_instruction_set(where, payload, e_step, monkeypatch):
    if "cpu" not in BACKENDS:
        pytest.skip("the kernels are not built")
    content = PAYLOADS.view(torch.float32)[payload]
    x = {name: x.float() for name, x in inputs("mixture")[0].items() if name != "upstream"}
    index = {"query": (0, 0, 5), "keys": (0, 0, 1, 5), "value": (0, 0, 5)}[where]
    x[where][index] = content
    for name in cpu_kernels.supported_instruction_sets():
        monkeypatch.setattr(cpu_kernels, "instruction_set", lambda name=name: name)
        for length in (LENGTH, 1):  # one query: decoding
            query = x["query"][:, :, 5 : 5 + length] if length == 1 else x["query"]
            out = mgk.mixture_attention(query, x["keys"], x["value"], e_step=e_step, backend="cpu")
            expected = mgk.mixture_attention(query, x["keys"], x["value"], e_step=e_step, backend="eager")
            assert not expected[0, 0].isfinite().all()
            assert (out.isfinite() == expected.isfinite()).all(), name


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.float32])
def test_decoding_skips_what_masked_cache_entries_hold(function, mask_dtype):
    case, key, _ = inputs(function)
    case = {name: x.float() for name, x in case.items() if name != "upstream"}
    case["query"] = case["query"][:, :, :1]
    alive = torch.rand(2, 1, 1, LENGTH) > 0.5
    mask = alive if mask_dtype == torch.bool else torch.zeros(alive.shape).masked_fill(~alive, -torch.inf)
    attend = mgk.mixture_attention if function == "mixture" else mgk.shifted_mixture_attention
    dead = ~alive[:, :, 0, :, None]
    for backend in BACKENDS:
        expected = attend(**case, attn_mask=mask, backend=backend)
        dirty = case | {
            key: case[key].masked_fill(dead.unsqueeze(2) if function == "mixture" else dead, torch.nan),
            "value": case["value"].masked_fill(dead, torch.inf),
        }
        torch.testing.assert_close(attend(**dirty, attn_mask=mask, backend=backend), expected)


def test_the_linear_state_shows_a_live_nan_and_no_dead_one():
    case, _, _ = inputs("linear")
    query, keys, value = case["query"], case["keys"], poison(case["value"], 2, torch.nan)
    for is_causal in (False, True):
        options = {"is_causal": is_causal, "return_state": True}
        _, state = mgk.linear_mixture_attention(query, keys, value, **options)
        assert state.numerator.isnan().any()
        mask = torch.arange(LENGTH).expand(2, -1) != BAD
        _, state = mgk.linear_mixture_attention(query, keys, value, key_mask=mask, **options)
        assert all(x.isfinite().all() for x in state)


@pytest.mark.parametrize("is_causal", [False, True])
def test_weights_responsibilities_and_statistics(is_causal):
    case, _, _ = inputs("mixture")
    mask = torch.arange(LENGTH) < BAD
    dirty = poison(case["keys"], 3, torch.nan, BAD, LENGTH)
    options = {"attn_mask": mask[None, :], "is_causal": is_causal}
    for function in (mgk.mixture_weights, mgk.responsibilities):
        expected = function(case["query"], case["keys"], **options)
        torch.testing.assert_close(function(case["query"], dirty, **options), expected)
    expected, result = (mgk.m_step(case["query"], keys, **options) for keys in (case["keys"], dirty))
    torch.testing.assert_close(result.counts, expected.counts)
    torch.testing.assert_close(result.variance, expected.variance)
    linear = {"key_mask": mask.expand(2, -1), "is_causal": is_causal}
    expected = mgk.linear_mixture_weights(case["query"], case["keys"], **linear)
    torch.testing.assert_close(mgk.linear_mixture_weights(case["query"], dirty, **linear), expected)


@needs_fullgraph
def test_the_compiled_form_shields_too():
    torch._dynamo.reset()
    case, _, _ = inputs("mixture")
    function = torch.compile(
        lambda q, k, v: mgk.mixture_attention(q, k, v, is_causal=True), fullgraph=True, backend="aot_eager"
    )
    dirty = poison(case["keys"], 3, torch.nan)
    out = function(case["query"], dirty, case["value"])
    expected = mgk.mixture_attention(case["query"], case["keys"], case["value"], is_causal=True)
    torch.testing.assert_close(out[:, :, :BAD], expected[:, :, :BAD])
    assert out[:, :, BAD:].isnan().all()


@needs_fullgraph
@pytest.mark.parametrize("options", [{}, {"window": (5, 0)}], ids=str)
def test_the_compiled_form_shields_from_masked_numbers_that_overflow(options):
    torch._dynamo.reset()
    case = {name: x.float() for name, x in inputs("mixture")[0].items()}
    mask = (torch.arange(LENGTH) < BAD)[None, None, None]
    options = options | {"attn_mask": mask}
    dirty = {"keys": poison(case["keys"], 3, 1e30, BAD, LENGTH)}
    dirty |= {"value": poison(case["value"], 2, torch.finfo(torch.float32).max, BAD, LENGTH)}
    expected = run("mixture", case, "auto", **options)
    compiled = torch.compile(mgk.mixture_attention, fullgraph=True, backend="aot_eager")
    leaves = {name: x.requires_grad_() for name, x in (case | dirty).items() if name != "upstream"}
    out = compiled(**leaves, **options)
    grads = torch.autograd.grad((out * case["upstream"]).sum(), list(leaves.values()))
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(dict(zip(leaves, grads, strict=True)), expected[1], atol=1e-5, rtol=1e-5)
