"""Every Triton kernel compiled for real GPUs, without one: what the assembler made of it.

``python -m mgk.bench.triton_compile`` compiles for NVIDIA A100 (sm_80), H100 (sm_90), B200 (sm_100) and
AMD MI300 (gfx942) and reads shared memory, registers, spills and the instructions of the loop over full
tiles. It fails if a kernel does not compile or fit, spills in that loop, or has its products elsewhere than
on tensor cores (exact float32 products run on the FMA units). With ``--json`` a run goes on from its file.
"""

import argparse
import hashlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mgk._util.files import write_json
from mgk._util.machine import describe
from mgk.bench.triton_model import modelled

# Bytes of shared memory that a program may use.
SHARED_LIMITS = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}
# Columns of tensor memory on sm_100; a kernel that takes more is compiled to nothing.
TENSOR_MEMORY = 512
TARGETS = tuple(SHARED_LIMITS)
WIDTHS = (64, 128, 32)
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "tf32": torch.float32,
    "float32": torch.float32,
}
MIXTURES = {"softmax": (1,), "mgk": (2, 4, 1), "mgk-hard": (2,), "smgk": (2, 4)}
PASSES = ("forward", "keys", "queries")
# The function of each kernel.
KERNELS = {
    "forward": "forward",
    "keys": "keys_backward",
    "queries": "queries_backward",
    "decode": "decode",
    "counts": "counts",
    "features": "key_features",
}
# Of the linear family: M is a loop there, and all but exact float32 has the same products.
LINEAR_PRODUCTS = (
    "states",
    "outputs",
    "state_gradients",
    "query_gradients",
    "value_gradients",
    "key_gradients",
)
LINEAR_KERNELS = (*LINEAR_PRODUCTS, "step")
_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_KINDS = {
    "tensor_core": re.compile(r"HMMA|HGMMA|UTC\w*MMA|OMMA|v_mfma"),
    "exponentials": re.compile(r"MUFU\.EX2|v_exp"),
    "arithmetic": re.compile(r"FFMA|FADD|FMUL|v_(pk_)?(fma|add_f|sub_f|mul_f|fmac|mac)"),
    "loop_spills": re.compile(r"STL|LDL|scratch_store|scratch_load|buffer_(load|store)\w* .*offen.*scratch"),
}
# An instruction: its address, its name and where it jumps.
Instruction = tuple[int, str, int | None]


@dataclass(frozen=True)
class Case:
    """One kernel to compile."""

    target: str
    variant: str
    kernel: str  # "keys" and "queries" are the two backward kernels
    width: int
    mixtures: int
    dtype: str  # "tf32": float32 tensors, products as TF32
    is_factored: bool = False  # smgk without the fallback to M exponentials: what most tiles execute


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel; counts per (query, key) pair in the loop over full tiles.

    Of the linear family's kernels: per position of a chunk, in the whole program.
    """

    case: Case
    source: str  # a digest of the kernel's source, specification and tile
    tile: Sequence[int]  # the fields of ``tiles.Tile``
    shared: int  # bytes
    registers: int
    stack: int  # bytes, mostly spills
    loop_spills: int  # instructions, not per pair
    instructions: float
    exponentials: float
    arithmetic: float
    tensor_core: float
    tensor_memory: int = 0  # columns

    @property
    def errors(self) -> list[str]:
        """What is not as it must be."""
        case, found = self.case, []
        limit = SHARED_LIMITS[case.target]
        if self.shared > limit:
            found.append(f"{self.shared} bytes of shared memory, {limit} at most")
        if self.tensor_memory > TENSOR_MEMORY:
            found.append(f"{self.tensor_memory} columns of tensor memory, {TENSOR_MEMORY} at most")
        if self.loop_spills:
            found.append(f"{self.loop_spills} spill instructions in the loop")
        if case.kernel in (*PASSES, *LINEAR_PRODUCTS) and case.dtype != "float32" and not self.tensor_core:
            found.append("no tensor-core instruction in the loop")
        return found

    def row(self) -> dict[str, Any]:
        """The row of the JSON file."""
        row = asdict(self)
        return {"experiment": "kernel", **row.pop("case"), **row}


def cases(
    targets: Iterable[str] = TARGETS, dtypes: Iterable[str] = tuple(DTYPES), widths: Iterable[int] = WIDTHS
) -> list[Case]:
    """Every kernel, what most calls need first."""
    shapes = itertools.product(dtypes, widths, targets, MIXTURES.items(), KERNELS)
    mixture = (
        Case(target, variant, kernel, width, m, dtype, is_factored)
        for dtype, width, target, (variant, mixtures), kernel in shapes
        for m in mixtures
        for is_factored in (False, True)
    )
    linear = (
        Case(target, "mlk", kernel, width, 2, dtype)
        for dtype, width, target, kernel in itertools.product(dtypes, widths, targets, LINEAR_KERNELS)
        if dtype in ("bfloat16", "float32")
    )
    return sorted((*filter(_is_distinct, mixture), *linear), key=_rarity)


def _rarity(case: Case) -> int:
    """How many of its choices are rare."""
    is_wide = case.dtype in ("float32", "tf32")
    return 2 * (case.width == 32) + 2 * (case.mixtures == 4) + 2 * is_wide + (case.dtype == "bfloat16")


def _is_distinct(case: Case) -> bool:
    """Whether the case compiles to code that no other one has, or that the model needs."""
    if case.is_factored:
        return (
            case.variant == "smgk" and case.dtype == "float16" and case.mixtures == 2 and case.kernel in PASSES
        )
    if case.kernel in PASSES:
        return True
    if case.dtype == "tf32" and case.kernel != "counts":
        return False
    return case.mixtures == 2 and case.variant in ("mgk", "smgk")


def meta_params(case: Case, length: int = 4096) -> Any:
    """The parameters of the case, without memory."""
    from mgk.functional.mixture.backends.triton_backend.launch import AttentionParams

    dtype = DTYPES[case.dtype]
    is_shifted = case.variant == "smgk"
    num_queries = 1 if case.kernel == "decode" else length

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    prior = empty(1, 16, case.mixtures, 1, dtype=torch.float32)
    return AttentionParams(
        query=empty(2, 16, num_queries, case.width),
        keys=empty(2, 16, 1 if is_shifted else case.mixtures, length, case.width),
        value=empty(2, 16, length, case.width),
        shifts=empty(16, case.mixtures, case.width) if is_shifted else None,
        log_prior=None if case.variant == "softmax" else prior,
        variance=empty(1, 1, 1, 1, dtype=torch.float32),
        mask=None,
        segments=None,
        seed=None,
        is_dot=case.variant == "softmax",
        is_hard=case.variant == "mgk-hard",
        left=None,
        right=None,
        dropout_p=0.0,
    )


def launches(case: Case, own_tile: Any = None) -> dict[str, tuple[Any, ...]]:
    """The kernels that a call launches, by name: kernel, arguments, specification and tile."""
    from mgk.functional.mixture.backends.triton_backend import launch

    found: dict[str, tuple[Any, ...]] = {}

    def record(kernel: Any, grid: Any, arguments: Any, spec: Any, tile: Any) -> None:
        found[kernel.fn.__name__] = (kernel, arguments, spec, tile)

    if case.variant == "mlk":
        with launch.launching_with(record, case.target):
            _launch_linear(case)
        return found
    params = meta_params(case)
    with launch.launching_with(record, case.target, own_tile), _tf32(case.dtype == "tf32"):
        if case.kernel == "decode":
            launch.decode(params)
        elif case.kernel == "counts":
            launch.counts(params, None)
        elif case.kernel in ("forward", "features"):
            launch.forward(params)
        else:
            result = launch.forward(params)
            launch.backward(torch.empty_like(result.out), None, params, result)
    return found


def _launch_linear(case: Case, length: int = 4096) -> None:
    """The linear family's launches, without memory."""
    from mgk.functional.linear import triton_launch

    def empty(*shape: int, dtype: torch.dtype = DTYPES[case.dtype]) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    width, exact = case.width, torch.float32
    params = triton_launch.LinearParams(
        query=empty(2, 16, length, width),
        keys=empty(2, 16, case.mixtures, length, width),
        value=empty(2, 16, length, width),
        log_prior=empty(1, 16, case.mixtures, 1, dtype=exact),
        numerator=empty(2, 16, width, width, dtype=exact),
        normaliser=empty(2, 16, width, dtype=exact),
        key_mask=None,
        starts=None,
        is_elu=True,
        is_causal=True,
    )
    if case.kernel == "step":
        query, keys, value = params.query[:, :, :1], params.keys[:, :, :, :1], params.value[:, :, :1]
        triton_launch.step(params._replace(query=query, keys=keys, value=value))
    else:
        out, denominator, *state = triton_launch.forward(params)
        triton_launch.backward((out, *state, out, denominator), params)


@contextmanager
def _tf32(is_allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = is_allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def source_of(case: Case, tile: Any = None) -> tuple[str, Any, Any, Any]:
    """A digest of what is compiled, Triton's source, the tile and the specification."""
    from triton.compiler import ASTSource

    from mgk.functional.mixture.backends.triton_backend import launch

    kernel, arguments, spec, tile = launches(case, tile)[KERNELS.get(case.kernel, case.kernel)]
    if case.is_factored:
        spec = replace(spec, max_spread=float("inf"))
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    types = tuple(_type_of(x, (n,), constants, attributes) for n, x in enumerate(arguments))
    signature = dict(zip(kernel.arg_names, (*types, "constexpr"), strict=True))
    changed = [(f.name, getattr(spec, f.name)) for f in fields(spec) if getattr(spec, f.name) != f.default]
    parts = kernel.cache_key, signature, constants, attributes, changed, tuple(tile)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    constants[len(arguments),] = launch.compile_time(spec)
    return digest, ASTSource(kernel, signature, constants, attributes), tile, spec


def compile_case(case: Case, tile: Any = None) -> Compiled:
    """Compile the kernel of a case, with its own tile or another."""
    import triton
    from triton.backends.compiler import GPUTarget

    digest, source, tile, spec = source_of(case, tile)
    is_amd = case.target.startswith("gfx")
    lanes = 64 if is_amd else 32
    target = GPUTarget("hip" if is_amd else "cuda", case.target if is_amd else int(case.target[3:]), lanes)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    binary = triton.compile(source, target=target, options=options)
    if is_amd:
        registers, stack, lines = _read_amd(binary.asm["amdgcn"])
    else:
        registers, stack, lines = _read_nvidia(binary.asm["cubin"])
    loop = main_loop(lines)
    spills = sum(bool(_KINDS["loop_spills"].match(name)) for name in loop)
    if case.variant == "mlk":
        loop, per_pair = [name for _, name, _ in lines], tile.warps * lanes / spec.chunk
    else:
        per_pair = tile.warps * lanes / (spec.query_tile * spec.key_tile)
    counted = Counter(kind for name in loop for kind, pattern in _KINDS.items() if pattern.match(name))
    names = ("exponentials", "arithmetic", "tensor_core")
    return Compiled(
        case,
        digest,
        tuple(tile),
        binary.metadata.shared,
        registers,
        stack,
        spills,
        round(len(loop) * per_pair, 2),
        **{name: round(counted[name] * per_pair, 3) for name in names},
        tensor_memory=getattr(binary.metadata, "tmem_size", 0) or 0,
    )


def _type_of(x: Any, path: tuple[int, ...], constants: dict[tuple[int, ...], Any], attributes: Any) -> Any:
    """The type of an argument as Triton's launcher sees it."""
    if isinstance(x, tuple):
        items = (_type_of(y, (*path, n), constants, attributes) for n, y in enumerate(x))
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    if isinstance(x, Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return _POINTERS[x.dtype]
    if isinstance(x, float):
        return "fp32"
    if x == 1:
        constants[path] = 1
        return "constexpr"
    if x % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if -(2**31) <= x < 2**31 else "i64"


def _read_nvidia(cubin: bytes) -> tuple[int, int, list[Instruction]]:
    """Registers, bytes of stack, and the instructions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _tool("cuobjdump", "--dump-resource-usage", str(path))
        text = _tool("nvdisasm", "-c", str(path))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    labels: dict[str, int] = {}
    raw: list[tuple[int, str, str | None]] = []
    pending: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"^(\.L_x?_?\w+):", line.strip()):
            pending.append(label[1])
        code = re.search(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", line)
        if code:
            address = int(code[1], 16)
            labels.update(dict.fromkeys(pending, address))
            pending = []
            jump = re.search(r"\((\.L\w+)\)", code[3]) if code[2].startswith("BRA") else None
            raw.append((address, code[2], jump[1] if jump else None))
    return int(found[1]), int(found[2]), [(at, name, labels.get(to or "")) for at, name, to in raw]


def _read_amd(text: str) -> tuple[int, int, list[Instruction]]:
    """The same of AMD's assembly."""
    registers = int(re.findall(r"\.vgpr_count:\s*(\d+)", text)[0])
    stack = int(re.findall(r"\.private_segment_fixed_size:\s*(\d+)", text)[0])
    labels: dict[str, int] = {}
    raw: list[tuple[int, str, str | None]] = []
    for number, line in enumerate(text.splitlines()):
        if label := re.match(r"^(\.LBB\w+):", line):
            labels[label[1]] = number
        elif code := re.match(r"^\t([a-z][\w]+)\s*(\.LBB\w+)?", line):
            jumps = code[1].startswith(("s_cbranch", "s_branch"))
            raw.append((number, code[1], code[2] if jumps else None))
    return registers, stack, [(at, name, labels.get(to or "")) for at, name, to in raw]


def main_loop(lines: list[Instruction]) -> list[str]:
    """The loop over full tiles: the innermost with most products."""
    loops = [(jump, at) for at, _, jump in lines if jump is not None and jump <= at]
    inner = [x for x in loops if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    bodies = [[name for at, name, _ in lines if first <= at <= last] for first, last in inner]

    def products(body: list[str]) -> int:
        on_tensor_cores = sum(bool(_KINDS["tensor_core"].match(name)) for name in body)
        return 1000 * on_tensor_cores + sum(bool(re.match(r"FFMA|v_(pk_)?fma", name)) for name in body)

    most = max(map(products, bodies), default=0)
    return min((body for body in bodies if products(body) * 2 > most), key=len, default=[])


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what is asked for, write the file, and say what is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="+", default=TARGETS, choices=TARGETS)
    parser.add_argument("--dtypes", nargs="+", default=tuple(DTYPES), choices=DTYPES)
    parser.add_argument("--widths", nargs="+", default=WIDTHS, type=int)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no kernel after these")
    parser.add_argument("--jobs", type=int, default=1, help="kernels to compile at a time")
    parser.add_argument("--json", type=Path, help="where to save; a run goes on from what is there")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    every = cases()
    wanted = set(cases(options.targets, options.dtypes, options.widths))
    earlier = _read(options.json)
    done: dict[Case, Compiled] = {}
    failures: dict[Case, list[str]] = {}
    stale: set[Case] = set()
    for case in every:
        if known := earlier.get(case):
            source, _, tile, _ = source_of(case)
            if known.tile == tuple(tile):
                done[case] = known
            if known.source != source:
                stale.add(case)
    stale &= done.keys()
    settings = {"targets": TARGETS, "dtypes": tuple(DTYPES), "widths": WIDTHS}
    head = {"benchmark": "triton", "settings": settings, "machine": asdict(describe())}
    for case, known in done.items():
        _note(case, known.errors, failures)
    due = [case for case in every if case in wanted and case not in done]
    due += [case for case in every if case in wanted and case in stale]
    stop = start + 60 * options.minutes
    for case, result in _results(due, options.jobs, stop):
        stale.discard(case)
        done.pop(case, None)
        failures.pop(case, None)
        if isinstance(result, Compiled):
            done[case] = result
        _note(case, result.errors if isinstance(result, Compiled) else [result], failures)
        if options.json:
            _save(options.json, head, every, done, failures, stale)
    if options.json:
        _save(options.json, head, every, done, failures, stale)
    left = _left(every, {*done, *failures})
    print("\n".join([f"{len(done)} kernels compiled, {len(failures)} with complaints", *left]))
    return 1 if failures else 0


def _note(case: Case, found: list[str], failures: dict[Case, list[str]]) -> None:
    if found:
        failures[case] = found
        print(f"{name_of(case)}: {', '.join(found)}", flush=True)


def _results(due: list[Case], jobs: int, stop: float) -> Iterator[tuple[Case, Compiled | str]]:
    """Each case with its kernel, or why there is none; no more after ``stop``."""
    if jobs == 1:
        for case in due:
            if time.monotonic() > stop:
                return
            yield case, _attempt(case)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for case, result in zip(due, pool.map(_attempt, due), strict=True):
            yield case, result
            if time.monotonic() > stop:
                pool.shutdown(cancel_futures=True)
                return


def _attempt(case: Case) -> Compiled | str:
    try:
        return compile_case(case)
    except Exception as error:  # whatever a compiler raises is the result
        return f"does not compile: {str(error)[-300:]}"


def _read(path: Path | None) -> dict[Case, Compiled]:
    """The kernels of an earlier run; those of an earlier source too, if their tile is the same."""
    from mgk.functional.mixture.backends.triton_backend.tiles import Tile

    if path is None or not path.is_file():
        return {}
    found = {}
    names = [field.name for field in fields(Compiled)[1:]]
    for row in json.loads(path.read_bytes())["rows"]:
        if row["experiment"] == "kernel":
            case = Case(**{field.name: row[field.name] for field in fields(Case)})
            row = {"source": "", "tensor_memory": 0, **row, "tile": tuple(Tile(*row["tile"]))}
            found[case] = Compiled(case, **{name: row[name] for name in names})
    return found


def _save(
    path: Path,
    head: dict[str, Any],
    every: list[Case],
    done: dict[Case, Compiled],
    failures: dict[Case, list[str]],
    stale: set[Case],
) -> None:
    rows = [done[case].row() for case in every if case in done]
    notes = [f"{name_of(case)}: {', '.join(found)}" for case, found in failures.items()]
    if stale:
        notes.append(f"{len(stale)} kernels were compiled from an earlier source, with the same tile")
    notes += _left(every, {*done, *failures})
    write_json(path, {**head, "rows": [*rows, *modelled(rows)], "notes": notes})


def _left(every: list[Case], done: set[Case]) -> list[str]:
    """Which kernels are not compiled, by target, type and width."""
    left = Counter((case.target, case.dtype, case.width) for case in every if case not in done)
    if not left:
        return []
    total = Counter((case.target, case.dtype, case.width) for case in every)
    wholly: dict[tuple[str, str], list[int]] = {}
    parts = []
    for target, dtype, width in total:
        if left[target, dtype, width] == total[target, dtype, width]:
            wholly.setdefault((target, dtype), []).append(width)
        elif number := left[target, dtype, width]:
            parts.append(f"{number} of {total[target, dtype, width]} of {target}, {dtype}, D = {width}")
    for (target, dtype), widths in wholly.items():
        parts.append(f"all of {target}, {dtype}, D = {', '.join(map(str, sorted(widths)))}")
    return [f"{left.total()} of {len(every)} kernels are not compiled: {'; '.join(parts)}"]


def name_of(case: Case) -> str:
    """The case in words."""
    name = f"{case.target} {case.variant} {case.kernel} D={case.width} M={case.mixtures} {case.dtype}"
    return f"{name} factored" if case.is_factored else name


if __name__ == "__main__":
    sys.exit(main())
