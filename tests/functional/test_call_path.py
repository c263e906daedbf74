"""A call of the public function crosses few files on its way to the compiled kernel."""

import sys
from pathlib import Path

import pytest
import torch

import mgk
from support.cases import BACKENDS

PACKAGE = Path(mgk.__file__).parent


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the kernels are not built")
def test_mixture_attention_reaches_the_kernel_through_seven_files():
    query, keys = (
        torch.randn(1, 2, 300, 16, requires_grad=True),
        torch.randn(1, 2, 2, 300, 16, requires_grad=True),
    )
    files: set[Path] = set()

    def trace(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(path.relative_to(PACKAGE))

    def step():
        mgk.mixture_attention(query, keys, query, is_causal=True).sum().backward()

    step()  # imports
    sys.setprofile(trace)
    try:
        with torch.autograd.set_multithreading_enabled(False):  # the backward in this thread
            step()
    finally:
        sys.setprofile(None)
    assert Path("functional/mixture/backends/cpu_kernels.py") in files
    assert len(files) <= 7, sorted(map(str, files))
