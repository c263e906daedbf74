"""Grouped heads, windows, segments and the log-sum-exp against plain equations; every backend with the reference."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mgk
from mgk.functional.masks import KeyRange, segment_bounds
from support.cases import BACKENDS, FUNCTIONS, Case, largest_errors, make_case
from support.versions import needs_fullgraph

OTHERS = tuple(name for name in BACKENDS if name != "reference")
F64 = torch.float64


def pairs_seen(num_queries, num_keys, window=None, is_causal=False, segment_ids=None):
    """The pairs that the contract admits, one at a time: bool (B or 1, 1, L, S)."""
    ids = [[0] * num_keys] if segment_ids is None else segment_ids.tolist()
    left, right = window if isinstance(window, tuple) else (window, window)
    seen = torch.zeros(len(ids), 1, num_queries, num_keys, dtype=torch.bool)
    for b, i, j in itertools.product(range(len(ids)), range(num_queries), range(num_keys)):
        p = i + num_keys - num_queries
        seen[b, 0, i, j] = (
            (left is None or j >= p - left)
            and (right is None or j <= p + right)
            and (not is_causal or j <= p)
            and (segment_ids is None or len(set(ids[b][min(p, j) : max(p, j) + 1])) == 1)
        )
    return seen


def with_mask(case: Case, seen: torch.Tensor) -> Case:
    """The same call with a mask of pairs in place of window, segments and causality."""
    tensors = {name: x for name, x in case.tensors.items() if name != "segment_ids"}
    options = {name: x for name, x in case.options.items() if name not in ("window", "is_causal")}
    mask = tensors.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        seen = mask.masked_fill(~seen, -torch.inf)
    elif mask is not None:
        seen = seen & mask
    return Case(case.function, {**tensors, "attn_mask": seen}, options)


def error(result, truth):
    return max(largest_errors({k: result[k] for k in truth}, truth).values())


WINDOWS = [0, 3, (2, None), (None, 1), (1, 2), (0, 5), (40, 40), (None, None)]


@pytest.mark.parametrize("sizes", [(13, 17), (17, 13), (9, 9), (1, 9)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_window_equals_its_mask_in_the_reference(window, is_causal, sizes):
    case = make_case(sizes=(2, 2, *sizes, 4, 3, 2), prior="position", is_causal=is_causal, window=window)
    plain = with_mask(case, pairs_seen(*sizes, window, is_causal))
    truth = plain.run("reference")
    truth.pop("attn_mask", None)
    assert error(case.run("reference"), truth) < 1e-12


@pytest.mark.parametrize("length", [1, 7, 13], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_segments_equal_separate_calls(is_causal, length):
    case = make_case(sizes=(1, 2, 13, 13, 4, 3, 2), prior="position", variance="position", is_causal=is_causal)
    ids = torch.tensor(
        [[5, 5, 5, 0, 0, 5, 2, 2, 2, 2, 2, -1, -1]], dtype=torch.int32
    )  # 5 comes back: another segment
    x = case.tensors
    options = {"is_causal": is_causal}
    query = x["query"][:, :, 13 - length :]
    out, lse = mgk.mixture_attention(
        query,
        x["keys"],
        x["value"],
        x["log_prior"],
        variance=x["variance"],
        segment_ids=ids,
        return_lse=True,
        **options,
    )
    for start, stop in ((0, 3), (3, 5), (5, 6), (6, 11), (11, 13)):
        part, first = slice(start, stop), max(start, 13 - length)
        if first >= stop:
            continue
        alone = mgk.mixture_attention(
            x["query"][:, :, first:stop],
            x["keys"][:, :, :, part],
            x["value"][:, :, part],
            x["log_prior"][..., part],
            variance=x["variance"][..., part],
            return_lse=True,
            backend="reference",
            **options,
        )
        rows = slice(first - 13 + length, stop - 13 + length)
        torch.testing.assert_close((out[:, :, rows], lse[:, :, rows]), alone, atol=1e-12, rtol=0)


def test_segments_of_equal_ids_are_runs():
    bounds = segment_bounds(torch.tensor([[1, 1, 2, 1], [0, 0, 0, 0]]))
    assert bounds.tolist() == [[[0, 0, 2, 3], [0, 0, 0, 0]], [[2, 2, 3, 4], [4, 4, 4, 4]]]
    assert segment_bounds(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 2, 0)


@pytest.mark.parametrize("prior", [None, "head", "component", "position"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_grouped_heads_equal_repeated_keys(function, prior):
    case = make_case(function, prior=prior, variance="component", mask="pair", group=3)
    result = case.run("reference", return_lse=True)
    tensors = dict(case.tensors)
    for name, dim in {"keys": 1, "key": 1, "value": 1, "log_prior": 1, "variance": 1, "shifts": 0}.items():
        if name in tensors:
            tensors[name] = tensors[name].repeat_interleave(3, dim)
    truth = Case(function, tensors, case.options).run("reference", return_lse=True)
    for name, dim in {"keys": 1, "key": 1, "value": 1, "log_prior": 1, "variance": 1, "shifts": 0}.items():
        if name in truth:  # the gradient of a repeated tensor is a sum
            truth[name] = truth[name].unflatten(dim, (-1, 3)).sum(dim + 1)
    assert error(result, truth) < 1e-12


@pytest.mark.parametrize("e_step", ["soft", "hard"])
@pytest.mark.parametrize("kernel", ["gaussian", "dot"])
@pytest.mark.parametrize("prior", [None, "position"])
def test_the_lse_is_the_logarithm_of_the_sum(prior, kernel, e_step):
    case = make_case(prior=prior, variance="position", mask="float", kernel=kernel, e_step=e_step)
    x = case.tensors
    q, k, sigma2 = x["query"][:, :, None, :, None], x["keys"][:, :, :, None], x["variance"][:, :, :, None]
    e = (q * k).sum(-1) / sigma2 if kernel == "dot" else -(q - k).square().sum(-1) / (2 * sigma2)
    e = (e + x["attn_mask"]).exp()  # (B, H, M, L, S)
    if e_step == "hard":
        total = e.amax(2)
    else:
        total = (e * (0.5 if prior is None else x["log_prior"].exp()[:, :, :, None])).sum(2)
    result = case.run("reference", return_lse=True)
    torch.testing.assert_close(result["lse"], total.sum(-1).log(), atol=1e-12, rtol=0)


COMBINATIONS = [
    {"group": 2},
    {"window": 5},
    {"window": 5, "is_causal": True},
    {"window": (None, 4)},
    {"segments": 3},
    {"segments": 3, "is_causal": True},
    {"group": 3, "window": (9, 2), "segments": 4},
    {"group": 2, "window": 3, "segments": 4, "is_causal": True},
]


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda c: "-".join(f"{k}{v}" for k, v in c.items()))
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("backend", OTHERS)
def test_backends_agree_with_the_reference(backend, function, combination):
    for options, e_step in itertools.product(
        (
            {"prior": "component", "variance": "component"},
            {"prior": "position", "mask": "pair"},
            {"variance": "head", "mask": "key"},
        ),
        ("soft",) if backend == "sdpa" else ("soft", "hard"),
    ):
        for sizes in ((2, 2, 70, 131, 5, 4, 3), (1, 1, 33, 33, 9, 7, 2)):
            case = make_case(function, sizes=sizes, e_step=e_step, **options, **combination)
            for return_lse in (False,) if backend == "sdpa" else (False, True):
                result, truth = (case.run(name, return_lse=return_lse) for name in (backend, "reference"))
                assert error(result, truth) < 1e-9, (options, e_step, sizes, return_lse)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    function=st.sampled_from(FUNCTIONS),
    lengths=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    group=st.integers(1, 3),
    mixtures=st.integers(1, 3),
    ends=st.tuples(st.none() | st.integers(0, 80), st.none() | st.integers(0, 80)),
    is_causal=st.booleans(),
    segments=st.none() | st.integers(1, 5),
    mask=st.sampled_from([None, "key", "pair"]),
    prior=st.sampled_from([None, "component", "position"]),
    variance=st.sampled_from([None, "head", "component", "position"]),
    e_step=st.sampled_from(["soft", "hard"]),
    seed=st.integers(0, 100),
)
def test_combined_options_agree_with_masks_and_repeated_keys(
    function, lengths, group, mixtures, ends, is_causal, segments, mask, prior, variance, e_step, seed
):
    num_queries, num_keys = min(lengths) if segments else lengths[0], max(lengths) if segments else lengths[1]
    sizes = (2, 2, num_queries, num_keys, 3, 2, mixtures)
    options = {"mask": mask, "prior": prior, "variance": variance, "e_step": e_step, "is_causal": is_causal}
    case = make_case(function, sizes=sizes, group=group, segments=segments, window=ends, seed=seed, **options)
    seen = KeyRange(ends[0], 0 if is_causal else ends[1]).mask(num_queries, num_keys, torch.device("cpu"))
    if segments:
        bounds = KeyRange(segments=segment_bounds(case.tensors["segment_ids"]))
        seen = seen & bounds.mask(num_queries, num_keys, torch.device("cpu"))
    truth = with_mask(case, seen).run("reference", return_lse=True)
    for backend in BACKENDS:
        if backend != "sdpa":
            assert error(case.run(backend, return_lse=True), truth) < 1e-9, backend
        elif e_step == "soft":
            assert error(case.run(backend), case.run("reference")) < 1e-9, backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_query_with_no_key_left_has_lse_minus_infinity_and_no_gradient(backend):
    if backend == "sdpa":
        pytest.skip("it has no lse")
    case = make_case(mask="pair", prior="component", variance="component")
    case.tensors["attn_mask"][:, :, 3] = False
    result = case.run(backend, return_lse=True)
    assert (result["lse"][:, :, 3] == -torch.inf).all()
    assert not result["output"][:, :, 3].any()
    assert not result["query"][:, :, 3].any()
    assert all(x.isfinite().all() for name, x in result.items() if name != "lse")


@pytest.mark.parametrize("backend", OTHERS)
def test_float_masks_with_gradients_join_windows_and_groups(backend):
    case = make_case(mask="float", group=2, window=(4, 3), segments=3)
    if backend != "blockwise":
        with pytest.raises(ValueError, match="attn_mask") if backend != "eager" else torch.enable_grad():
            case.run(backend)
    if backend in ("blockwise", "eager"):
        assert error(case.run(backend), case.run("reference")) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [name for name in OTHERS if name != "sdpa"])
def test_the_lse_is_float32_beside_narrow_inputs(backend, dtype):
    case = make_case(group=2, window=3, sizes=(2, 2, 33, 33, 8, 4, 2))
    result, truth = case.run(backend, dtype, return_lse=True), case.run("reference", return_lse=True)
    tensors = {name: x.to(dtype) for name, x in case.tensors.items() if name in ("query", "keys", "value")}
    out, lse = mgk.mixture_attention(**tensors, window=3, return_lse=True, backend=backend)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert error({"lse": result["lse"]}, {"lse": truth["lse"]}) < (1e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize(
    "options", [{"group": 2}, {"window": 3}, {"segments": 3}, {"window": (2, 1), "group": 2}], ids=str
)
def test_weights_responsibilities_and_m_step_take_the_same_pairs(options):
    case = make_case(sizes=(2, 2, 19, 19, 4, 3, 2), prior="component", **options)
    x, more = case.tensors, {name: case.tensors[name] for name in ("segment_ids",) if name in case.tensors}
    more |= case.options
    weights = mgk.mixture_weights(x["query"], x["keys"], x["log_prior"], **more)
    out = mgk.mixture_attention(x["query"], x["keys"], x["value"], x["log_prior"], **more, backend="reference")
    group = options.get("group", 1)
    assert weights.shape == (2, 2 * group, 19, 19)
    torch.testing.assert_close(weights @ x["value"].repeat_interleave(group, 1), out)
    gamma = mgk.responsibilities(x["query"], x["keys"], x["log_prior"], **more)
    assert gamma.shape == (2, 2 * group, 19, 2, 19)
    torch.testing.assert_close(gamma.sum(3) > 0, weights > 0)
    step = mgk.m_step(x["query"], x["keys"], x["log_prior"], **more)
    counts = gamma.sum(2).unflatten(1, (2, group)).sum(2)
    torch.testing.assert_close(step.counts, counts)
    torch.testing.assert_close(step.prior, counts / counts.sum(2, keepdim=True))
    mean = torch.einsum(
        "bhglrs,bhgld->bhrsd", gamma.unflatten(1, (2, group)), x["query"].unflatten(1, (2, group))
    )
    torch.testing.assert_close(step.keys, mean / counts.unsqueeze(-1))


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_statistics_of_backends_agree(combination):
    from mgk.functional.mixture import em_statistics
    from support.cases import inputs_of

    for function, mask in itertools.product(FUNCTIONS, (None, "pair")):
        case = make_case(function, sizes=(2, 2, 70, 131, 5, 4, 3), prior="component", mask=mask, **combination)
        inputs = inputs_of(case)
        truth = em_statistics.moments(inputs, backend="reference")
        counts = [em_statistics.counts(inputs, backend=name) for name in BACKENDS if name != "sdpa"]
        for result in counts:
            torch.testing.assert_close(result, truth.counts, atol=1e-10, rtol=0)
        result = em_statistics.moments(inputs, backend="blockwise")
        torch.testing.assert_close(result, truth, atol=1e-9, rtol=0)


BAD = {
    "heads that do not divide": (
        {"query": torch.ones(1, 3, 4, 2)},
        ValueError,
        "query must have a multiple of the 2 heads",
    ),
    "a negative window": ({"window": -1}, ValueError, "window must be at least 0, got -1"),
    "a negative end": ({"window": (1, -2)}, ValueError, "window must be at least 0"),
    "a float window": ({"window": 1.5}, TypeError, "window must be an int or a pair"),
    "a bool window": ({"window": True}, TypeError, "window must be an int or a pair"),
    "three ends": ({"window": (1, 2, 3)}, ValueError, "window must be an int or a pair"),
    "float segments": (
        {"segment_ids": torch.zeros(1, 4)},
        TypeError,
        "segment_ids must have one of the dtypes",
    ),
    "segments of another length": (
        {"segment_ids": torch.zeros(1, 3, dtype=torch.int64)},
        ValueError,
        r"segment_ids must have shape \(B, S\)",
    ),
    "more queries than keys": (
        {"query": torch.ones(1, 2, 5, 2), "segment_ids": torch.zeros(1, 4, dtype=torch.int64)},
        ValueError,
        "segment_ids need no more queries than keys",
    ),
    "an lse of sdpa": ({"return_lse": True, "backend": "sdpa"}, ValueError, "log-sum-exp"),
    "a word": ({"return_lse": "yes"}, TypeError, "return_lse must be True or False"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_raise_by_name(name):
    arguments, kind, message = BAD[name]
    tensors = {
        "query": torch.ones(1, 4, 4, 2),
        "keys": torch.ones(1, 2, 2, 4, 2),
        "value": torch.ones(1, 2, 4, 3),
    }
    with pytest.raises(kind, match=message):
        mgk.mixture_attention(**{**tensors, **arguments})


@needs_fullgraph
@pytest.mark.parametrize("combination", COMBINATIONS[-1:], ids=str)
@pytest.mark.parametrize("backend", OTHERS)
def test_compiled_calls_equal_eager_ones(backend, combination):
    torch.compiler.reset()
    case = make_case("shifted", sizes=(1, 2, 40, 70, 4, 4, 2), prior="component", **combination)
    more = {name: case.tensors[name] for name in ("segment_ids",) if name in case.tensors}
    tensors = [case.tensors[name].float().requires_grad_() for name in ("query", "key", "shifts", "value")]

    def call(*tensors):
        out = mgk.shifted_mixture_attention(
            *tensors, **more, **case.options, return_lse=backend != "sdpa", backend=backend
        )
        return out if isinstance(out, torch.Tensor) else out[0].sum() + out[1].sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for function in (call, compiled):
        out = function(*tensors)
        results.append((out, *torch.autograd.grad(out.sum(), tensors)))
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_output_and_lse_together_is_exact(backend):
    if backend == "sdpa":
        pytest.skip("it has no lse")
    for function, e_step in itertools.product(FUNCTIONS, ("soft", "hard")):
        case = make_case(
            function, sizes=(1, 1, 5, 7, 2, 2, 2), group=2, window=(3, 1), e_step=e_step, segments=2
        )
        names = [name for name, x in case.tensors.items() if x.is_floating_point() and name != "upstream"]
        more = {"segment_ids": case.tensors["segment_ids"], "return_lse": True, "backend": backend}
        call = mgk.mixture_attention if function == "mixture" else mgk.shifted_mixture_attention

        def run(*tensors, names=names, call=call, case=case, more=more):
            return call(**dict(zip(names, tensors, strict=True)), **case.options, **more)

        assert torch.autograd.gradcheck(run, [case.tensors[name].requires_grad_() for name in names])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize(("options", "dead"), [({"window": 5}, 20), ({"window": (3, 0)}, 20), ({}, 5)], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_unseen_keys_hold_touches_no_output_and_no_gradient(backend, function, options, dead, bad):
    """The queries from 10 to 15 do not see the position ``dead``; segments end at 8."""
    case = make_case(function, sizes=(1, 2, 30, 30, 4, 3, 2), prior="component", group=2)
    if not options:
        case.tensors["segment_ids"] = torch.arange(30)[None] // 8
    rows = slice(10, 15)
    key = "keys" if function == "mixture" else "key"
    upstream = torch.zeros_like(case.tensors["upstream"])
    upstream[:, :, rows] = case.tensors["upstream"][:, :, rows]
    case.tensors["upstream"] = upstream
    truth = case.run(backend, **options)
    case.tensors[key][..., dead, :] = bad
    case.tensors["value"][:, :, dead] = bad
    result = case.run(backend, **options)
    result["output"], truth["output"] = (x["output"][:, :, rows] for x in (result, truth))
    assert all(x.isfinite().all() for x in result.values())
    assert error(result, truth) < 1e-10


@pytest.mark.parametrize("backend", ["eager", *(name for name in OTHERS if name in ("blockwise", "cpu"))])
def test_forward_mode_and_vmap_take_groups_ranges_and_the_lse(backend):
    case = make_case("shifted", sizes=(2, 2, 20, 40, 4, 3, 2), group=2, segments=3, window=(9, 2))
    names = ("query", "key", "shifts", "value")
    primals = tuple(case.tensors[name] for name in names)
    tangents = tuple(torch.randn_like(x) for x in primals)

    def call(*tensors, ids=case.tensors["segment_ids"], backend=backend):
        more = {"segment_ids": ids, "window": (9, 2), "return_lse": True, "backend": backend}
        return mgk.shifted_mixture_attention(*tensors, **more)

    expected = torch.func.jvp(lambda *x: call(*x, backend="reference"), primals, tangents)
    torch.testing.assert_close(torch.func.jvp(call, primals, tangents), expected, atol=1e-9, rtol=0)
    calls = torch.stack([primals[0], primals[0].flip(2), primals[0] * 2])
    ids = torch.stack(
        [
            case.tensors["segment_ids"],
            case.tensors["segment_ids"].flip(1),
            torch.zeros_like(case.tensors["segment_ids"]),
        ]
    )
    for dims, numbers in ((None, [case.tensors["segment_ids"]] * 3), (0, list(ids))):
        given = ids if dims == 0 else case.tensors["segment_ids"]
        out = torch.func.vmap(lambda q, i: call(q, *primals[1:], ids=i), in_dims=(0, dims))(calls, given)
        alone = [call(q, *primals[1:], ids=i) for q, i in zip(calls, numbers, strict=True)]
        torch.testing.assert_close(out, tuple(map(torch.stack, zip(*alone, strict=True))), atol=1e-9, rtol=0)
