"""Servers to talk to, one in a thread of this process, one as a user starts it; and what is asked of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from ddtree.server.app import Settings, build_app
from ddtree.server.engine import Engine, Generation, Request, run
from ddtree.server.metrics import Metrics
from ddtree.server.scheduler import Scheduler
from tests.fixtures.until import until

ROOT = Path(__file__).parents[2]
MODEL = "pair"
CHAT: Any = [{"role": "user", "content": "what does the quick brown fox do, line by line?"}]
PROMPT = "the quick brown fox jumps over the lazy dog, the quick brown"
LONG = {"prompt": PROMPT, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Answer:
    """A response as it came over the socket."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json()["error"]
        return error


@dataclass(frozen=True)
class Live:
    """Where a server listens."""

    port: int

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, timeout=120)

    def ask(self, path: str, body: Any = None, *, method: str = "", headers: Mapping[str, str] = {}) -> Answer:
        """Send one request and read the whole response; a body that is not bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method or ("GET" if body is None else "POST"), path, data, dict(headers))
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def metric(self, name: str, **labels: str) -> float:
        """Return one sample of /metrics, 0 when it is not there."""
        text = self.ask("/metrics").body.decode()
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    @contextlib.contextmanager
    def streaming(self, path: str, body: Mapping[str, Any]) -> Iterator[http.client.HTTPResponse]:
        """Hold a streamed answer open; leaving closes the connection, read or not."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}))
            yield connection.getresponse()
        finally:
            connection.close()


def events(raw: bytes | str) -> list[Any]:
    """Parse server-sent events; the last must be `[DONE]`, and is left out."""
    text = raw.decode() if isinstance(raw, bytes) else raw
    lines = text.split("\n\n")
    assert lines[-1] == "" and lines[-2] == "data: [DONE]", text[-200:]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def expected(engine: Engine, text: str, **changes: Any) -> tuple[str, Generation]:
    """Return what plain decoding writes."""
    wanted = {"max_tokens": 40, "ignore_eos": True} | changes
    generation = run(engine, Request(tuple(engine.tokenizer.encode(text)), **wanted))
    return generation.take_text(), generation


@contextlib.contextmanager
def serve(
    engine: Engine, *, max_running: int = 4, max_waiting: int = 64, api_key: str | None = None, max_body: int = 1 << 20
) -> Iterator[Live]:
    """Run the application on a free port in a thread."""
    metrics = Metrics(MODEL, engine.mode)
    scheduler = Scheduler(engine, max_running=max_running, max_waiting=max_waiting, observer=metrics)
    app = build_app(scheduler, metrics, Settings(MODEL, api_key, max_body, drain_seconds=5))
    config = uvicorn.Config(app, log_config=None, log_level="critical", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), name="uvicorn", daemon=True)
        thread.start()
        try:
            until(lambda: server.started, "the server starts")
            yield Live(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive(), "the server did not stop"


@dataclass
class Process:
    """A server started from the command line; `live` once it says where it listens."""

    popen: subprocess.Popen[str]
    live: Live
    said: list[str]

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    def wait(self, seconds: float = 90) -> int:
        return self.popen.wait(seconds)


def command(*argv: str, env: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    """Run `python -m ddtree.server` to its end."""
    full = [sys.executable, "-m", "ddtree.server", *argv]
    return subprocess.run(
        full, cwd=ROOT, env=environment(env), capture_output=True, text=True, timeout=200, check=False
    )


@contextlib.contextmanager
def started(*argv: str, env: Mapping[str, str] = {}) -> Iterator[Process]:
    """Start `python -m ddtree.server` on a free port, wait for its address, and end it in any case."""
    full = [sys.executable, "-m", "ddtree.server", "--port", "0", "--threads", "1", *argv]
    popen = subprocess.Popen(full, cwd=ROOT, env=environment(env), stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    ready = threading.Event()

    def listen() -> None:
        assert popen.stderr is not None
        for line in popen.stderr:
            said.append(line)
            if line.startswith("serving"):
                ready.set()
        ready.set()

    reader = threading.Thread(target=listen, daemon=True)
    reader.start()
    try:
        assert ready.wait(240), "the server says nothing"
        address = re.search(r"http://127\.0\.0\.1:(\d+)$", "".join(said).strip())
        assert address, "".join(said)
        yield Process(popen, Live(int(address[1])), said)
    finally:
        popen.kill()
        popen.wait(30)
        reader.join(30)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}
