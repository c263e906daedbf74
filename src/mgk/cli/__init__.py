"""The command ``mgk``."""

import os
import sys

from mgk._util import signals


def main() -> None:
    """Run the command and exit with its code: 0, 1, 2, or 128 + a signal."""
    first_signal = signals.raise_on_signals()
    code = 1
    try:
        code = _run()
        sys.stdout.flush()
    except BrokenPipeError:
        code = signals.BROKEN_PIPE
    except BaseException as error:
        if "--debug" in sys.argv:
            import traceback

            traceback.print_exc()
        elif first_signal() is None:
            reason = f"{type(error).__name__}: {error}".strip().rstrip(":")
            print(f"mgk: this is a bug ({reason}); run it again with --debug for a report", file=sys.stderr)
    if (number := first_signal()) is not None:
        code = 128 + number
    if code == signals.BROKEN_PIPE:  # what is left in the buffer has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    ranks = sys.modules.get("mgk.training.distributed")
    if ranks is not None and ranks.num_launched() > 1:
        ranks.hard_exit(code)
    sys.exit(code)


def _run() -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # for other encodings
            stream.reconfigure(errors="replace")
    for argument in sys.argv[1:]:
        try:
            argument.encode()
        except UnicodeEncodeError:
            print(f"mgk: the argument {argument!a} is not UTF-8 text", file=sys.stderr)
            return 2
    try:
        import rich  # noqa: F401  needed later; checked before any work

        from mgk.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        print("mgk: the command needs typer and rich: pip install 'mgk[cli]'", file=sys.stderr)
        return 1
    try:
        app(args=[argument for argument in sys.argv[1:] if argument != "--debug"], prog_name="mgk")
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # typer makes 1 of it
            return signals.BROKEN_PIPE
        return int(ended.code or 0)
    return 0
