"""The one place that writes to the terminal: data to stdout, everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from ddtree_deploy.errors import DeployError, UsageProblem
from ddtree_deploy.events import Event, Progress, Step
from ddtree_deploy.logs import DebugLog
from ddtree_deploy.render.progress import Bars, Lines
from ddtree_deploy.render.table import CONTROL, JSON_CONTROL, Column, laid_out
from ddtree_deploy.render.words import error_lines

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"error": "bold red", "hint": "cyan", "warning": "yellow"}


class Ui:
    """How one run talks: `json`, `quiet`, `verbose` (0-2), `color` (auto, always, never), `progress`.

    With `json` a command that reads prints one document; one that acts (`acts`) prints a line an event and a last line
    of type `result` or `error`.
    """

    def __init__(
        self,
        *,
        json: bool = False,
        quiet: bool = False,
        verbose: int = 0,
        color: str = "auto",
        progress: bool = True,
    ) -> None:
        self.json = json
        self.acts = False
        self.quiet = quiet
        self.verbose = verbose
        self.color = color
        self.log = DebugLog()
        self.last_step: Step | None = None
        self._lock = threading.RLock()
        self._tenths: dict[tuple[str, str], int] = {}
        wanted = progress and not json and not quiet
        self._progress: Bars | Lines | None = None
        if wanted and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            self._progress = Bars(self._console(sys.stderr))
        elif wanted:
            self._progress = Lines(self.say)

    def _console(self, file: TextIO) -> Console:
        from rich.console import Console

        forced = {"always": True, "never": False}.get(self.color)
        return Console(
            file=file,
            highlight=False,
            soft_wrap=True,
            force_terminal=True if forced else None,
            no_color=None if forced is None else not forced,
        )

    def _styled(self, file: TextIO) -> bool:
        """Tell whether colours go to `file`; without them rich is not even imported."""
        if self.color != "auto":
            return self.color == "always"
        if os.environ.get("FORCE_COLOR"):
            return True
        return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def width(self, file: TextIO) -> int | None:
        """Return how wide the terminal is that `file` goes to, or None: what reads a pipe wants whole lines."""
        if not file.isatty():
            return None
        with contextlib.suppress(ValueError, OSError):
            return int(os.environ.get("COLUMNS") or os.get_terminal_size(file.fileno()).columns) or None
        return None

    def _write(self, file: TextIO, text: str, style: str = "") -> None:
        with self._lock:
            if self._progress:
                self._progress.stop()
            text = text.translate(CONTROL)
            if style and self._styled(file):
                from rich.text import Text

                self._console(file).print(Text(text, style=style))
            else:
                file.write(text + "\n")
                file.flush()

    def _write_json(self, value: Any, indent: int | None = None) -> None:
        self._write(sys.stdout, json.dumps(value, indent=indent, ensure_ascii=False).translate(JSON_CONTROL))

    # -- data: stdout

    def data(self, text: str, style: str = "") -> None:
        """Print a line that the user asked for; not with `--json`."""
        if not self.json:
            self._write(sys.stdout, text, style)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], styles: Sequence[str] = ()) -> None:
        """Print a table that the user asked for; not with `--json`."""
        if self.json:
            return
        width = self.width(sys.stdout)
        heading, *body = laid_out(columns, rows, width)
        if width is not None:
            heading.append("─" * max(len(line) for lines in (heading, *body) for line in lines))
        for lines, style in zip([heading, *body], ["bold", *(styles or [""] * len(rows))], strict=True):
            for line in lines:
                self._write(sys.stdout, line, style)

    def document(self, kind: str, value: Mapping[str, Any]) -> None:
        """Print the answer of a reading command as one JSON document; only with `--json`."""
        if self.json:
            from ddtree_deploy.render import as_json

            self._write_json(as_json.document(kind, value), indent=2)

    def json_line(self, value: Mapping[str, Any]) -> None:
        """Print one JSON line; only with `--json`, and only for a command that acts."""
        if self.json and self.acts:
            self._write_json(value)

    def result(self, **fields: Any) -> None:
        """Print the last JSON line of a command that did what was asked; only with `--json`."""
        if self.json:
            from ddtree_deploy.render import as_json

            self.json_line({"type": "result", "schema": as_json.SCHEMA, "code": 0, **as_json.plain(fields)})

    # -- words: stderr

    def say(self, text: str, style: str = "") -> None:
        """Tell something beside the data; not with `-q`."""
        if not self.quiet:
            self._write(sys.stderr, text, style)

    def warn(self, text: str) -> None:
        """Tell something that needs attention, also with `-q`."""
        self.log.write("warning", text=text)
        self._write(sys.stderr, f"warning: {text}", STYLES["warning"])

    def error(self, problem: DeployError, code: int | None = None) -> None:
        """Print an error, its causes, its mend and the log; with `--json` also as the last line of stdout."""
        from ddtree_deploy.render import as_json

        code = problem.exit_code if code is None else code
        if self.log.path or not isinstance(problem, UsageProblem):
            self.log.write("error", error=problem.kind, message=problem.message, causes=problem.causes, code=code)
        for line in error_lines(problem, self.log.path):
            self._write(sys.stderr, line, STYLES.get(line.partition(":")[0], ""))
        if self.json:
            self._write_json(as_json.error(problem, code, self.log.path))

    def emit(self, event: Event) -> None:
        """Show an event of the work: a bar, a line, or a JSON line; always a line of the log."""
        from ddtree_deploy.render import as_json

        with self._lock:
            if isinstance(event, Progress):
                self._show_progress(event)
                return
            fields = as_json.event(event)
            self.log.write(fields.pop("type"), **fields)
            if isinstance(event, Step):
                self.last_step = event
                self.json_line(as_json.event(event))
                if self.verbose:
                    self.say(f"{event.host}: {event.what}")
                if self._progress:
                    self._progress.step(event.host, event.what)
            elif event.level == "warn":
                self.json_line(as_json.event(event))
                self.warn(f"{event.host}: {event.text}" if event.host else event.text)
            elif event.level != "debug" or self.verbose > 1:
                self.json_line(as_json.event(event))
                self.say(f"{event.host}: {event.text}" if event.host else event.text)

    def _show_progress(self, event: Progress) -> None:
        from ddtree_deploy.render import as_json

        if self._progress:
            self._progress.update(event)
        tenth = 10 * event.done // event.total if event.total else 0
        if tenth != self._tenths.get((event.host, event.what), 0):
            self._tenths[event.host, event.what] = tenth
            self.log.write("progress", **as_json.fields(event))
            self.json_line(as_json.event(event))

    def can_ask(self) -> bool:
        """Tell whether there is somebody to ask."""
        return sys.stdin.isatty() and sys.stderr.isatty() and not self.json

    def confirm(self, question: str, yes: bool) -> bool:
        """Ask before something that disturbs or deletes; raise UsageProblem instead if nobody can answer."""
        if yes:
            return True
        if not self.can_ask():
            raise UsageProblem(f"confirmation needed and there is no terminal: {question}", mend="add `-y`, or set `DDTREE_YES=1`")
        with self._lock:
            if self._progress:
                self._progress.stop()
            sys.stderr.write(f"{question} [y/N] ")
            sys.stderr.flush()
            answer = sys.stdin.readline()
        return answer.strip().lower() in ("y", "yes")

    def close(self) -> None:
        """Take the progress away and close the log."""
        with self._lock:
            if self._progress:
                self._progress.stop()
            self.log.close()
