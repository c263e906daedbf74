"""A few kernels compiled for real GPUs: they fit, do not spill in their loop, and use tensor cores.

``make triton-compile`` compiles all of them.
"""

import json
from pathlib import Path

import pytest

from mgk.bench.triton_model import cycles, modelled, products

pytest.importorskip(
    "triton",
    minversion="3.7",
    reason="the Triton backend is tested where triton 3.7 or later is installed: pip install 'mgk[triton]'",
)

from mgk.bench import triton_compile
from mgk.bench.triton_compile import Case, Compiled, compile_case, main_loop

CASES = (
    Case("sm_80", "mgk", "keys", 64, 2, "float16"),
    Case("sm_90", "mgk", "forward", 64, 2, "bfloat16"),
    Case("sm_100", "softmax", "forward", 64, 1, "float16"),
    Case("gfx942", "mgk", "queries", 64, 2, "float16"),
    Case("sm_80", "smgk", "features", 64, 2, "float16"),
    Case("sm_80", "mlk", "key_gradients", 64, 2, "bfloat16"),
    Case("sm_90", "mlk", "outputs", 64, 2, "bfloat16"),
)


@pytest.mark.parametrize("case", CASES, ids=triton_compile.name_of)
def test_a_kernel_fits_and_does_not_spill(case: Case) -> None:
    compiled = compile_case(case)
    assert compiled.errors == []
    if case.kernel in triton_compile.PASSES:
        # as many exponentials as components: no warp repeats another's work
        assert 0.9 * case.mixtures <= compiled.exponentials <= 1.1 * case.mixtures
        assert compiled.instructions > compiled.tensor_core > 0


def test_the_main_loop_has_most_products() -> None:
    names = ["MOV", "HMMA", "BRA", "HMMA", "HMMA", "BRA", "FFMA", "BRA"]
    jumps = [None, None, 1, None, None, 3, None, 6]
    assert main_loop(list(zip(range(8), names, jumps, strict=True))) == ["HMMA", "HMMA", "BRA"]


def test_the_model_counts_products_and_halves_the_heads() -> None:
    assert [products(kernel, 2) for kernel in ("forward", "keys", "queries")] == [3, 6, 5]
    row = {"target": "sm_80", "dtype": "float16", "width": 64, "kernel": "forward", "is_factored": False}
    counts = {"exponentials": 1.0, "arithmetic": 4.0, "instructions": 12.8}
    softmax = {**row, **counts, "variant": "softmax", "mixtures": 1}
    mgk = {**row, **counts, "variant": "mgk", "mixtures": 2, "instructions": 25.6}
    assert cycles(softmax) == pytest.approx((0.125, 0.1))
    (found,) = modelled([softmax, mgk])
    assert (found["overlapped"], found["in_turn"]) == (0.8, pytest.approx(0.861))
    assert found["pessimistic"] == found["in_turn"]


def test_a_run_goes_on_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, compiled = tmp_path / "triton.json", []

    def compile_nothing(case: Case) -> Compiled:
        compiled.append(case)
        digest, _, tile, _ = triton_compile.source_of(case)
        return Compiled(case, digest, tuple(tile), 0, 0, 0, 0, 1.0, 1.0, 1.0, 1.0)

    monkeypatch.setattr(triton_compile, "compile_case", compile_nothing)
    monkeypatch.setattr(triton_compile, "cases", lambda *_: list(CASES[:2]))
    assert triton_compile.main(["--json", str(path), "--minutes", "0"]) == 0
    assert "2 of 2 kernels are not compiled" in json.loads(path.read_text())["notes"][0]
    for _ in range(2):
        assert triton_compile.main(["--json", str(path)]) == 0
    assert compiled == list(CASES[:2])
    report = json.loads(path.read_text())
    report["rows"][0]["source"] = "earlier"
    path.write_text(json.dumps(report))
    triton_compile.main(["--json", str(path), "--minutes", "0"])
    assert json.loads(path.read_text())["notes"][0].startswith("1 kernels were compiled from an earlier source")
    triton_compile.main(["--json", str(path)])
    assert compiled[2:] == [CASES[0]]
