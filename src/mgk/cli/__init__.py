"""The command ``mgk``."""

import sys


def main() -> None:
    """Run the command; without its extra installed, say so and fail."""
    try:
        import rich  # noqa: F401  tables and progress need it later; say now that it is missing

        from mgk.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        print("mgk: the command needs typer and rich: pip install 'mgk[cli]'", file=sys.stderr)
        sys.exit(1)
    is_debug = "--debug" in sys.argv
    try:
        app(args=[argument for argument in sys.argv[1:] if argument != "--debug"], prog_name="mgk")
    except Exception as error:
        if is_debug:
            raise
        reason = f"{type(error).__name__}: {error}".strip().rstrip(":")
        print(f"mgk: this is a bug ({reason}); run it again with --debug for a report", file=sys.stderr)
        sys.exit(1)
