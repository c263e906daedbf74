"""torch.func and forward-mode differentiation: jvp, jacfwd, grad, vmap, functional_call, at any length."""

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jvp, vmap

import mgk
from support.cases import BACKENDS, FUNCTIONS, make_case
from support.versions import needs_fullgraph

OTHERS = [name for name in BACKENDS if name not in ("reference", "sdpa")]
LENGTHS = [5, 150]  # below and above what "auto" computes eagerly


def call(function, names, backend, **options):
    attend = mgk.mixture_attention if function == "mixture" else mgk.shifted_mixture_attention
    return lambda *tensors: attend(**dict(zip(names, tensors, strict=True)), **options, backend=backend)


def make(function, length, **options):
    case = make_case(function, sizes=(2, 2, length, length + 3, 4, 3, 2), prior="component", **options)
    names = [name for name, x in case.tensors.items() if name != "upstream" and x.is_floating_point()]
    return names, [case.tensors[name] for name in names]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("e_step", ["soft", "hard"])
@pytest.mark.parametrize("variance", [None, "component"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_forward_mode_agrees_with_the_reference(function, variance, e_step, is_causal, length):
    names, primals = make(function, length, variance=variance)
    tangents = [torch.randn_like(x) for x in primals]
    options = {"e_step": e_step, "is_causal": is_causal}
    if length == LENGTHS[0]:
        options["attn_mask"] = torch.randn(2, 1, length, length + 3).double()
        options["attn_mask"][0, 0, 1] = -torch.inf  # a query with no key left
    expected = jvp(call(function, names, "reference", **options), tuple(primals), tuple(tangents))[1]
    assert expected.abs().max() > 0.1
    for backend in ("auto", *OTHERS):
        attend = call(function, names, backend, **options)
        torch.testing.assert_close(jvp(attend, tuple(primals), tuple(tangents))[1], expected, msg=backend)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(primals, tangents, strict=True)]
            tangent = forward_ad.unpack_dual(attend(*duals)).tangent
        torch.testing.assert_close(tangent, expected, msg=backend)


def test_forward_mode_through_a_float_mask_and_one_query():
    names, primals = make("mixture", 1)
    tangents = [torch.randn_like(x) for x in primals]
    mask, d_mask = torch.randn(2, 2, 1, 4).double(), torch.randn(2, 2, 1, 4).double()

    def tangent(backend):
        attend = lambda mask, *x: call("mixture", names, backend, attn_mask=mask)(*x)  # noqa: E731
        return jvp(attend, (mask, *primals), (d_mask, *tangents))[1]

    for backend in ("auto", "eager", "blockwise"):
        torch.testing.assert_close(tangent(backend), tangent("reference"), msg=backend)


def test_what_has_no_forward_mode_raises_by_name():
    names, primals = make("mixture", 150)
    tangents = tuple(torch.randn_like(x) for x in primals)
    with pytest.raises(ValueError, match="backend 'sdpa' cannot serve this call: it has no forward-mode"):
        jvp(call("mixture", names, "sdpa"), tuple(primals), tangents)
    if "cpu" in BACKENDS:
        with pytest.raises(
            NotImplementedError, match="backend 'cpu' has no forward-mode derivative with dropout"
        ):
            jvp(call("mixture", names, "cpu", dropout_p=0.5), tuple(primals), tangents)


def test_forward_mode_drops_what_the_forward_drops():
    names, primals = make("mixture", 40)
    tangents = [torch.randn_like(x) for x in primals]

    def output(*tensors):
        torch.manual_seed(0)
        return call("mixture", names, "blockwise", dropout_p=0.4)(*tensors)

    tangent = jvp(output, tuple(primals), tuple(tangents))[1]
    step = 1e-6
    ahead, behind = (
        output(*(x + sign * step * t for x, t in zip(primals, tangents, strict=True))) for sign in (1, -1)
    )
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"e_step": "hard"}, {"return_lse": True}], ids=str
)
@pytest.mark.parametrize("variance", [None, "component", "position"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_tangent_is_differentiated_again(function, variance, options):
    names, primals = make(function, 40, variance=variance)
    tangents = [tuple(torch.randn_like(x) for x in primals) for _ in range(2)]

    def slope(backend):
        def output(*tensors):
            result = call(function, names, backend, **options)(*tensors)
            return torch.cat([x.flatten() for x in result]) if isinstance(result, tuple) else result

        return lambda *tensors: jvp(output, tensors, tangents[0])[1]

    def by_reverse(backend):
        return grad(lambda *x: slope(backend)(*x).square().sum(), tuple(range(len(names))))(*primals)

    def by_forward(backend):
        return jvp(slope(backend), tuple(primals), tangents[1])[1]

    expected, again = by_reverse("reference"), by_forward("reference")
    assert max(x.abs().max() for x in expected) > 0.1
    assert again.abs().max() > 0.1
    torch.testing.assert_close(by_forward("auto"), again)
    for backend in ("auto", *OTHERS):
        torch.testing.assert_close(by_reverse(backend), expected, msg=backend)
        if backend not in ("auto", "eager"):
            with pytest.raises(
                ValueError, match=f"backend '{backend}' cannot serve this call: it has no forward-mode"
            ):
                by_forward(backend)


@needs_fullgraph
@pytest.mark.parametrize("sizes", [(5, 5), (150, 150), (1, 150)], ids=str)
@pytest.mark.parametrize("variance", [None, "component"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_transforms_inside_a_compiled_function(function, variance, sizes):
    case = make_case(function, sizes=(1, 2, *sizes, 4, 3, 2), prior="component", variance=variance)
    names = [name for name in case.tensors if name != "upstream"]
    primals = tuple(case.tensors[name] for name in names)
    tangents = tuple(torch.randn_like(x) for x in primals)
    argnums = tuple(range(len(names)))
    batched = ("query", "key", "keys", "value")
    dims = tuple(0 if name in batched else None for name in names)

    def transforms(attend):
        def of_one(*tensors):
            return attend(*(x[None] if name in batched else x for name, x in zip(names, tensors, strict=True)))

        return {
            "jvp": lambda: jvp(attend, primals, tangents)[1],
            "grad": lambda: grad(lambda *x: attend(*x).square().sum(), argnums)(*primals),
            "vmap": lambda: vmap(of_one, dims)(*primals),
        }

    expected = {name: run() for name, run in transforms(call(function, names, "reference")).items()}
    for name, run in transforms(call(function, names, "auto")).items():
        torch._dynamo.reset()
        result = torch.compile(run, fullgraph=True, backend="aot_eager")()
        torch.testing.assert_close(result, expected[name], msg=name)


@needs_fullgraph
@pytest.mark.parametrize("backend", [name for name in (*OTHERS, "sdpa") if name != "eager"])
def test_operators_inside_a_compiled_transform_raise_by_name(backend):
    names, primals = make("mixture", 5)
    torch._dynamo.reset()
    run = torch.compile(
        lambda *x: jvp(call("mixture", names, backend), x, x)[1], fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(Unsupported, match=f"backend '{backend}' cannot serve this call: torch.compile traces"):
        run(*primals)


@needs_fullgraph
def test_a_compiled_function_called_with_tangents():
    names, primals = make("mixture", 150)
    tangents = [torch.randn_like(x) for x in primals]
    attend = call("mixture", names, "auto")
    expected = jvp(attend, tuple(primals), tuple(tangents))[1]
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    compiled(*primals)  # the graph without tangents is not that with them
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(primals, tangents, strict=True)]
        torch.testing.assert_close(forward_ad.unpack_dual(compiled(*duals)).tangent, expected)


@pytest.mark.parametrize("backend", [name for name in OTHERS if name != "eager"])
def test_jacfwd_equals_the_reverse(backend):
    names, primals = make("mixture", 4)
    attend = call("mixture", names, backend)
    of_query = lambda query: attend(*(query if name == "query" else x for name, x in zip(names, primals)))  # noqa: E731, B905
    query = primals[names.index("query")]
    torch.testing.assert_close(jacfwd(of_query)(query), torch.autograd.functional.jacobian(of_query, query))


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop"
)  # torch has no batching rule for SDPA on the CPU
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("backend", ["auto", *(name for name in BACKENDS if name != "reference")])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_grad_and_vmap_of_grad(function, backend, length):
    names, primals = make(function, length)
    shared = ("shifts", "log_prior")
    mask = torch.rand(2, 1, length, length + 3) > 0.3

    def loss(backend, batched):
        def compute(mask, *tensors):
            add = lambda name, x: x if name in shared or not batched else x[None]  # noqa: E731
            tensors = [add(name, x) for name, x in zip(names, tensors, strict=True)]
            mask = mask[None] if batched else mask
            return call(function, names, backend, attn_mask=mask)(*tensors).square().sum()

        return compute

    argnums = tuple(range(1, len(names) + 1))
    dims = (0, *(None if name in shared else 0 for name in names))
    expected = grad(loss("reference", False), argnums)(mask, *primals)
    result = grad(loss(backend, False), argnums)(mask, *primals)
    for name, a, b in zip(names, result, expected, strict=True):
        torch.testing.assert_close(a, b, msg=name)
    each = vmap(grad(loss(backend, True), argnums), dims)(mask, *primals)
    for name, a, b in zip(names, each, expected, strict=True):
        torch.testing.assert_close(a.sum(0) if name in shared else a, b, msg=name)


@pytest.mark.parametrize("backend", [name for name in OTHERS if name != "eager"])
def test_vmap_over_a_learned_variance_a_float_mask_and_dropout(backend):
    names, primals = make("mixture", 20, variance="component")
    stacked = [torch.stack([x, x * 1.5]) for x in primals]

    def loss(*tensors):
        return call("mixture", names, backend)(*tensors).square().sum()

    argnums = tuple(range(len(names)))
    each = vmap(grad(loss, argnums))(*stacked)
    for index in range(2):
        expected = grad(loss, argnums)(*(x[index] for x in stacked))
        for name, a, b in zip(names, each, expected, strict=True):
            torch.testing.assert_close(a[index], b, msg=name)
    if backend == "blockwise":
        masks = torch.randn(2, 20, 23).double()
        with_mask = lambda mask: call("mixture", names, backend, attn_mask=mask)(*primals).square().sum()  # noqa: E731
        torch.testing.assert_close(
            vmap(grad(with_mask))(masks), torch.stack([grad(with_mask)(mask) for mask in masks])
        )
    dropped = vmap(lambda *x: call("mixture", names, backend, dropout_p=0.5)(*x), randomness="different")(
        *(torch.stack([x, x]) for x in primals)
    )
    assert (dropped[0] != dropped[1]).any()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ["auto", *(name for name in BACKENDS if name != "reference")])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_vmap_over_segments(function, backend, is_causal):
    names, primals = make(function, 20)
    batched = ("query", "key", "keys", "value")
    primals = [x[:1] if name in batched else x for name, x in zip(names, primals, strict=True)]
    stacked = [torch.stack([x, x * 1.5, x * 0.5]) for x in primals]
    ids = (torch.rand(3, 1, 23) > 0.8).cumsum(2)

    def loss(ids, *tensors):
        options = {"segment_ids": ids, "is_causal": is_causal}
        return call(function, names, backend, **options)(*tensors).square().sum()

    argnums = tuple(range(1, len(names) + 1))
    each = vmap(grad(loss, argnums))(ids, *stacked)
    for index in range(3):
        expected = grad(loss, argnums)(ids[index], *(x[index] for x in stacked))
        for name, a, b in zip(names, each, expected, strict=True):
            torch.testing.assert_close(a[index], b, msg=name)


@pytest.mark.parametrize("variant", ["softmax", "linear", "mgk", "smgk", "mlk", "smlk"])
@pytest.mark.parametrize("length", LENGTHS)
def test_functional_call_of_a_module(variant, length):
    attn = mgk.nn.MixtureAttention(8, 2, variant=variant).double()
    x = torch.randn(2, length, 8, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in attn.named_parameters()}
    loss = lambda p: functional_call(attn, p, (x,), {"is_causal": True}).square().sum()  # noqa: E731
    result = grad(loss)(parameters)
    expected = torch.autograd.grad(attn(x, is_causal=True).square().sum(), list(attn.parameters()))
    for (name, a), b in zip(result.items(), expected, strict=True):
        torch.testing.assert_close(a, b, msg=name)
    each = vmap(
        grad(lambda p, x: functional_call(attn, p, (x[None],), {"is_causal": True}).square().sum()), (None, 0)
    )(parameters, x)
    for name, gradients in each.items():
        torch.testing.assert_close(gradients.sum(0), result[name], msg=name)


@pytest.mark.parametrize("feature_map", ["elu", "favor", "dpfp"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_forward_mode_of_the_linear_family(feature_map, is_causal):
    case = make_case(sizes=(2, 2, 80, 80, 4, 3, 2), prior="component").tensors
    primals = tuple(case[name] for name in ("query", "keys", "value", "log_prior"))
    tangents = tuple(torch.randn_like(x) for x in primals)
    options = {"feature_map": feature_map, "is_causal": is_causal}
    attend = lambda *x: mgk.linear_mixture_attention(*x, **options)  # noqa: E731
    _, tangent = jvp(attend, primals, tangents)
    step = 1e-6
    ahead, behind = (
        attend(*(x + sign * step * t for x, t in zip(primals, tangents, strict=True))) for sign in (1, -1)
    )
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), atol=1e-6, rtol=1e-5)
