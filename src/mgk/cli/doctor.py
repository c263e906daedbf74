"""``mgk doctor``: what is installed here and what works, to paste into a bug report."""

import typer


def doctor() -> None:
    """Show versions, threads and backends, and check attention against the reference."""
    # Imports torch, which takes a second or more.
    import torch

    import mgk
    from mgk.bench.machine import describe
    from mgk.functional import kernels

    typer.echo(str(describe(torch.device("cpu"))))
    sets = kernels.supported_instruction_sets()
    typer.echo(f"instruction sets of the kernels: {', '.join(sets) or 'none'}")
    torch.manual_seed(0)
    query, keys = torch.randn(2, 4, 300, 32), torch.randn(2, 4, 2, 300, 32)
    truth = mgk.mixture_attention(query.double(), keys.double(), query.double(), backend="reference")
    is_well = True
    for name, status in mgk.available_backends().items():
        if status == "ready":
            error = (mgk.mixture_attention(query, keys, query, backend=name).double() - truth).abs().max().item()
            is_well = is_well and error < 1e-5
            status = f"ready, off by {error:.0e} from the equations in float64"
        typer.echo(f"backend {name}: {status}")
    if not is_well:
        typer.echo("mgk: a backend disagrees with the equations: please report it with this text", err=True)
        raise typer.Exit(1)
