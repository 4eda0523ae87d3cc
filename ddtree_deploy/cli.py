"""The command line: `ddtree-deploy COMMAND`."""

from __future__ import annotations

import gc
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

#: The modules of `commands/`, in the order of the help, and what each adds. A run loads the one that it needs.
FAMILIES = {
    "snapshots": ("snapshot", "ls", "show", "cache"),
    "export": ("export",),
    "push": ("diff", "push"),
    "place": ("put", "venvs"),
    "verify": ("verify",),
    "overlay": ("overlay",),
    "launch": ("launch", "logs", "stop", "restart"),
    "bench": ("bench", "tune"),
    "host_state": ("status", "rollback", "generations", "lock", "audit"),
    "machine": ("demo", "doctor", "hosts", "config"),
}


def _version(wanted: bool) -> None:
    if wanted:
        from ddtree_deploy import __version__

        typer.echo(f"ddtree-deploy {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Carry a known-good Python serving environment from one host to another.

    Snapshot it where it works, prove it on the target, switch it in one step, go back at any time.
    """


def build(argv: Sequence[str] = ()) -> typer.Typer:
    """Make the application, or as much of it as the command line `argv` needs.

    On a terminal its help is drawn with rich, elsewhere it is plain text.
    """
    app = typer.Typer(
        name="ddtree-deploy",
        no_args_is_help=True,
        rich_markup_mode="rich" if sys.stdout.isatty() else None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Exit codes: docs/exit-codes.md",
    )
    app.callback()(_root)
    for family in [name for name, commands in FAMILIES.items() if argv and argv[0] in commands] or FAMILIES:
        importlib.import_module(f"ddtree_deploy.commands.{family}").register(app)
    return app


def _usage(problem: typer.TyperException, argv: list[str]) -> int:
    """Print what typer found wrong with the command line, in the voice of every other error."""
    message = problem.format_message()
    if message.startswith("Usage:"):  # a group without a command: its help says all
        print(message, file=sys.stderr)
        return problem.exit_code
    from ddtree_deploy.errors import UsageProblem
    from ddtree_deploy.render.ui import Ui

    words = re.sub(r"'([^']*)'", r"`\1`", message[:1].lower() + message[1:]).rstrip(".")
    path = getattr(getattr(problem, "ctx", None), "command_path", "ddtree-deploy")
    Ui(json="--json" in argv).error(UsageProblem(words, mend=f"see `{path} --help`"))
    return problem.exit_code


def main() -> None:
    """Run the command line and end with its exit code."""
    # A run makes hundreds of thousands of records that live until its end; to look for cycles among them again and again takes
    # longer than to make them (benchmarks/scale.py).
    gc.set_threshold(100_000, 50, 1000)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files may be any bytes
    try:
        status = build(sys.argv[1:])(prog_name="ddtree-deploy", standalone_mode=False) or 0
        gc.freeze()  # nor does the interpreter look for them before it ends
        sys.exit(status)
    except typer.TyperException as problem:
        sys.exit(_usage(problem, sys.argv[1:]))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
