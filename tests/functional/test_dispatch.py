"""Which backend is selected, for attention and for statistics, and the reason if it cannot serve the inputs."""

import warnings

import pytest
import torch

import mgk
from mgk.functional.backends import BACKENDS, _warn_once, select
from mgk.functional.linear.inputs import validate_inputs as validate_linear_inputs
from mgk.functional.mixture.backends import cpu_kernels
from mgk.functional.mixture.inputs import validate_inputs


def make_inputs(num_queries=200, num_keys=200, mixtures=2, shifted=False, **options):
    query, value = torch.randn(1, 2, num_queries, 8), torch.randn(1, 2, num_keys, 8)
    keys = torch.randn(1, 2, 1 if shifted else mixtures, num_keys, 8)
    shifts = torch.randn(2, mixtures, 8) if shifted else None
    return validate_inputs(query, keys, value, shifts=shifts, **options)


# the inputs, the backend with the kernels, and without
CHOICES = [
    ({}, "cpu", "sdpa"),
    ({"shifted": True}, "cpu", "sdpa"),
    ({"shifted": True, "is_causal": True}, "cpu", "sdpa"),
    ({"mixtures": 1, "kernel": "dot"}, "cpu", "sdpa"),
    ({"is_causal": True}, "cpu", "sdpa"),
    ({"e_step": "hard"}, "cpu", "blockwise"),
    ({"e_step": "hard", "mixtures": 1}, "cpu", "sdpa"),
    ({"dropout_p": 0.1}, "cpu", "blockwise"),
    ({"mixtures": 1, "kernel": "dot", "dropout_p": 0.1}, "cpu", "blockwise"),
    ({"variance": torch.ones(1, 2, 1, 1, requires_grad=True)}, "cpu", "blockwise"),
    ({"mixtures": 9}, "sdpa", "sdpa"),
    ({"mixtures": 9, "e_step": "hard"}, "blockwise", "blockwise"),
    ({"attn_mask": torch.zeros(200, 200, requires_grad=True)}, "blockwise", "blockwise"),
    ({"attn_mask": torch.zeros(200, 200)}, "cpu", "sdpa"),
    ({"num_queries": 1, "num_keys": 50_000}, "cpu", "eager"),
    ({"num_queries": 1, "num_keys": 20}, "cpu", "eager"),
    ({"num_queries": 1, "num_keys": 20, "mixtures": 9}, "eager", "eager"),
    ({"num_queries": 20, "num_keys": 20}, "cpu", "eager"),
    ({"num_queries": 20, "num_keys": 20, "variance": torch.ones(1, 2, 1, 1)}, "eager", "eager"),
]


@pytest.mark.parametrize(("options", "with_kernels", "without"), CHOICES)
def test_auto_takes_the_fastest_exact_backend(options, with_kernels, without, monkeypatch):
    inputs = make_inputs(**options)
    if cpu_kernels.STATUS == "ready":
        assert select("softmax", inputs).name == with_kernels
    monkeypatch.setattr(cpu_kernels, "STATUS", "not built")
    assert select("softmax", inputs).name == without


def test_without_kernels_the_first_slow_call_says_once_what_would_make_it_fast(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "STATUS", "not built: install a compiler")
    _warn_once.cache_clear()
    large, small = make_inputs(), make_inputs(num_queries=20, num_keys=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select("softmax", small)
        select("softmax", large, "sdpa")
    sentence = (
        "attention on the CPU takes a slower path, as the fused kernels are not built: install a compiler"
    )
    with pytest.warns(RuntimeWarning, match=sentence):
        select("softmax", large)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select("softmax", large)


@pytest.mark.parametrize("backend", mgk.available_backends())
@pytest.mark.parametrize("task", ["counts", "moments"])
@pytest.mark.parametrize("num_keys", [20, 400])
def test_a_named_backend_computes_the_statistics_too_or_raises(backend, task, num_keys):
    if mgk.available_backends()[backend] != "ready":
        pytest.skip("not ready")
    lacks = backend == "sdpa" or (backend == "cpu" and task == "moments")
    inputs = make_inputs(num_keys=num_keys, e_step="soft")
    if lacks:
        with pytest.raises(
            ValueError, match=f"backend '{backend}' cannot compute the statistics of the M-step: it"
        ):
            select("softmax", inputs, backend, task)
    else:
        assert select("softmax", inputs, backend, task).name == backend


@pytest.mark.parametrize(("variant", "variance"), [("mgk", "constant"), ("smgk", "em"), ("mlk", "constant")])
@pytest.mark.parametrize("backend", ["blockwise", "reference"])
def test_a_module_counts_with_the_backend_that_it_names(variant, variance, backend, monkeypatch):
    used = []
    for name, known in BACKENDS["linear" if variant == "mlk" else "softmax"].items():
        original = known.statistics
        monkeypatch.setattr(known, "statistics", lambda *x, n=name, f=original: used.append(n) or f(*x))
    attn = mgk.nn.MixtureAttention(8, 2, variant=variant, prior="em", variance=variance, backend=backend)
    attn(torch.randn(2, 7, 8))
    assert used == [backend]
    assert attn.prior.counts.sum() > 0


def test_the_linear_family_is_selected_alike():
    inputs = validate_linear_inputs(torch.randn(1, 2, 9, 4), torch.randn(1, 2, 3, 9, 4))
    for task in ("attention", "counts"):
        names = [select("linear", inputs, name, task).name for name in ("auto", "blockwise", "reference")]
        assert names == ["blockwise", "blockwise", "reference"]


def test_available_backends_are_named_with_their_state(monkeypatch):
    always = dict.fromkeys(("reference", "eager", "blockwise", "sdpa"), "ready")
    always["triton"] = mgk.available_backends()["triton"]
    assert always["triton"].startswith(("not installed", "without a device"))
    assert mgk.available_backends() == always | {"cpu": cpu_kernels.STATUS}
    monkeypatch.setattr(cpu_kernels, "STATUS", "not built: there was no C++ compiler")
    assert mgk.available_backends() == always | {"cpu": "not built: there was no C++ compiler"}
    with pytest.raises(ValueError, match="backend 'cpu' cannot serve this call: it is not built"):
        mgk.mixture_attention(
            torch.ones(1, 1, 2, 2), torch.ones(1, 1, 1, 2, 2), torch.ones(1, 1, 2, 2), backend="cpu"
        )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"e_step": "hard"}, "hard"),
        ({"dropout_p": 0.1}, "dropout"),
        ({"attn_mask": torch.zeros(200, 200, requires_grad=True)}, "gradient of attn_mask"),
    ],
)
def test_a_named_backend_that_cannot_serve_the_call_says_why(options, reason):
    query, keys = torch.randn(1, 2, 200, 8), torch.randn(1, 2, 2, 200, 8)
    with pytest.raises(ValueError, match=rf"backend 'sdpa' cannot serve this call: .*{reason}"):
        mgk.mixture_attention(query, keys, query, backend="sdpa", **options)


def test_every_choice_agrees_with_the_reference():
    for options in ({}, {"is_causal": True}, {"e_step": "hard"}, {"attn_mask": torch.rand(200, 200) > 0.5}):
        query, keys = torch.randn(1, 2, 200, 8), torch.randn(1, 2, 2, 200, 8)
        for length in (1, 20, 200):
            mask = {"attn_mask": options["attn_mask"][:length]} if "attn_mask" in options else {}
            arguments = (query[:, :, :length], keys, query)
            torch.testing.assert_close(
                mgk.mixture_attention(*arguments, **(options | mask)),
                mgk.mixture_attention(*arguments, **(options | mask), backend="reference"),
                atol=5e-6,
                rtol=0,
            )
