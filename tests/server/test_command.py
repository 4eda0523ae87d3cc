"""The server as a user starts and stops it."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from ddtree.server.__main__ import api_key
from tests.fixtures.until import until
from tests.server.live import Process, command, events, started

LONG = {"prompt": "the quick brown fox jumps over the lazy dog", "temperature": 0, "ignore_eos": True}


def pair_arguments(pair: tuple[Path, Path]) -> list[str]:
    return ["--model", str(pair[0]), "--drafter", str(pair[1]), "--served-model-name", "pair"]


def test_what_cannot_be_started_says_why_at_once(tmp_path: Path) -> None:
    nothing = command("--port", "0")
    assert nothing.returncode == 2 and nothing.stderr == "error: name a model: either `--tiny` or `--model`\n"
    none = command("--tiny", "--max-running", "0")
    assert none.returncode == 2 and "--max-running: must be a whole number from 1: 0" in none.stderr
    (tmp_path / "key").write_text("\n")
    empty = command("--tiny", "--port", "0", "--api-key-file", str(tmp_path / "key"))
    assert empty.returncode == 2 and "error: cannot start: the API key is empty" in empty.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = command("--tiny", "--port", str(taken.getsockname()[1]))
    assert busy.returncode == 2 and "error: cannot start: " in busy.stderr and "in use" in busy.stderr


def test_help_names_every_option() -> None:
    said = command("--help")
    assert said.returncode == 0
    for option in ("--tiny", "--model", "--drafter", "--mode", "--budget", "--max-waiting", "--api-key-file"):
        assert option in said.stdout


def test_the_key_comes_from_the_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert api_key(None) is None
    monkeypatch.setenv("DDTREE_API_KEY", "from-env")
    assert api_key(None) == "from-env"
    (tmp_path / "key").write_text("from-file\n")
    assert api_key(tmp_path / "key") == "from-file"
    with pytest.raises(OSError, match="nope"):
        api_key(tmp_path / "nope")


def draining(server: Process) -> bool:
    """Tell whether new connections are refused, or answered with 503."""
    try:
        return server.live.ask("/health").status == 503
    except OSError:
        return True


@pytest.mark.slow
def test_it_serves_with_a_key_and_sigterm_finishes_what_it_began(pair: tuple[Path, Path]) -> None:
    with started(*pair_arguments(pair), env={"DDTREE_API_KEY": "s3cret"}) as server:
        live = server.live
        assert server.said[-1].startswith("serving `pair` (ddtree, budget 24, cpu) after")
        with pytest.raises(openai.AuthenticationError):
            live.client("wrong").models.list()
        assert [m.id for m in live.client("s3cret").models.list().data] == ["pair"]
        # Bound to this machine only, unless told otherwise.
        with socket.socket() as probe, pytest.raises(OSError):
            probe.settimeout(5)
            probe.connect(("127.0.0.2", live.port))  # loopback has many addresses
        got: list[list[Any]] = []
        key = {"Authorization": "Bearer s3cret"}

        def ask() -> None:
            body = {**LONG, "max_tokens": 300, "stream": True}
            got.append(events(live.ask("/v1/completions", body, headers=key).body))

        asker = threading.Thread(target=ask)
        asker.start()
        until(lambda: live.metric("ddtree_round_tokens_count") > 0, "the answer began")
        server.signal(signal.SIGTERM)
        until(lambda: draining(server), "new work is refused")
        asker.join(120)
        assert server.wait() == 0, server.said
        assert got and got[0][-1]["choices"][0]["finish_reason"] == "length"
        assert not any("Traceback" in line for line in server.said), "".join(server.said)


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-file\n")
    arguments = [*pair_arguments(pair), "--api-key-file", str(tmp_path / "key"), "--mode", "plain"]
    with started(*arguments) as server:
        live = server.live
        wanted: Any = {"model": "pair", "prompt": LONG["prompt"], "max_tokens": 1900, "stream": True}
        stream = live.client("from-file").completions.create(**wanted, extra_body={"ignore_eos": True})
        next(iter(stream))
        server.signal(signal.SIGINT)
        until(lambda: draining(server), "new work is refused")
        server.signal(signal.SIGINT)
        assert server.wait(30) == 143


@pytest.mark.slow
def test_what_is_not_done_when_the_drain_ends_is_cancelled(pair: tuple[Path, Path]) -> None:
    with started(*pair_arguments(pair), "--mode", "plain", "--drain-seconds", "1") as server:
        with server.live.streaming("/v1/completions", {**LONG, "max_tokens": 1900}) as answer:
            begun = answer.readline()
            server.signal(signal.SIGTERM)
            *texts, last = events(begun + answer.read())
        assert len(texts) < 1900 and last["error"]["code"] == "shutting_down"
        assert server.wait(60) == 143


@pytest.mark.slow
def test_the_tiny_pair_counts() -> None:
    with started("--tiny") as server:
        message = {"role": "user", "content": "Count from 3 to 12."}
        answer = server.live.ask("/v1/chat/completions", {"messages": [message], "temperature": 0}).json()
        assert answer["model"] == "ddtree-tiny"
        assert answer["choices"][0]["message"]["content"] == "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
        assert answer["usage"]["ddtree"]["acceptance_length"] > 4


@pytest.mark.slow
def test_models_that_cannot_be_served_are_refused_with_a_mend(pair: tuple[Path, Path], tmp_path: Path) -> None:
    alone = command("--model", str(pair[0]), "--port", "0")
    assert alone.returncode == 2
    assert "error: mode `ddtree` needs a drafter\n\nhint: name one with `--drafter`" in alone.stderr
    lost = command("--model", str(tmp_path / "nope"), "--mode", "plain", "--port", "0")
    assert lost.returncode == 2 and f"error: no such directory: `{tmp_path / 'nope'}`" in lost.stderr
