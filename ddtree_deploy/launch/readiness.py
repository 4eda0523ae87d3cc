"""Know that a server serves: its log followed, its health, real completions under a deadline, the algorithm it says is active."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddtree_deploy.errors import ServerNotReady
from ddtree_deploy.events import Emit, Note, Progress, Step
from ddtree_deploy.launch import phases, signatures
from ddtree_deploy.launch.argv import pairs
from ddtree_deploy.launch.models import OVER, Ready, Server
from ddtree_deploy.session import Session
from sglang_overlay.confirm import confirm

KEPT_LINES = 400
LOG_PIECES = 256
SHOWN_LINES = 12
POLL = 2.0
VERDICT_SECONDS = 10.0
#: A completion that takes longer than this is a hang: the prompts are short and so are the answers.
COMPLETION_SECONDS = 60.0
#: But the first may compile kernels (a FlashInfer module took 110 s).
FIRST_SECONDS = 300.0
PROMPTS = ("The capital of France is", "1, 2, 3, 4,", "def main(", "Once upon a time")


@dataclass(slots=True)
class Watch:
    """What is known of a server while it is waited for; `first` is called before each look, and may raise."""

    session: Session
    server: Server
    parse: Callable[[str, Mapping[str, Any]], Server]
    deadline: float
    emit: Emit
    offset: int = 0
    phase: phases.Phase = field(default_factory=phases.Phase)
    lines: list[str] = field(default_factory=list)
    first: Callable[[], None] = lambda: None

    @property
    def host(self) -> str:
        return self.session.host.name

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def poll(self, wait: float = POLL) -> None:
        """Take in what the log says anew, tell the phase, and raise ServerNotReady when the server is gone."""
        self.first()
        asked: dict[str, Any] = {"venv": self.session.host.venv, "name": self.server.record.name, "offset": self.offset}
        value = self.session.ask("serve-log", wait=wait, phase=self.server.phase, **asked).value
        self.offset = value["offset"]
        text = value["text"]
        self.lines += [line for line in text.replace("\r", "\n").splitlines() if line.strip()]
        del self.lines[:-KEPT_LINES]
        before, self.phase = self.phase, phases.follow(self.phase, text)
        if self.phase.name != before.name:
            self.emit(Step(self.host, f"load: {self.phase.name}"))
        if self.phase.percent >= 0 and self.phase != before:
            self.emit(Progress(self.host, f"load: {self.phase.name}", self.phase.percent, 100, "%"))
        mine, self.server = self.server.launch, self.parse(self.host, value["server"])
        if self.server.launch != mine:
            raise self.failure(f"it was stopped, and another launch took its place, by {self.server.who} at {self.server.started}")
        if self.server.phase in OVER or self.server.restarts:
            raise self.failure(f"the server ended before it was ready: {ending(self.server.last)}")

    def failure(self, message: str, mend: str | None = None) -> ServerNotReady:
        """Return the error for this server: the cause that its log names, and its last lines."""
        cause = signatures.find(self.lines, self.host)
        tail = self.lines[-SHOWN_LINES:]
        causes = [*tail]
        if cause:
            causes = [cause.text] + ([cause.line] if cause.line not in [line.strip() for line in tail] else []) + tail
        hint = cause.mend if cause else mend or f"see `ddtree-deploy logs {self.host}`"
        error = ServerNotReady(f"{self.host}: {message}", mend=hint, causes=tuple(causes))
        error.cause_id = cause.id if cause else ""  # type: ignore[attr-defined]
        return error

    def ask(self, path: str, body: Any = None, timeout: float = 30.0) -> dict[str, Any]:
        """Send one request to the server from its own host. Raises ServerNotReady when it is gone meanwhile."""
        limit = max(1.0, min(timeout, self.left()))
        where: dict[str, Any] = {"venv": self.session.host.venv, "name": self.server.record.name}
        answer: dict[str, Any] = self.session.ask("serve-request", body, path=path, timeout=limit, patience=limit + 60, **where).value
        if answer["error"] and not hangs(answer):
            # A line that broke may be the first sign of a death; the supervisor needs a moment to say so, and `poll` raises it.
            end = time.monotonic() + VERDICT_SECONDS
            while time.monotonic() < end:
                self.poll(0.5)
        if answer["phase"] in OVER or answer["phase"] == "restarting":
            self.poll(0.5)
            raise self.failure(f"the server ended at a request to {path}: {ending(self.server.last)}")
        return answer


def hangs(answer: Mapping[str, Any]) -> bool:
    """Tell whether a request got no answer in time (and not a broken line)."""
    return answer["error"].startswith("no answer") or "timed out" in answer["error"]


def ending(last: Mapping[str, Any] | None) -> str:
    """Say how a server ended: `exit status 1`, `SIGKILL`."""
    if not last:
        return "its supervisor is gone"
    return str(last.get("how") or last.get("error") or "unknown")


def wait(watch: Watch, algorithm: str, completions: int) -> Ready:
    """Follow a server until it is proved to serve. Raises ServerNotReady with the cause that its log names."""
    began = time.monotonic()
    while watch.server.phase != "serving":
        if watch.left() <= 0:
            raise watch.failure(f"not ready in time: still at `{watch.phase.name}`", "give it more with `--wait SECS`")
        watch.poll(min(POLL, max(0.1, watch.left())))
    watch.emit(Step(watch.host, "generate: /health_generate"))
    while True:
        answer = watch.ask("/health_generate", timeout=FIRST_SECONDS)
        if answer["status"] == 200:
            break
        if watch.left() <= 0 or hangs(answer):
            said = answer["error"] or f"HTTP {answer['status']}: {answer['body'][:200]}"
            raise watch.failure(f"it is healthy but does not generate: {said}")
        watch.poll(1.0)
    model = _model(watch)
    slowest = 0.0
    for number in range(completions):
        watch.emit(Progress(watch.host, "completions", number, completions, "completions"))
        slowest = max(slowest, _complete(watch, model, number))
    watch.emit(Progress(watch.host, "completions", completions, completions, "completions"))
    info = _info(watch)
    more = _confirmed(watch, info) if algorithm == "ddtree" else {}
    active = active_algorithm(info)
    if active and algorithm and active != algorithm:
        raise watch.failure(f"the server runs `{active}`, not `{algorithm}`", "look for a fallback in `ddtree-deploy logs`")
    if not active:
        watch.emit(Note(watch.host, "the server does not say which algorithm is active", "warn"))
    watch.poll(0.0)
    return Ready(watch.server, active, time.monotonic() - began, completions, slowest, {**detail(info), **more})


def _confirmed(watch: Watch, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the budgets that SGLang captured for DDTREE. Raises ServerNotReady when it decodes with something else.

    A router in front does not say what its replicas do, and a log without INFO has not the line of the self-test.
    """
    argv = watch.server.record.argv
    levels = [value for name, value, _words in pairs(argv) if name == "--log-level"]
    if "sglang.launch_server" not in argv or any(level not in ("debug", "info") for level in levels):
        return {}
    found = confirm(info, _whole_log(watch))
    if not found.active:
        raise watch.failure(f"it does not decode with DDTREE: {found.detail}", found.mend.replace("HOST", watch.host))
    return {"budget": ", ".join(map(str, found.budgets))}


def _whole_log(watch: Watch) -> Iterator[str]:
    """Yield the lines of this launch's log from its first; `watch` keeps only the last ones."""
    offset = 0
    for _ in range(LOG_PIECES):
        value = watch.session.ask("serve-log", venv=watch.session.host.venv, name=watch.server.record.name, offset=offset).value
        if not value["text"]:
            return
        offset = value["offset"]
        yield from value["text"].replace("\r", "\n").splitlines()


def _complete(watch: Watch, model: str, number: int) -> float:
    """Ask for one completion and return its seconds. Raises ServerNotReady when it hangs, fails, or is empty."""
    body = {"model": model, "prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": 8, "temperature": 0}
    answer = watch.ask("/v1/completions", body, COMPLETION_SECONDS if number else FIRST_SECONDS)
    what = f"completion {number + 1}"
    if answer["error"]:
        verb, mend = (
            ("hangs", "look for a hung rank in the log; the same launch without speculation tells whose fault it is")
            if hangs(answer)
            else ("breaks", None)
        )
        raise watch.failure(f"healthy, but {what} {verb}: {answer['error']}", mend)
    if answer["status"] != 200:
        raise watch.failure(f"{what} failed: HTTP {answer['status']}: {answer['body'][:200]}")
    try:
        tokens = json.loads(answer["body"])["usage"]["completion_tokens"]
    except (ValueError, KeyError, TypeError):
        raise watch.failure(f"{what} is not a completion: {answer['body'][:200]}") from None
    if not tokens:
        raise watch.failure(f"{what} has no token")
    return float(answer["seconds"])


def _model(watch: Watch) -> str:
    try:
        return str(json.loads(watch.ask("/v1/models")["body"])["data"][0]["id"])
    except (ValueError, KeyError, TypeError, IndexError):
        return "default"


def _info(watch: Watch) -> Mapping[str, Any]:
    for path in ("/server_info", "/get_server_info"):
        answer = watch.ask(path)
        if answer["status"] == 200:
            try:
                value = json.loads(answer["body"])
            except ValueError:
                continue
            if isinstance(value, dict):
                return value
    return {}


def active_algorithm(info: Mapping[str, Any]) -> str:
    """Return `ddtree`, `dflash`, `none` or what else a server says is active; empty when it says nothing."""
    if "mode" in info:  # the standalone server
        return {"plain": "none"}.get(str(info["mode"]), str(info["mode"]))
    if "speculative_algorithm" in info:
        return str(info["speculative_algorithm"] or "none").lower()
    return ""


def detail(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is worth telling of /server_info: budget, block, tp."""
    keys = (
        "budget",
        "block_size",
        "device",
        "dtype",
        "tp_size",
        "dp_size",
        "speculative_ddtree_budget",
        "speculative_num_draft_tokens",
        "version",
    )
    return {key: info[key] for key in keys if info.get(key) is not None and isinstance(info[key], (int, str))}
