"""Requests that the server refuses, among them bytes that no client would send; every answer has the one shape."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ddtree.server.engine import Engine, Mode
from tests.server.conftest import Variant
from tests.server.live import CHAT, MODEL, Live, serve

BAD_BODIES: list[tuple[str, Any, int, str]] = [
    ("completions", b'{"prompt":', 400, "the body is not JSON"),
    ("completions", b"\xff\xfe", 400, "the body is not JSON"),
    ("completions", b"[" * 100_000, 400, "the body is not JSON"),
    ("completions", b"", 400, "the body is not JSON"),
    ("completions", [], 400, "the body"),
    ("completions", {}, 400, "prompt"),
    ("completions", {"prompt": ""}, 400, "the prompt is empty"),
    ("completions", {"prompt": []}, 400, "the prompt is empty"),
    ("completions", {"prompt": [1, 99999]}, 400, "outside the vocabulary"),
    ("completions", {"prompt": [-1]}, 400, "outside the vocabulary"),
    ("completions", {"prompt": [1, True]}, 400, "prompt"),
    ("completions", {"prompt": ["a", "b"]}, 400, "one prompt a request"),
    ("completions", b'{"prompt": "\\ud800"}', 400, "half of a surrogate pair"),
    ("completions", b'{"prompt": "x", "model": "\\ud800"}', 400, "half of a surrogate pair"),
    ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": 99999}, 400, "do not fit the context of 2048"),
    ("completions", {"prompt": [7] * 2048}, 400, "do not fit the context of 2048"),
    ("completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature"),
    ("completions", b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
    ("completions", {"prompt": "x", "temperature": -0.1}, 400, "temperature"),
    ("completions", {"prompt": "x", "top_p": 0}, 400, "top_p"),
    ("completions", {"prompt": "x", "n": 2}, 400, "`n` must be 1"),
    ("completions", {"prompt": "x", "echo": True}, 400, "`echo` is not supported"),
    ("completions", {"prompt": "x", "logprobs": 3}, 400, "`logprobs` is not supported"),
    ("completions", {"prompt": "x", "presence_penalty": 0.5}, 400, "`presence_penalty` is not supported"),
    ("completions", {"prompt": "x", "logit_bias": {"5": 1}}, 400, "`logit_bias` is not supported"),
    ("completions", {"prompt": "x", "stop": ["s"] * 17}, 400, "at most 16 stop strings"),
    ("completions", {"prompt": "x", "model": "nope"}, 404, "the model `nope` is not served here"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages.0.role"),
    ("chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]}, 400, "`tools` is not supported"),
    ("chat/completions", {"messages": CHAT, "response_format": {"type": "json_object"}}, 400, "`response_format`"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content.0.type"),
]


@pytest.mark.parametrize(("route", "body", "status", "message"), BAD_BODIES)
def test_bad_requests_are_refused_by_name(live: Live, route: str, body: Any, status: int, message: str) -> None:
    answer = live.ask(f"/v1/{route}", body)
    assert answer.status == status and message in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error" and answer.error["code"]


def test_the_client_library_raises_its_own_errors(live: Live) -> None:
    client = live.client()
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.chat.completions.create(model=MODEL, messages=CHAT, frequency_penalty=1.0)
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.chat.completions.create(model="gpt-5", messages=CHAT)


@pytest.mark.parametrize("chunked", [False, True])
def test_an_oversized_body_is_refused_and_the_server_goes_on(live: Live, chunked: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    body = b'{"prompt": "' + b"x" * (3 << 20) + b'"}'

    def parts() -> Iterator[bytes]:
        for at in range(0, len(body), 1 << 16):
            yield body[at : at + (1 << 16)]

    try:
        connection.request("POST", "/v1/completions", parts() if chunked else body, encode_chunked=chunked)
        response = connection.getresponse()
        assert response.status == 413 and json.loads(response.read())["error"]["code"] == "request_too_large"
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server closed before we had sent it all
    finally:
        connection.close()
    assert live.ask("/health").status == 200


def test_unknown_routes_and_methods_answer_in_the_same_shape(live: Live) -> None:
    assert live.ask("/v1/nope").status == 404 and "GET /v1/nope" in live.ask("/v1/nope").error["message"]
    assert live.ask("/v1/completions", method="GET").status == 405
    assert live.ask("/docs").status == 404


class BrokenTokenizer:
    """A tokenizer that fails in a way nobody foresaw."""

    eos_token_id = None

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise ZeroDivisionError

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


def test_a_bug_answers_500_in_the_same_shape(variant: Variant) -> None:
    good = variant(Mode.PLAIN)
    with serve(Engine(good.target, None, BrokenTokenizer(), Mode.PLAIN, 1, None)) as server:
        answer = server.ask("/v1/completions", {"prompt": "x"})
        assert answer.status == 500 and answer.error["code"] == "internal_error"
        assert server.ask("/v1/completions", {"prompt": [5], "max_tokens": 2}).status == 200
