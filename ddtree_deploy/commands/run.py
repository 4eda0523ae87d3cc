"""Run a command function: give it the flags that all commands share, and turn how it ends into an exit code."""

from __future__ import annotations

import functools
import inspect
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, Literal, NoReturn

import typer

from ddtree_deploy.errors import DeployError, Interrupted
from ddtree_deploy.render.ui import Ui

PANEL = "Output"
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.", rich_help_panel=PANEL)]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only errors and the result.", rich_help_panel=PANEL)]
Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        show_default=False,
        rich_help_panel=PANEL,
        help="Name the steps; -vv: also messages.",
    ),
]
Color = Annotated[Literal["auto", "always", "never"], typer.Option("--color", help="When to use colours.", rich_help_panel=PANEL)]
NoProgress = Annotated[
    bool,
    typer.Option("--no-progress", envvar="DDTREE_NO_PROGRESS", help="Show no progress.", rich_help_panel=PANEL),
]


def _common(
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
    color: Color = "auto",
    no_progress: NoProgress = False,
) -> Ui:
    return Ui(json=as_json, quiet=quiet, verbose=verbose, color=color, progress=not no_progress)


COMMON = inspect.signature(_common, eval_str=True).parameters
CONTEXT = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


class Stopped(KeyboardInterrupt):
    """SIGTERM came: end like Ctrl-C, but with its own exit code."""


def _stop(_signal: int, _frame: object) -> NoReturn:
    # A second signal must end the run at once; the agent's lease cleans up on the host.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise Stopped


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def _state(ui: Ui) -> str:
    step = ui.last_step
    return f" while `{step.host}` was at: {step.what}" if step else " before anything was done"


def _left(ui: Ui) -> str | None:
    """Say what is left on the host when that is more than nothing: a switch that was made, or may have been."""
    step = ui.last_step
    if step is None or not step.what.startswith(("switch", "confirm")):
        return None
    return f"`{step.host}` goes back by itself unless it was confirmed: see `ddtree-deploy status {step.host}`, then run the same again"


def _aimed(problem: DeployError, command: str, host: object) -> DeployError:
    """Return the error; where it has its kind's own mend, that names this command and this host."""
    if problem.mend == problem.default_mend:
        problem.mend = problem.mend.replace("ddtree-deploy COMMAND", command)
        if isinstance(host, str) and host:
            problem.mend = re.sub(r"\b(HOST|TARGET)\b", lambda _match: host, problem.mend)
    return problem


def guard(ui: Ui, work: Callable[[], int | None], command: str = "ddtree-deploy", host: object = None) -> int:
    """Run `work` and return the exit code; what went wrong is printed here and nowhere else."""
    stopped = False

    def stop(number: int, frame: object) -> NoReturn:
        nonlocal stopped
        stopped = True
        _stop(number, frame)

    before = signal.signal(signal.SIGTERM, stop), signal.signal(signal.SIGINT, _interrupt)
    try:
        return work() or 0
    except Interrupted as problem:
        code = 143 if stopped else 130
        ui.error(problem, code)
        return code
    except DeployError as problem:
        ui.error(_aimed(problem, command, host))
        return problem.exit_code
    except KeyboardInterrupt:
        name, code = ("SIGTERM", 143) if stopped else ("SIGINT", 130)
        ui.error(Interrupted(f"stopped by {name}{_state(ui)}", mend=_left(ui)), code)
        return code
    except BrokenPipeError:
        # Who read our output has gone (`| head`): stay silent, also when Python flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as problem:
        ui.log.write("traceback", text=traceback.format_exc())
        if ui.verbose > 1:
            ui.say(traceback.format_exc().rstrip())
        ui.error(DeployError(f"internal error: {type(problem).__name__}: {problem}"))
        return DeployError.exit_code
    finally:
        ui.close()
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


def command(
    app: typer.Typer, name: str, *, examples: tuple[str, ...], panel: str | None = None, acts: bool = False
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Register a function `f(ui, ...)` as a command with the common flags, and its examples under `--help`.

    `acts` says that `--json` prints lines as the work goes on, and not one document.
    """
    # The plain help would otherwise reflow the examples (`\b` is its mark for "as it is").
    mark = "" if app.rich_markup_mode else "\b\n"
    epilog = mark + "Examples:\n" + "\n".join(f"  ddtree-deploy {example}" for example in examples)

    def register(function: Callable[..., int | None]) -> Callable[..., int | None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

        @functools.wraps(function)
        def run(context: typer.Context, **values: Any) -> None:
            ui = _common(**{key: values.pop(key) for key in COMMON})
            ui.acts = acts
            raise typer.Exit(guard(ui, lambda: function(ui, **values), context.command_path, values.get("name")))

        # With rich, typer keeps the ends of our source lines.
        run.__doc__ = "\n\n".join(" ".join(part.split()) for part in (function.__doc__ or "").split("\n\n"))
        # All that typer needs is in the signature; what it would evaluate once more costs 30 ms at every start.
        run.__annotations__ = {}
        shared = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in COMMON.values()]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [CONTEXT, *(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own), *shared]
        )
        app.command(name, epilog=epilog, rich_help_panel=panel)(run)
        return function

    return register
