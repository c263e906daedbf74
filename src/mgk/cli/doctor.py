"""``mgk doctor``: what is installed and what works here."""

import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import typer

from mgk.data.errors import DataError
from mgk.data.manifest import data_folder, read_manifest, verify
from mgk.data.task_registry import TASKS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PACKAGES = {  # with the extra that installs each
    "numpy": "",
    "transformers": "train",
    "accelerate": "train",
    "safetensors": "train",
    "tokenizers": "train",
    "pydantic": "train",
    "tensorboard": "train",
    "matplotlib": "plot",
    "datasets": "hub",
    "triton": "triton",
}
_CASES = ("mgk", "mgk causal", "mgk-hard", "smgk", "smgk causal", "mlk", "mlk causal")
_TOLERANCE = 1e-4  # of outputs and gradients of order 1, in float32


def doctor() -> None:
    """Show versions, threads, data sets; check every backend against the equations."""
    import torch

    from mgk._util.machine import describe
    from mgk.functional.mixture.backends import cpu_kernels

    # builds for GPUs have a current accelerator without a device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    machine = describe(accelerator or torch.device("cpu"))
    threads = [f"{torch.get_num_threads()} of torch", f"{os.cpu_count()} cores"]
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if name in os.environ:
            threads.append(f"{name}={os.environ[name]}")
    instruction_sets = ", ".join(cpu_kernels.supported_instruction_sets())
    typer.echo(str(machine))
    typer.echo(f"Python {sys.version.split()[0]} on {machine.system}, {sys.prefix}")
    typer.echo(f"packages: {', '.join(_packages())}")
    typer.echo(f"threads: {', '.join(threads)}")
    typer.echo(f"accelerator: {machine.accelerator or 'none'}")
    typer.echo(f"instruction sets of the kernels: {instruction_sets or 'none'}")
    for line in _data():
        typer.echo(line)
    agree = [_backends_agree(), _kernels_agree(accelerator or torch.device("cpu"))]
    if not all(agree):
        advice = "please report it with this text"
        typer.echo(f"mgk: a backend disagrees with the equations: {advice}", err=True)
        raise typer.Exit(1)


def _packages() -> Iterator[str]:
    for name, extra in _PACKAGES.items():
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name} missing (pip install 'mgk[{extra}]')"


def _data() -> Iterator[str]:
    try:
        root = data_folder()
    except DataError as error:
        yield f"data: {error}"
        return
    yield f"data: {root}"
    absent = []
    for task in TASKS.values():
        if task.is_synthetic:
            continue
        try:
            manifest = read_manifest(root / task.name)
            wrong = [] if manifest is None else verify(root / task.name, manifest)
        except (DataError, OSError) as error:
            yield f"  {task.name}: {error}"
            continue
        if manifest is None:
            absent.append(task.name)
        else:
            yield f"  {task.name}: {wrong[0] if wrong else manifest.counts}"
    yield f"  not prepared: {', '.join(absent) or 'none'} (mgk data list says where they come from)"


def _backends_agree() -> bool:
    """Print every backend's largest error; whether all are small."""
    import torch

    import mgk

    truths = {case: _results(case, "reference", torch.float64) for case in _CASES}
    largest = 0.0
    for backend, status in mgk.available_backends().items():
        if status == "ready":
            errors = {}
            for case, truth in truths.items():
                try:
                    results = _results(case, backend, torch.float32)
                except ValueError:  # this backend does not serve the call
                    continue
                pairs = zip(results, truth, strict=True)
                errors[case] = max(float((x.double() - exact).abs().max()) for x, exact in pairs)
            if not errors:
                typer.echo(f"backend {backend}: ready, not for tensors on the CPU")
                continue
            worst = max(errors, key=lambda case: errors[case])
            largest = max(largest, errors[worst])
            bound = f"differs by at most {errors[worst]:.0e} ({worst}) from the equations in float64"
            status = f"ready, {bound}, outputs and gradients of {', '.join(errors)}"
        typer.echo(f"backend {backend}: {status}")
    return largest < _TOLERANCE


def _kernels_agree(device: "torch.device") -> bool:
    """Print the long self-check of the Triton kernels; whether it passed."""
    from mgk.functional import available_backends
    from mgk.functional.mixture.backends.triton_backend import backend, self_check

    is_served = device.type == "cuda" or backend.is_interpreted()
    if available_backends()["triton"] != "ready" or not is_served:
        return True
    agree = True
    for check in self_check.checks(device, quick=False):
        typer.echo(f"  triton, {check}{'' if check.passes else ': WRONG'}")
        agree = agree and check.passes
    return agree


def _results(case: str, backend: str, dtype: "torch.dtype") -> "list[Tensor]":
    """The output and the gradients of one call."""
    import torch

    from mgk.bench.calls import attend, make_inputs
    from mgk.bench.registry import AttentionShape

    name, _, causal = case.partition(" ")
    inputs = make_inputs(AttentionShape(heads=3, length=200), dtype=dtype)
    output = attend(name, inputs, backend=backend, is_causal=bool(causal))
    upstream = inputs.value.detach().flip(2)
    return [output.detach(), *torch.autograd.grad((output * upstream).sum(), inputs.leaves(name))]
