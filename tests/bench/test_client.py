"""The client that runs on the host, against servers that speak as the engines do, or break off in every way."""

from __future__ import annotations

import ast
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.agent.load import client
from ddtree_deploy.boot import agent_zip

VALUE = {"max_tokens": 8, "temperature": 0, "seconds": 30}


@contextmanager
def speaking(*events: Any, status: int = 200, key: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Serve these events to every POST: a dict is one, a string is written as it is, an Event is waited for."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, json.loads(body)))
            allowed = not key or self.headers.get("Authorization") == f"Bearer {key}"
            self.send_response(status if allowed else 401)
            self.end_headers()
            for event in events if allowed else ():
                if isinstance(event, threading.Event):
                    event.wait(60)
                    continue
                self.wfile.write(event.encode() if isinstance(event, str) else f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


def ask(url: str, *argv: str) -> dict[str, Any]:
    launch = {"url": url, "argv": ["python", "-m", *(argv or ("sglang.launch_server",))]}
    return client.Server(launch).ask(3, "Hello", VALUE, time.monotonic())


def said(text: str, tokens: int, passes: int, finish: Any = None) -> dict[str, Any]:
    return {"text": text, "meta_info": {"completion_tokens": tokens, "spec_verify_ct": passes, "finish_reason": finish}}


DONE = "data: [DONE]\n\n"
END = {"type": "length", "length": 8}
STANDALONE = ("ddtree.server", "--tiny")


def test_sglang_repeats_the_text_and_counts_in_each_event() -> None:
    with speaking(said("a", 1, 0), said("a bc", 4, 1), said("a bc", 4, 1), said("a bcdef", 8, 2, END), DONE) as (url, asked):
        row = ask(url)
    assert (row["text"], row["tokens"], row["rounds"], row["error"], row["prompt"]) == ("a bcdef", 8, 2, "", 3)
    assert len(row["gaps"]) == 2  # an event without a new token is no piece
    assert row["began"] <= row["first"] <= row["ended"] and sum(row["gaps"]) == pytest.approx(row["ended"] - row["first"], abs=1e-4)
    ((path, body),) = asked
    assert path == "/generate" and body == {"text": "Hello", "sampling_params": {"max_new_tokens": 8, "temperature": 0}, "stream": True}


def test_sglang_that_streams_increments_and_one_that_does_not_speculate() -> None:
    with speaking(said("a", 1, 0), said("a", 2, 0, END), DONE) as (url, _asked):
        assert ask(url, "sglang.launch_server", "--incremental-streaming-output")["text"] == "aa"
        assert ask(url)["text"] == "a" and ask(url)["rounds"] is None


def test_the_standalone_server_counts_at_the_end() -> None:
    pieces = [{"choices": [{"text": text}]} for text in ("a", " b", "")]
    usage = {"choices": [], "usage": {"completion_tokens": 7, "ddtree": {"rounds": 3}}}
    with speaking(*pieces, usage, DONE, key="s3cret") as (url, asked):
        row = ask(url, *STANDALONE, "--api-key", "s3cret")
        refused = ask(url, *STANDALONE)
    assert (row["text"], row["tokens"], row["rounds"], len(row["gaps"])) == ("a b", 7, 3, 1)
    assert asked[0][0] == "/v1/completions" and asked[0][1]["stream_options"] == {"include_usage": True}
    assert "HTTP 401" in refused["error"] and refused["first"] is None


@pytest.mark.parametrize(
    ("events", "status", "why"),
    [
        ((said("a", 1, 0),), 200, "the stream ended early"),
        ((said("a", 1, 0), DONE), 200, "the answer broke off"),
        (({"error": {"message": "out of memory"}}, DONE), 200, "out of memory"),
        (("data: {\n\n",), 200, "JSONDecodeError"),
        (({"text": "no counts"}, DONE), 200, "KeyError"),
        (("busy",), 429, "HTTP 429: busy"),
    ],
)
def test_an_answer_that_is_none_says_why(events: tuple[Any, ...], status: int, why: str) -> None:
    with speaking(*events, status=status) as (url, _asked):
        row = ask(url)
    assert why in row["error"] and row["tokens"] == 0


def test_nobody_listens() -> None:
    with speaking() as (url, _asked):
        pass
    assert "ConnectionRefusedError" in ask(url)["error"]


def test_pieces_are_timed_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [b'data: {"n": 1}', b"", b'data: {"n": 2}', b"data: [DONE]"]
    now = [0.0]

    class Response:
        def readline(self, _limit: int) -> bytes:
            now[0] += 0.25
            return lines.pop(0) + b"\n"

    monkeypatch.setattr(client.time, "monotonic", lambda: now[0])
    assert list(client._events(Response())) == [(0.25, {"n": 1}), (0.75, {"n": 2})]  # type: ignore[arg-type]


@pytest.mark.parametrize("path", sorted(Path(client.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_it_is_standard_library_for_python_3_9(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert all(name.startswith("ddtree_deploy.agent") or name.split(".")[0] in sys.stdlib_module_names for name in names)


def test_it_rides_only_with_the_bench() -> None:
    assert b"load/client" not in agent_zip(("serving",)) and b"load/client" in agent_zip(("serving", "load"))
