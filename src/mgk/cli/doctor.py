"""``mgk doctor``: what is installed here and what works, to paste into a bug report."""

import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import typer

from mgk.data.errors import DataError
from mgk.data.manifest import data_folder, read_manifest, verify
from mgk.data.task_registry import TASKS

if TYPE_CHECKING:
    from torch import Tensor

_PACKAGES = {
    "numpy": "",
    "transformers": "train",
    "accelerate": "train",
    "safetensors": "train",
    "tokenizers": "train",
    "pydantic": "train",
    "tensorboard": "train",
    "matplotlib": "plot",
    "datasets": "hub",
}
# Of outputs and gradients of order 1, in float32.
_TOLERANCE = 1e-4


def doctor() -> None:
    """Show versions, threads, backends and data sets, and check attention against the equations."""
    # Imports torch, which takes a second or more.
    import torch

    from mgk._util.machine import describe
    from mgk.functional.mixture.backends import cpu_kernels

    machine = describe(torch.accelerator.current_accelerator() or torch.device("cpu"))
    typer.echo(str(machine))
    typer.echo(f"Python {sys.version.split()[0]} on {machine.system}, {sys.prefix}")
    typer.echo(f"packages: {', '.join(_packages())}")
    given = ", ".join(
        f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ
    )
    typer.echo(f"threads: {torch.get_num_threads()} of torch, {os.cpu_count()} cores{f', {given}' if given else ''}")
    typer.echo(f"accelerator: {machine.accelerator or 'none'}")
    typer.echo(f"instruction sets of the kernels: {', '.join(cpu_kernels.supported_instruction_sets()) or 'none'}")
    for line in _data():
        typer.echo(line)
    if not _check_backends():
        typer.echo("mgk: a backend disagrees with the equations: please report it with this text", err=True)
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
            wrong = [] if manifest is None else verify(root / task.name, manifest, thorough=False)
        except (DataError, OSError) as error:
            yield f"  {task.name}: {error}"
            continue
        if manifest is None:
            absent.append(task.name)
        else:
            counts = ", ".join(f"{split} {manifest.examples(split):,}" for split in manifest.splits)
            yield f"  {task.name}: {wrong[0] if wrong else counts}"
    yield f"  not here: {', '.join(absent) or 'none'} (mgk data list says where they come from)"


def _check_backends() -> bool:
    """Outputs and gradients of every backend beside those of the equations in float64; whether all agree."""
    import mgk

    truths = {name: _outcome(name, "reference", is_double=True) for name in _CASES}
    is_well = True
    for backend, status in mgk.available_backends().items():
        if status == "ready":
            errors = {}
            for case, truth in truths.items():
                try:
                    found = _outcome(case, backend, is_double=False)
                except ValueError:  # a call that this backend does not serve
                    continue
                pairs = zip(found, truth, strict=True)
                errors[case] = max(float((ours.double() - theirs).abs().max()) for ours, theirs in pairs)
            is_well = is_well and all(error < _TOLERANCE for error in errors.values())
            worst = max(errors, key=lambda case: errors[case])
            status = (
                f"ready, off by {errors[worst]:.0e} ({worst}) from the equations in float64,"
                f" outputs and gradients of {', '.join(errors)}"
            )
        typer.echo(f"backend {backend}: {status}")
    return is_well


_CASES: dict[str, dict[str, Any]] = {
    "mgk": {},
    "mgk causal": {"is_causal": True},
    "mgk hard": {"e_step": "hard"},
    "smgk": {},
    "smgk causal": {"is_causal": True},
    "linear": {},
    "linear causal": {"is_causal": True},
}


def _outcome(case: str, backend: str, *, is_double: bool) -> "list[Tensor]":
    """The output and the gradients of one call, always of the same inputs."""
    import torch

    import mgk

    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> "Tensor":
        numbers = torch.randn(shape, generator=generator)
        return (numbers.double() if is_double else numbers).requires_grad_()

    query, value, seen = draw(2, 3, 200, 32), draw(2, 3, 200, 32), draw(2, 3, 200, 32).detach()
    if case.startswith("smgk"):
        inputs = [query, draw(2, 3, 200, 32), draw(3, 2, 32), value]
        function: Any = mgk.shifted_mixture_attention
    else:
        inputs = [query, draw(2, 3, 2, 200, 32), value]
        function = mgk.linear_mixture_attention if case.startswith("linear") else mgk.mixture_attention
    output = function(*inputs, **_CASES[case], backend=backend)
    return [output.detach(), *torch.autograd.grad((output * seen).sum(), inputs)]
