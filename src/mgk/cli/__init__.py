"""The command ``mgk``."""

import sys
import traceback


def main() -> None:
    """Run the command; without its extra, exit with 1 and say so."""
    try:
        import rich  # noqa: F401  needed later; checked before any work

        from mgk.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        print("mgk: the command needs typer and rich: pip install 'mgk[cli]'", file=sys.stderr)
        sys.exit(1)
    is_debug = "--debug" in sys.argv
    try:
        app(args=[argument for argument in sys.argv[1:] if argument != "--debug"], prog_name="mgk")
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except Exception as error:
        code = 1
        reason = f"{type(error).__name__}: {error}".strip().rstrip(":")
        if is_debug:
            traceback.print_exc()
        else:
            print(f"mgk: this is a bug ({reason}); run it again with --debug for a report", file=sys.stderr)
    ranks = sys.modules.get("mgk.training.distributed")
    if ranks is not None and ranks.num_launched() > 1:
        ranks.hard_exit(code)
    sys.exit(code)
