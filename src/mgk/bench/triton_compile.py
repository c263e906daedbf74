"""Every Triton kernel compiled for real GPUs, without one: what the assembler made of it.

``python -m mgk.bench.triton_compile`` compiles for NVIDIA A100 (sm_80), H100 (sm_90), B200 (sm_100) and AMD MI300
(gfx942), reads registers, shared memory, spills and the instructions of the main loop, and fails if a kernel does not
compile, does not fit, spills in its loop, or multiplies half-precision tiles off the tensor cores.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Bytes of shared memory that a program may use.
SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
TARGETS = tuple(SHARED_LIMITS)
WIDTHS = (32, 64, 128)
MIXTURES = (1, 2, 4)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
VARIANTS = ("softmax", "mgk", "mgk-hard", "smgk")
PASSES = ("forward", "keys", "queries")
_POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_TENSOR_CORE = re.compile(r"^(HMMA|HGMMA|UTC\w*MMA|OMMA|v_mfma)")
_EXPONENTIAL = re.compile(r"^(MUFU\.EX2|v_exp)")
_SPILL = re.compile(r"^(STL|LDL|scratch_store|scratch_load)")


@dataclass(frozen=True)
class Case:
    """One kernel to compile."""

    target: str
    variant: str
    kernel: str  # "forward", "keys" or "queries" (the two backward kernels), "decode", "counts" or "features"
    width: int
    mixtures: int
    dtype: str
    is_causal: bool = False
    allows_tf32: bool = False
    is_factored: bool = (
        False  # smgk without the fallback to M exponentials: what tiles with small spreads execute
    )


@dataclass(frozen=True)
class Compiled:
    """What the assembler made of a kernel; counts are per (query, key) pair in the loop over full tiles."""

    case: Case
    tile: tuple[int, int, int, int]  # queries, keys, warps, stages
    shared: int  # bytes
    registers: int
    spills: int  # bytes of stack in all
    loop_spills: int  # spill instructions in the loop
    instructions: float
    exponentials: float
    tensor_core: float  # tensor-core instructions
    seconds: float = 0.0

    @property
    def errors(self) -> list[str]:
        """What is not as it must be."""
        case, found = self.case, []
        if self.shared > SHARED_LIMITS[case.target]:
            found.append(f"{self.shared} bytes of shared memory, {SHARED_LIMITS[case.target]} at most")
        if self.loop_spills:
            found.append(f"{self.loop_spills} spill instructions in the loop")
        uses_products = case.kernel in PASSES
        wants_tensor_cores = uses_products and (case.dtype != "float32" or case.allows_tf32)
        if wants_tensor_cores and self.tensor_core == 0:
            found.append("no tensor-core instruction in the loop")
        return found


def cases(targets: Iterable[str] = TARGETS) -> Iterator[Case]:
    """Every kernel at every width, number of components and dtype."""
    for target in targets:
        for dtype in DTYPES:
            for width in WIDTHS:
                for variant in VARIANTS:
                    for mixtures in MIXTURES:
                        if (variant == "softmax") != (mixtures == 1):
                            continue
                        for kernel in PASSES:
                            yield Case(target, variant, kernel, width, mixtures, dtype)


def meta_problem(case: Case, length: int = 4096) -> Any:
    """A problem of the case without memory."""
    from mgk.functional.mixture.backends.triton_backend.launch import Problem

    dtype = DTYPES[case.dtype]
    is_shifted = case.variant == "smgk"
    num_queries = 1 if case.kernel == "decode" else length

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return Problem(
        query=empty(2, 16, num_queries, case.width),
        keys=empty(2, 16, 1 if is_shifted else case.mixtures, length, case.width),
        value=empty(2, 16, length, case.width),
        shifts=empty(16, case.mixtures, case.width) if is_shifted else None,
        log_prior=None if case.variant == "softmax" else empty(1, 16, case.mixtures, 1, dtype=torch.float32),
        variance=empty(1, 1, 1, 1, dtype=torch.float32),
        mask=None,
        segments=None,
        seed=None,
        is_dot=case.variant == "softmax",
        is_hard=case.variant == "mgk-hard",
        left=None,
        right=0 if case.is_causal else None,
        dropout_p=0.0,
    )


def launches(case: Case) -> dict[str, tuple[Any, ...]]:
    """The kernels that a call launches, by name: kernel, arguments, specification and tile."""
    from mgk.functional.mixture.backends.triton_backend import launch

    found: dict[str, tuple[Any, ...]] = {}

    def record(kernel: Any, grid: Any, arguments: Any, spec: Any, tile: Any) -> None:
        found[kernel.fn.__name__] = (kernel, arguments, spec, tile)

    problem = meta_problem(case)
    with launch.launching_with(record, case.target):
        if case.kernel == "decode":
            launch.decode(problem)
        elif case.kernel == "counts":
            launch.counts(problem, None)
        else:
            result = launch.forward(problem)
            launch.backward(torch.empty_like(result.out), None, problem, result)
    return found


KERNEL_NAMES = {
    "forward": "forward",
    "keys": "keys_backward",
    "queries": "queries_backward",
    "decode": "decode",
    "counts": "counts",
    "features": "key_features",
}


def compile_case(case: Case, tile: Any = None) -> Compiled:
    """Compile the kernel of a case, with its own tile or another."""
    import time

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mgk.functional.mixture.backends.triton_backend import launch

    kernel, arguments, spec, own_tile = launches(case)[KERNEL_NAMES[case.kernel]]
    tile = own_tile if tile is None else tile
    spec = replace(
        spec, query_tile=tile.queries, key_tile=tile.keys, precision="tf32" if case.allows_tf32 else "ieee"
    )
    if case.kernel == "decode":
        spec = replace(spec, query_tile=1)
    if case.is_factored:
        spec = replace(spec, max_spread=float("inf"))
    constants: dict[tuple[int, ...], Any] = {(len(arguments),): launch.compile_time(spec)}
    attributes: dict[tuple[int, ...], Any] = {}
    types = tuple(_type_of(x, (n,), constants, attributes) for n, x in enumerate(arguments))
    signature = dict(zip(kernel.arg_names, (*types, "constexpr"), strict=True))
    is_amd = case.target.startswith("gfx")
    target = GPUTarget("hip", case.target, 64) if is_amd else GPUTarget("cuda", int(case.target[3:]), 32)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    start = time.perf_counter()
    source = ASTSource(kernel, signature, constants, attributes)
    binary = triton.compile(source, target=target, options=options)
    seconds = time.perf_counter() - start
    pairs = tile.queries * tile.keys
    if is_amd:
        registers, spills, lines = _read_amd(binary.asm["amdgcn"])
        per_pair = tile.warps * 64 / pairs
    else:
        registers, spills, lines = _read_nvidia(binary.asm["cubin"])
        per_pair = tile.warps * 32 / pairs
    loop = main_loop(lines)
    counted = Counter(_kind(name) for name in loop)
    return Compiled(
        case=case,
        tile=tuple(tile),
        shared=binary.metadata.shared,
        registers=registers,
        spills=spills,
        loop_spills=counted["spill"],
        instructions=round(len(loop) * per_pair, 2),
        exponentials=round(counted["exponential"] * per_pair, 2),
        tensor_core=round(counted["tensor core"] * per_pair, 4),
        seconds=round(seconds, 1),
    )


def _kind(name: str) -> str:
    for kind, pattern in (("tensor core", _TENSOR_CORE), ("exponential", _EXPONENTIAL), ("spill", _SPILL)):
        if pattern.match(name):
            return kind
    return "other"


def _type_of(x: Any, path: tuple[int, ...], constants: dict[tuple[int, ...], Any], attributes: Any) -> Any:
    """The type of an argument as Triton's launcher sees it: aligned pointers, multiples of 16, ones as constants."""
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


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _read_nvidia(cubin: bytes) -> tuple[int, int, list[tuple[int, str, int | None]]]:
    """Registers, bytes of stack, and the instructions as (address, name, target of a branch)."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _output(_tool("cuobjdump"), "--dump-resource-usage", str(path))
        text = _output(_tool("nvdisasm"), "-c", str(path))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    labels: dict[str, int] = {}
    raw: list[tuple[int, str, str | None]] = []
    pending: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"^(\.L_x?_?\w+):", line.strip()):
            pending.append(label[1])
        if code := re.search(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", line):
            address = int(code[1], 16)
            labels.update(dict.fromkeys(pending, address))
            pending = []
            jump = re.search(r"\((\.L\w+)\)", code[3]) if code[2].startswith("BRA") else None
            raw.append((address, code[2], jump[1] if jump else None))
    lines = [(at, name, labels.get(label) if label else None) for at, name, label in raw]
    return int(found[1]), int(found[2]), lines


def _read_amd(text: str) -> tuple[int, int, list[tuple[int, str, int | None]]]:
    """The same of AMD's assembly."""
    registers = int(re.findall(r"\.vgpr_count:\s*(\d+)", text)[0])
    spills = int(re.findall(r"\.vgpr_spill_count:\s*(\d+)", text)[0]) * 4
    labels: dict[str, int] = {}
    raw: list[tuple[int, str, str | None]] = []
    for number, line in enumerate(text.splitlines()):
        if label := re.match(r"^(\.LBB\w+):", line):
            labels[label[1]] = number
        elif code := re.match(r"^\t([a-z][\w]+)\s*(\.LBB\w+)?", line):
            jumps = code[1].startswith(("s_cbranch", "s_branch"))
            raw.append((number, code[1], code[2] if jumps else None))
    return registers, spills, [(at, name, labels.get(label) if label else None) for at, name, label in raw]


def main_loop(lines: list[tuple[int, str, int | None]]) -> list[str]:
    """The names in the loop over full tiles: the innermost loop with most products, of those the shortest."""
    loops = [(jump, at) for at, _, jump in lines if jump is not None and jump <= at]
    inner = [x for x in loops if not any(y != x and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    bodies = [[name for at, name, _ in lines if first <= at <= last] for first, last in inner]
    if not bodies:
        return []

    def products(body: list[str]) -> int:
        return sum(bool(_TENSOR_CORE.match(name) or re.match(r"FFMA|v_(pk_)?fma", name)) for name in body)

    most = max(map(products, bodies))
    return min((body for body in bodies if products(body) * 2 > most), key=len)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def record(compiled: Compiled) -> dict[str, Any]:
    """A row of the JSON file."""
    row = asdict(compiled)
    row.pop("seconds")
    return {**row.pop("case"), **row}
