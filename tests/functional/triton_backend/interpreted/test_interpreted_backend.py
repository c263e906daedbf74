"""The backend ``triton`` behind the public functions: agreement, refusals, operators, compilation, self-check."""

import json

import pytest
import torch

import mgk
from mgk.bench.registry import PASSES, GpuSettings
from mgk.bench.runner import run as run_benchmark
from mgk.cli import doctor
from mgk.functional.backends import select
from mgk.functional.mixture import em_statistics
from mgk.functional.mixture.backends import cpu
from mgk.functional.mixture.backends.triton_backend import backend, self_check
from support.cases import Case, inputs_of, largest_errors, make_case

SIZES = (1, 2, 37, 40, 5, 4, 2)
OPTIONS = {
    "mgk": {"prior": "component"},
    "hard": {"e_step": "hard"},
    "position": {"prior": "position", "variance": "position", "is_causal": True},
    "key-mask": {"mask": "key", "variance": "component", "prior": "component"},
    "pair-mask": {"mask": "pair", "prior": "head"},
    "float-mask": {"mask": "float", "variance": "head"},
    "dot": {"kernel": "dot", "variance": "component"},
}


def run(case: Case, name: str) -> dict[str, torch.Tensor]:
    return case.run(name, torch.float64 if name == "reference" else torch.float32)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("function", ["mixture", "shifted"])
def test_outputs_and_gradients_are_those_of_the_reference(function, options):
    case = make_case(function, sizes=SIZES, **options)
    case.tensors = {n: x.float().double() if x.is_floating_point() else x for n, x in case.tensors.items()}
    errors = largest_errors(run(case, "triton"), run(case, "reference"))
    assert max(errors.values()) < 1e-5, errors


def test_it_is_ready_and_serves_the_cpu_only_when_named():
    assert mgk.available_backends()["triton"] == "ready"
    case = make_case(sizes=(1, 2, 300, 300, 4, 4, 2))
    assert select("softmax", inputs_of(case).in_dtype(torch.float32)).name != "triton"


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [
        ((1, 1, 3, 3, 4, 4, 2), torch.float64, "float64"),
        ((1, 1, 3, 3, 4, 4, 9), torch.float32, "8 components, not 9"),
        ((1, 1, 3, 3, 257, 4, 2), torch.float32, "256 features, not 257"),
    ],
    ids=["float64", "mixtures", "width"],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(sizes, dtype, reason):
    with pytest.raises(ValueError, match=f"backend 'triton' cannot serve this call: .*{reason}"):
        make_case(sizes=sizes).run("triton", dtype)


def test_moments_are_refused_by_name():
    inputs = inputs_of(make_case(sizes=SIZES)).in_dtype(torch.float32)
    assert select("softmax", inputs, "triton", "counts").name == "triton"
    with pytest.raises(
        ValueError, match="backend 'triton' cannot compute the statistics of the M-step: it has"
    ):
        select("softmax", inputs, "triton", "moments")


@pytest.mark.parametrize("function", ["mixture", "shifted"])
def test_counts_are_those_of_the_reference(function):
    inputs = inputs_of(make_case(function, sizes=SIZES, prior="component", is_causal=True)).in_dtype(
        torch.float32
    )
    mask = torch.rand(1, SIZES[2]) > 0.3
    got, want = (em_statistics.counts(inputs, mask, name) for name in ("triton", "reference"))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", ["mixture", "shifted"])
def test_one_query_without_gradients_is_decoded(function, monkeypatch):
    case = make_case(function, sizes=(2, 2, 1, 70, 5, 4, 2), prior="component", mask="key")
    names = [n for n in case.tensors if n != "upstream"]
    attend = mgk.mixture_attention if function == "mixture" else mgk.shifted_mixture_attention
    inputs = {
        n: case.tensors[n].float() if case.tensors[n].is_floating_point() else case.tensors[n] for n in names
    }
    monkeypatch.setattr(backend, "_forward", None)
    got, want = (attend(**inputs, backend=name) for name in ("triton", "reference"))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_dropout_is_the_same_for_the_same_seed():
    case = make_case(sizes=SIZES)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(case.run("triton", torch.float32, dropout_p=0.4))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert not torch.equal(results[0]["output"], results[2]["output"])


def test_inputs_need_not_be_contiguous():
    case = make_case(sizes=SIZES)
    expected = case.run("triton", torch.float32)
    case.tensors = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in case.tensors.items()}
    again = case.run("triton", torch.float32)
    assert all(torch.equal(expected[name], again[name]) for name in expected)


@pytest.mark.parametrize("zero", ["queries", "keys"])
def test_empty_inputs_give_empty_outputs_or_zeros(zero):
    sizes = (1, 2, 0, 3, 4, 4, 2) if zero == "queries" else (1, 2, 3, 0, 4, 4, 2)
    x = make_case(sizes=sizes).tensors
    out = mgk.mixture_attention(*(x[n].float() for n in ("query", "keys", "value")), backend="triton")
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("options", [{"prior": "position", "mask": "float"}, {"function": "shifted"}], ids=str)
def test_operators_are_as_torch_library_asks(options):
    inputs = inputs_of(make_case(sizes=(1, 1, 5, 6, 4, 4, 2), variance="head", **options)).in_dtype(
        torch.float32
    )
    inputs = inputs._make(
        x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs
    )
    params = backend._params(inputs)
    torch.library.opcheck(torch.ops.mgk.triton_forward, params, rtol=1e-4, atol=1e-4)
    detached = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in params)
    result = torch.ops.mgk.triton_forward(*detached)
    arguments = (
        torch.ones_like(result[0]),
        torch.ones_like(result[1]),
        *detached,
        *result,
        True,
        "mask" in options,
    )
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.mgk.triton_backward, arguments, test_utils=utilities)
    torch.library.opcheck(torch.ops.mgk.triton_counts, (*detached, None), test_utils=utilities)


def test_attention_compiles_without_a_break():
    case = make_case(sizes=SIZES, prior="component")
    tensors = [case.tensors[n].float().requires_grad_() for n in ("query", "keys", "value", "log_prior")]
    attend = lambda q, k, v, p: mgk.mixture_attention(q, k, v, p, is_causal=True, backend="triton")  # noqa: E731
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for function in (attend, compiled):
        out = function(*tensors)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_second_derivatives_are_refused():
    query, keys, value = (
        torch.randn(s).requires_grad_() for s in ((1, 1, 3, 4), (1, 1, 2, 3, 4), (1, 1, 3, 4))
    )
    out = mgk.mixture_attention(query, keys, value, backend="triton")
    (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        grad.sum().backward()


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(self_check, "_verdicts", {})
    monkeypatch.setattr(self_check, "kind_of", lambda device: "a device")
    monkeypatch.setattr(self_check, "_QUICK", {"mgk": ({"width": 8}, (torch.float32,))})
    monkeypatch.setattr(self_check, "TOLERANCES", {torch.float32: 1e-4})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return tmp_path / "mgk" / "triton-self-check.json"


def test_the_self_check_passes_once_and_is_remembered(record, monkeypatch):
    assert self_check.failure(torch.zeros(1)) is None
    assert json.loads(record.read_text()) == {"a device": ""}
    monkeypatch.setattr(self_check, "_verdicts", {})
    monkeypatch.setattr(self_check, "checks", None)
    assert self_check.failure(torch.zeros(1)) is None


def test_a_wrong_kernel_is_reported_and_not_used(record, monkeypatch):
    monkeypatch.setattr(self_check, "TOLERANCES", {torch.float32: 0.0})
    with pytest.warns(UserWarning, match=r"not used: its self-check failed .* report this text"):
        found = self_check.failure(torch.zeros(1))
    assert found is not None
    assert "mgk in float32: error" in found
    assert json.loads(record.read_text())["a device"] == found


def test_the_self_check_waits_while_a_graph_is_captured(record, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert self_check.failure(torch.zeros(1)) is None
    assert not record.exists()


@pytest.fixture
def short_checks(monkeypatch):
    monkeypatch.setattr(self_check, "_QUICK", {})
    calls = (
        "mgk segments",
        "mgk window, grouped heads",
        "smgk decoding",
        "mlk segments, grouped heads",
        "mlk step",
    )
    monkeypatch.setattr(self_check, "_LONG", {name: self_check._LONG[name] | {"width": 8} for name in calls})
    monkeypatch.setattr(self_check, "TOLERANCES", {torch.float32: 1e-4})


def test_doctor_prints_the_long_check(short_checks, capsys, monkeypatch):
    assert doctor._kernels_agree(torch.device("cpu"))
    assert "triton, mgk segments in float32: error" in capsys.readouterr().out
    monkeypatch.setattr(self_check, "TOLERANCES", {torch.float32: 0.0})
    assert not doctor._kernels_agree(torch.device("cpu"))
    assert capsys.readouterr().out.count("WRONG") == 5


def test_bench_gpu_checks_and_then_times(short_checks):
    settings = GpuSettings(
        device="cpu", batch=1, heads=1, length=16, head_dims=(8,), dtypes=("float32",), rounds=1
    )
    report = run_benchmark("gpu", settings)
    rows = report.to_json()["rows"]
    checked = [row for row in rows if row["experiment"] == "correctness"]
    assert [row["call"] for row in checked] == list(self_check._LONG)
    timed = {row["experiment"]: row for row in rows if row.get("backend") == "triton"}
    assert set(timed) == {f"{p}, float32, D=8{c}" for p in PASSES for c in ("", ", causal")}
    assert not report.outcome.failures


def test_torch_func_differentiates_each_example():
    case = make_case("shifted", sizes=(2, 1, 9, 11, 4, 4, 2), is_causal=True).tensors
    names = ("query", "key", "shifts", "value")
    tensors = [case[name].float() for name in names]

    def loss(backend):
        def compute(query, key, shifts, value):
            out = mgk.shifted_mixture_attention(query[None], key[None], shifts, value[None], backend=backend)
            return out.square().sum()

        return torch.func.vmap(torch.func.grad(compute, (0, 1, 2, 3)), (0, 0, None, 0))

    for got, want in zip(loss("triton")(*tensors), loss("reference")(*tensors), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_forward_mode_is_refused():
    query, keys, value = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 2, 3, 4), torch.randn(1, 1, 3, 4)
    attend = lambda x: mgk.mixture_attention(x, keys, value, backend="triton")  # noqa: E731
    with pytest.raises(ValueError, match="no forward-mode derivative"):
        torch.func.jvp(attend, (query,), (query,))


def test_forward_mode_goes_to_another_backend_where_auto_would_take_this_one(monkeypatch):
    monkeypatch.setattr(backend.Triton, "is_efficient", lambda self, inputs: True)
    monkeypatch.setattr(cpu.Cpu, "is_efficient", lambda self, inputs: False)
    query, keys, value = (torch.randn(s) for s in ((1, 2, 300, 4), (1, 2, 2, 300, 4), (1, 2, 300, 4)))
    attend = lambda name: lambda x: mgk.mixture_attention(x, keys, value, backend=name)  # noqa: E731
    case = make_case(sizes=(1, 2, 300, 300, 4, 4, 2))
    assert select("softmax", inputs_of(case).in_dtype(torch.float32)).name == "triton"
    _, got = torch.func.jvp(attend("auto"), (query,), (torch.ones_like(query),))
    _, want = torch.func.jvp(attend("reference"), (query,), (torch.ones_like(query),))
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
