"""``import mgk`` is light: what is heavy loads on first use."""

import subprocess
import sys

import pytest
import torch

import mgk

HEAVY = ("torch", "transformers", "matplotlib", "typer", "rich", "numpy")


def modules_after(code: str) -> set[str]:
    script = f"{code}\nimport sys\nprint(' '.join(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_the_package_alone_imports_nothing_heavy():
    assert not modules_after("import mgk; mgk.__version__; dir(mgk)").intersection(HEAVY)


def test_the_first_function_loads_no_compiler_and_no_other_library():
    loaded = modules_after(
        "import torch, mgk; x = torch.ones(1, 1, 99, 4); k = x.unsqueeze(2)\n"
        "for b, s in mgk.available_backends().items(): s == 'ready' and mgk.mixture_attention(x, k, x, backend=b)\n"
        "mgk.linear_mixture_attention(x, k, x, feature_map='favor'); mgk.m_step(x, k); mgk.nn.MixtureAttention(8, 2)"
    )
    assert not loaded.intersection({"transformers", "matplotlib", "typer", "rich"})
    # Before 2.13 the functions break graphs by torch.compiler.disable, which loads the compiler.
    assert torch.__version__ < (2, 13) or "torch._dynamo" not in loaded


def test_every_public_name_loads():
    for name in mgk.__all__:
        assert getattr(mgk, name) is not None
    assert set(mgk.__all__) <= set(dir(mgk))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'mixture_atention'"):
        mgk.mixture_atention  # noqa: B018
