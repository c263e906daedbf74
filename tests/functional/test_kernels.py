"""The compiled kernels: instruction sets, decoding, statistics, determinism, threads, forks and error messages."""

import contextlib
import ctypes
import itertools
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import mgk
from mgk.functional.mixture import em_statistics
from mgk.functional.mixture.backends import cpu_kernels
from support.cases import FUNCTIONS, inputs_of, largest_errors, make_case

pytestmark = pytest.mark.skipif(cpu_kernels.STATUS != "ready", reason=f"the kernels are {cpu_kernels.STATUS}")

SETS = cpu_kernels.supported_instruction_sets()


@contextlib.contextmanager
def use_instruction_set(name, monkeypatch):
    monkeypatch.setenv(cpu_kernels.INSTRUCTION_SET_VARIABLE, name)
    cpu_kernels.instruction_set.cache_clear()  # the variable is read once per process
    yield
    cpu_kernels.instruction_set.cache_clear()


@pytest.fixture(params=SETS)
def instruction_set(request, monkeypatch):
    with use_instruction_set(request.param, monkeypatch):
        yield request.param


@pytest.mark.parametrize(
    ("function", "e_step", "is_causal"), list(itertools.product(FUNCTIONS, ("soft", "hard"), (False, True)))
)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1, 7, 3, 1, 1), (1, 2, 63, 65, 33, 17, 2), (2, 1, 130, 70, 16, 32, 8)],
    ids=lambda s: "L{2}-S{3}-D{4}-M{6}".format(*s),
)
def test_every_instruction_set_agrees_with_the_reference(instruction_set, function, e_step, is_causal, sizes):
    case = make_case(function, sizes=sizes, prior="position", e_step=e_step, is_causal=is_causal)
    truth = case.run("reference")
    assert max(largest_errors(case.run("cpu"), truth).values()) < 1e-10
    assert max(largest_errors(case.run("cpu", torch.float32), truth).values()) < 2e-5


@pytest.mark.parametrize("prior", [None, "component", "position"])
@pytest.mark.parametrize("mask", [None, "key", "pair"])
def test_a_variance_that_positions_share_with_every_instruction_set(instruction_set, mask, prior):
    sweep = itertools.product(FUNCTIONS, ("head", "component"), (2, 8), (1, 2))
    for function, variance, mixtures, threads in sweep:
        options = {"variance": variance, "prior": prior, "mask": mask, "is_causal": True}
        case = make_case(function, sizes=(2, 2, 100, 140, 5, 6, mixtures), **options)
        case.tensors["upstream"] = case.tensors["upstream"].float().double()
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        result, rough = case.run("cpu"), case.run("cpu", torch.float32)
        torch.set_num_threads(before)
        truth = case.run("reference")
        assert max(largest_errors(result, truth).values()) < 1e-10
        assert max(largest_errors(rough, truth).values()) < 2e-5


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("mask", "prior"), [(None, None), ("key", "component"), ("pair", "position")])
def test_segments_that_are_calls_of_their_own(instruction_set, monkeypatch, mask, prior, window):
    # 32 positions or more in the mean, and enough segments for all threads
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor([40, 1, 65, 33, 61])).expand(2, -1)
    sweep = itertools.product(FUNCTIONS, (False, True), ("soft", "hard"))
    for function, is_causal, e_step in sweep:
        options = {"prior": prior, "mask": mask, "is_causal": is_causal, "e_step": e_step}
        case = make_case(function, sizes=(2, 2, 200, 200, 13, 18, 2), **options)
        case.options |= {"segment_ids": ids, "window": window}
        truth = case.run("reference")
        for threads in (1, 11):  # the latter: tiles
            monkeypatch.setattr(cpu_kernels, "_num_threads", lambda work, threads=threads: threads)
            assert max(largest_errors(case.run("cpu"), truth).values()) < 1e-10
            assert max(largest_errors(case.run("cpu", torch.float32), truth).values()) < 2e-5


def test_dropout_does_not_depend_on_how_segments_are_computed(monkeypatch):
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([40, 97, 63]))[None]
    query, value = torch.randn(1, 1, 200, 8), torch.randn(1, 1, 200, 8)
    outs = []
    for threads in (1, 11):
        monkeypatch.setattr(cpu_kernels, "_num_threads", lambda work, threads=threads: threads)
        torch.manual_seed(0)
        options = {"segment_ids": ids, "dropout_p": 0.5, "backend": "cpu"}
        outs.append(mgk.mixture_attention(query, torch.stack([query, value], 2), value, **options))
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("length", [1, 7, 63, 500, 1000])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("width", [32, 256])
def test_odd_lengths_in_float32(function, length, width):
    case = make_case(function, sizes=(1, 1, length, length, width, 32, 2), prior="component")
    for name, x in case.tensors.items():
        case.tensors[name] = x.float().double()
    errors = largest_errors(case.run("cpu", torch.float32), case.run("reference"))
    assert max(errors.values()) < 5e-6 * width / 32, errors  # scores grow with the width


@pytest.mark.parametrize("mask", ["key", "pair", "float"])
def test_masks_with_every_instruction_set(instruction_set, mask):
    for function, e_step in itertools.product(FUNCTIONS, ("soft", "hard")):
        case = make_case(function, sizes=(2, 2, 70, 140, 5, 6, 2), e_step=e_step, mask=mask)
        attn_mask = case.tensors.pop("attn_mask")
        result, truth = (case.run(backend, attn_mask=attn_mask) for backend in ("cpu", "reference"))
        assert max(largest_errors(result, truth).values()) < 1e-10


def test_tiles_of_padding_are_skipped_not_read():
    """What a whole tile of padding holds never reaches the output."""
    case = make_case(sizes=(1, 2, 100, 256, 8, 8, 2))
    mask = torch.arange(256) < 128
    truth = case.run("reference", attn_mask=mask)["output"]
    case.tensors["keys"][:, :, :, 192:] = 1e18
    case.tensors["value"][:, :, 192:] = torch.nan
    inputs = [case.tensors[name] for name in ("query", "keys", "value")]
    out = mgk.mixture_attention(*inputs, attn_mask=mask, backend="cpu")
    torch.testing.assert_close(out, truth)


DECODING = [
    options
    for options in itertools.product(
        FUNCTIONS,
        ("gaussian", "dot"),
        ("soft", "hard"),
        (None, "component", "position"),
        (None, "component"),
        (None, "key", "float"),
    )
    if options[0] == "mixture" or options[1] == "gaussian" or options[4] is not None
]


@pytest.mark.parametrize(("function", "kernel", "e_step", "prior", "variance", "mask"), DECODING)
def test_decoding_agrees_with_the_reference(function, kernel, e_step, prior, variance, mask):
    for sizes in ((2, 3, 1, 17, 5, 4, 2), (1, 2, 1, 2100, 19, 33, 3)):
        case = make_case(
            function, sizes=sizes, kernel=kernel, e_step=e_step, prior=prior, variance=variance, mask=mask
        )
        attend = mgk.mixture_attention if function == "mixture" else mgk.shifted_mixture_attention
        inputs = {name: x for name, x in case.tensors.items() if name != "upstream"}
        out, truth = (attend(**inputs, **case.options, backend=backend) for backend in ("cpu", "reference"))
        torch.testing.assert_close(out, truth, atol=1e-11, rtol=0)


def test_decoding_with_every_instruction_set_reads_a_cache_where_it_lies(instruction_set):
    room = torch.randn(2, 3, 2, 300, 20)  # a cache with space left
    values = torch.randn(2, 3, 300, 20)
    query, keys, value = torch.randn(2, 3, 1, 20), room[:, :, :, :257], values[:, :, :257]
    assert not keys.is_contiguous()
    out = mgk.mixture_attention(query, keys, value, backend="cpu")
    truth = mgk.mixture_attention(query.double(), keys.double(), value.double(), backend="reference")
    torch.testing.assert_close(out.double(), truth, atol=2e-6, rtol=0)


def test_decoding_with_every_key_masked_gives_zeros():
    out = mgk.mixture_attention(
        torch.randn(2, 1, 1, 4), torch.randn(2, 1, 2, 9, 4), torch.randn(2, 1, 9, 4),
        attn_mask=torch.tensor([True, False])[:, None, None, None], backend="cpu",
    )  # fmt: skip
    assert out[0].any()
    assert not out[1].any()


@pytest.mark.parametrize("e_step", ["soft", "hard"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_counts_with_every_instruction_set(instruction_set, function, e_step):
    case = make_case(
        function, sizes=(2, 2, 70, 140, 5, 6, 3), prior="component", e_step=e_step, mask="pair", is_causal=True
    )
    query_mask = torch.rand(2, 70) > 0.3
    inputs = inputs_of(case)
    expected = em_statistics.counts(inputs, query_mask, "reference")
    torch.testing.assert_close(em_statistics.counts(inputs, query_mask, "cpu"), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("heads", [1, 3])
def test_two_runs_give_the_same_bits(function, heads):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        case = make_case(function, sizes=(1, heads, 300, 300, 16, 16, 2), prior="component", dropout_p=0.2)
        runs = []
        for _ in range(3):
            torch.manual_seed(0)
            runs.append(case.run("cpu", torch.float32))
    finally:
        torch.set_num_threads(threads)
    for other in runs[1:]:
        assert all(torch.equal(runs[0][name], other[name]) for name in other)


def test_the_number_of_threads_changes_rounding_only():
    case = make_case("shifted", sizes=(1, 1, 300, 300, 16, 16, 2))
    threads, results = torch.get_num_threads(), []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            results.append(case.run("cpu"))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert max(largest_errors(other, results[0]).values()) < 1e-12


class Attended(Dataset):
    """Examples that attention makes, in a worker."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        torch.set_num_threads(2)
        return attend_once(index)


def attend_once(seed):
    generator = torch.Generator().manual_seed(seed)
    query, keys = (torch.randn(shape, generator=generator) for shape in ((1, 2, 300, 16), (1, 2, 2, 300, 16)))
    return mgk.mixture_attention(query, keys, query, backend="cpu")


def test_forked_workers_attend_too():
    expected = torch.stack([attend_once(index) for index in range(4)])  # the parent has used its threads
    loader = DataLoader(Attended(), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=60)
    torch.testing.assert_close(next(iter(loader)), expected)


def test_half_precision_is_computed_in_float32():
    query, keys = torch.randn(1, 2, 70, 16).bfloat16(), torch.randn(1, 2, 2, 70, 16).bfloat16()
    out = mgk.mixture_attention(query, keys, query, backend="cpu")
    exact = mgk.mixture_attention(query.float(), keys.float(), query.float(), backend="cpu")
    assert torch.equal(out, exact.bfloat16())


def test_what_the_kernels_cannot_serve_is_refused_with_a_reason():
    query, keys = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 9, 4, 4)
    with pytest.raises(ValueError, match="room for 8 components, not 9"):
        mgk.mixture_attention(query, keys, query, backend="cpu")
    mask = torch.zeros(4, 4, requires_grad=True)
    with pytest.raises(ValueError, match="no gradient for attn_mask"):
        mgk.mixture_attention(query, keys[:, :, :2], query, attn_mask=mask, backend="cpu")
    with pytest.raises(ValueError, match="the tensors are on meta"):
        mgk.mixture_attention(query.to("meta"), keys[:, :, :2].to("meta"), query.to("meta"), backend="cpu")


def test_an_instruction_set_that_is_not_there_is_named(monkeypatch):
    message = f"MGK_INSTRUCTION_SET must be one of {', '.join(SETS)} here, got 'sse9'"
    with use_instruction_set("sse9", monkeypatch), pytest.raises(ValueError, match=message):
        cpu_kernels.instruction_set()


def test_an_instruction_set_that_is_chosen_stays(instruction_set, monkeypatch):
    assert cpu_kernels.instruction_set() == instruction_set
    monkeypatch.setenv(cpu_kernels.INSTRUCTION_SET_VARIABLE, "sse9")
    assert cpu_kernels.instruction_set() == instruction_set


def test_a_missing_or_broken_library_says_what_to_do(tmp_path):
    assert "no C++ compiler when mgk was installed; install a C++ compiler" in str(cpu_kernels._load(tmp_path))
    (tmp_path / "_kernels.so").write_bytes(b"not a library")
    assert str(cpu_kernels._load(tmp_path)).startswith("not loadable")


FIELDS = cpu_kernels.AttentionParams._fields_
OTHER_LAYOUTS = {
    "a new name": (
        [*FIELDS[:-1], ("tallies", ctypes.c_void_p)],
        "has AttentionParams.counts .* AttentionParams.tallies",
    ),
    "a swap": (
        [FIELDS[1], FIELDS[0], *FIELDS[2:]],
        "has AttentionParams.batch_size 0 8 .* AttentionParams.num_heads 0 8",
    ),
    "another size": ([*FIELDS[:-1], ("counts", ctypes.c_int32)], r"has AttentionParams.counts (\d+) 8 .* \1 4"),
    "a field more": (
        [*FIELDS, ("extra", ctypes.c_int64)],
        r"has AttentionParams 0 \d+ in place of AttentionParams.extra",
    ),
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_a_library_with_other_structs_is_refused_by_field(layout, monkeypatch):
    folder = Path(cpu_kernels._library._name).parent
    assert isinstance(cpu_kernels._load(folder), ctypes.CDLL)
    fields, difference = OTHER_LAYOUTS[layout]
    other = type("AttentionParams", (ctypes.Structure,), {"_fields_": fields})
    monkeypatch.setattr(cpu_kernels, "AttentionParams", other)
    message = cpu_kernels._load(folder)
    assert re.match(
        rf"built for another version of mgk \(it {difference}.*\); install a C\+\+ compiler", message
    )


def test_a_library_that_reports_nothing_is_of_another_version(monkeypatch, tmp_path):
    (tmp_path / "_kernels.so").touch()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: ctypes.PyDLL(None))
    assert str(cpu_kernels._load(tmp_path)).startswith("built for another version of mgk (")


def test_the_library_checks_sizes_and_pointers_before_it_uses_them():
    library, best = cpu_kernels._library, SETS[-1].encode()
    sizes = (
        "batch_size",
        "num_heads",
        "group",
        "num_components",
        "num_queries",
        "num_keys",
        "num_features",
        "num_threads",
    )
    assert library.mgk_forward(None, best) == 2
    for name in ("forward", "backward", "count"):
        function = getattr(library, f"mgk_{name}")
        assert function(ctypes.byref(cpu_kernels.AttentionParams()), best) == 1
        sized = cpu_kernels.AttentionParams(**dict.fromkeys(sizes, 1))
        assert function(ctypes.byref(sized), best) == 2
        too_many = cpu_kernels.AttentionParams(
            **dict.fromkeys(sizes, 1) | {"num_components": cpu_kernels.MAX_COMPONENTS + 1}
        )
        assert function(ctypes.byref(too_many), best) == 1
    assert library.mgk_decode(ctypes.byref(cpu_kernels.DecodeParams()), best) == 1


def test_the_library_refuses_an_unknown_instruction_set(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "instruction_set", lambda: "sse9")
    with pytest.raises(RuntimeError, match="the processor lacks the instruction set"):
        attend_once(0)
