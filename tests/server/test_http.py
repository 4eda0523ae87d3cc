"""The OpenAI routes over a real socket: with the `openai` client, and with bytes that no client would send."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from ddtree.sampling import Sampling
from ddtree.server.engine import Engine, Generation, Mode, Request, run
from ddtree.server.load import load_engine
from tests.server.conftest import Variant
from tests.server.live import MODEL, Live, events, serve, wait_until

CHAT: Any = [{"role": "user", "content": "what does the quick brown fox do, line by line?"}]
PROMPT = "the quick brown fox jumps over the lazy dog, the quick brown"
LONG = {"prompt": PROMPT, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
NO_END = {"ignore_eos": True}


def expected(engine: Engine, text: str, **changes: Any) -> tuple[str, Generation]:
    """Return what plain decoding writes."""
    wanted = {"max_tokens": 40, "ignore_eos": True} | changes
    generation = run(engine, Request(tuple(engine.tokenizer.encode(text)), **wanted))
    return generation.take_text(), generation


def chat_text(engine: Engine) -> str:
    text: str = engine.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    return text


# ---- answers


def test_chat(live: Live, variant: Variant) -> None:
    plain = variant(Mode.PLAIN)
    text, generation = expected(plain, chat_text(plain), sampling=Sampling(0.0))
    answer = live.client().chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=40, temperature=0, extra_body=NO_END
    )
    assert answer.choices[0].message.content == text and answer.choices[0].finish_reason == "length"
    use = answer.usage
    assert use is not None and use.completion_tokens == len(generation.tokens) == 40
    assert use.prompt_tokens == len(generation.request.prompt)
    assert use.total_tokens == use.prompt_tokens + use.completion_tokens
    figures = use.model_dump()["ddtree"]
    assert figures["acceptance_length"] == round(39 / figures["rounds"], 3) > 2
    details = use.completion_tokens_details
    assert details is not None and details.accepted_prediction_tokens == 39 - figures["rounds"]


def test_chat_stream_has_the_same_text_in_pieces(live: Live, variant: Variant) -> None:
    plain = variant(Mode.PLAIN)
    text, _ = expected(plain, chat_text(plain), sampling=Sampling(0.0))
    stream = live.client().chat.completions.create(
        model=MODEL,
        messages=CHAT,
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=NO_END,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == text and sum(map(bool, pieces)) > 3
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert not chunks[-1].choices and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 40
    assert len({c.id for c in chunks}) == 1


def test_a_message_in_parts_is_the_message(live: Live) -> None:
    def ask(content: Any) -> Any:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
        return live.ask("/v1/chat/completions", body).json()["choices"]

    whole, parts = "what does the fox do?", [{"type": "text", "text": t} for t in ("what does ", "the fox do?")]
    assert ask(whole) == ask(parts)


def test_completion_of_text_and_of_token_ids(live: Live, variant: Variant) -> None:
    plain = variant(Mode.PLAIN)
    text, _ = expected(plain, PROMPT, sampling=Sampling(0.0))
    client = live.client()
    for prompt in (PROMPT, [PROMPT], plain.tokenizer.encode(PROMPT)):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=40, temperature=0, extra_body=NO_END
        )
        assert answer.choices[0].text == text


def test_stop_strings_across_token_boundaries(live: Live, variant: Variant) -> None:
    plain = variant(Mode.PLAIN)
    text, generation = expected(plain, PROMPT, sampling=Sampling(0.0))
    pieces = [plain.tokenizer.decode([token]) for token in generation.tokens]
    at = next(i for i in range(8, 36) if all(p.isascii() and len(p) > 1 for p in pieces[i : i + 2]))
    stop = pieces[at][-1] + pieces[at + 1][0]
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stop": ["never", stop]}
    answer = live.ask("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    streamed = events(live.ask("/v1/completions", {**body, "stream": True}).body)
    assert "".join(e["choices"][0]["text"] for e in streamed) == text[: text.index(stop)]
    # A stop string that does not come is held back and then given out.
    almost = {**body, "stop": text[-2:] + "\x00"}
    assert live.ask("/v1/completions", almost).json()["choices"][0]["text"] == text


def test_a_seed_decides_the_text_and_plain_decoding_has_the_same(live: Live, variant: Variant) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 1.7, "top_p": 0.95, "top_k": 50, "ignore_eos": True}

    def ask(**more: Any) -> str:
        text: str = live.ask("/v1/completions", {**body, **more}).json()["choices"][0]["text"]
        return text

    text, _ = expected(variant(Mode.PLAIN), PROMPT, max_tokens=30, sampling=Sampling(1.7, 50, 0.95), seed=11)
    assert ask(seed=11) == ask(seed=11) == text
    assert len({text, ask(seed=12), ask(), ask()}) == 4


def test_an_end_token_ends_the_text_unless_ignored(live: Live, variant: Variant) -> None:
    plain = variant(Mode.PLAIN)
    for first in range(12):
        # The pair mostly repeats what stood one period before: there it was mostly the end token.
        prompt = [4 * first + 6, 4 * first + 10, 4 * first + 14, *[2] * 21]
        full = run(plain, Request(tuple(prompt), 12, ignore_eos=True)).tokens
        if 2 in full[2:]:
            break
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    short = live.ask("/v1/completions", body).json()
    whole = live.ask("/v1/completions", {**body, "ignore_eos": True}).json()
    assert short["usage"]["completion_tokens"] == full.index(2) + 1 < 12
    assert short["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] == 12 and whole["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["text"].startswith(short["choices"][0]["text"])


def test_null_asks_for_the_default(live: Live) -> None:
    body = {"prompt": "x", "max_tokens": 3, "seed": 5}
    nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "stream", "stream_options", "logit_bias", "model"))
    answers = [live.ask("/v1/completions", b).json()["choices"] for b in (body, body | nulls)]
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_32_clients_at_once_get_what_each_gets_alone(live: Live, variant: Variant) -> None:
    plain = variant(Mode.PLAIN)
    texts = [f"client {i} asks what the lazy dog does while {i}" for i in range(8)]
    alone = [expected(plain, t, max_tokens=8, sampling=Sampling(1.5), seed=i)[0] for i, t in enumerate(texts)]
    client = live.client()

    def ask(number: int) -> str:
        i = number % 8
        common: Any = {"model": MODEL, "prompt": texts[i], "max_tokens": 8, "temperature": 1.5, "seed": i}
        if number % 2:
            return client.completions.create(**common, extra_body=NO_END).choices[0].text
        stream = client.completions.create(**common, extra_body=NO_END, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, range(32))) == alone * 4


# ---- what is refused

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


# ---- around the answers


def test_models(live: Live) -> None:
    models = live.client().models.list().data
    assert [m.id for m in models] == [MODEL]
    assert live.ask(f"/v1/models/{MODEL}").json()["max_model_len"] == 2048
    assert live.ask("/v1/models/nope").status == 404


def test_health_and_server_info(live: Live) -> None:
    assert live.ask("/health").json() == {"status": "ok"}
    assert live.ask("/health_generate").json() == {"status": "ok"}
    info = live.ask("/server_info").json()
    assert (info["mode"], info["budget"], info["block_size"], info["device"]) == ("ddtree", 24, 16, "cpu")


def test_metrics_count_what_was_done(live: Live) -> None:
    names = ("generation_tokens_total", "prompt_tokens_total", "draft_tokens_total", "accepted_tokens_total")
    names += ("round_tokens_count", "request_seconds_count")
    before = {name: live.metric(f"ddtree_{name}") for name in names}
    refused = live.metric("ddtree_requests_rejected_total", status="400")
    use = live.ask("/v1/completions", {**LONG, "max_tokens": 20}).json()["usage"]
    live.ask("/v1/completions", {})
    grown = {name: live.metric(f"ddtree_{name}") - value for name, value in before.items()}
    details = use["completion_tokens_details"]
    assert grown["generation_tokens_total"] == 20 and grown["prompt_tokens_total"] == use["prompt_tokens"]
    assert grown["accepted_tokens_total"] == details["accepted_prediction_tokens"]
    assert grown["draft_tokens_total"] == sum(details.values())
    assert grown["round_tokens_count"] == use["ddtree"]["rounds"] and grown["request_seconds_count"] == 1
    assert live.metric("ddtree_requests_rejected_total", status="400") == refused + 1
    assert live.metric("ddtree_server_info", model=MODEL, mode="ddtree") == 1


def test_an_api_key_guards_all_but_the_probes(variant: Variant) -> None:
    with serve(variant(Mode.PLAIN), api_key="s3cret") as guarded:
        for headers in ({}, {"Authorization": "Bearer nope"}, {"Authorization": "s3cret"}):
            for path in ("/v1/models", f"/v1/models/{MODEL}", "/server_info"):
                assert guarded.ask(path, headers=headers).status == 401
            answer = guarded.ask("/v1/completions", {"prompt": "x"}, headers=headers)
            assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
        for path in ("/health", "/metrics", "/health_generate"):
            assert guarded.ask(path).status == 200
        with pytest.raises(openai.AuthenticationError):
            guarded.client("nope").models.list()
        client = guarded.client("s3cret")
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=2).usage is not None


def test_a_full_queue_answers_429_and_empties_when_clients_leave(variant: Variant) -> None:
    with serve(variant(Mode.DDTREE), max_running=1, max_waiting=1) as busy:
        with busy.streaming("/v1/completions", LONG) as first:
            assert first.status == 200 and first.readline().startswith(b"data:")
            with busy.streaming("/v1/completions", LONG):
                wait_until(lambda: busy.metric("ddtree_requests_waiting") == 1, "the second request waits")
                third = busy.ask("/v1/completions", {**LONG, "max_tokens": 2})
                assert third.status == 429 and third.error["code"] == "queue_full"
                assert int(third.headers["retry-after"]) >= 1
                with pytest.raises(openai.RateLimitError):
                    busy.client().completions.create(model=MODEL, prompt="x", max_tokens=2)
        wait_until(lambda: busy.metric("ddtree_requests_running") == 0, "both are dropped")
        assert busy.metric("ddtree_requests_total", outcome="cancelled") == 2
        assert busy.metric("ddtree_generation_tokens_total") < 1500
        assert busy.ask("/v1/completions", {**LONG, "max_tokens": 2}).status == 200


def test_a_client_that_disconnects_without_streaming_is_dropped_too(variant: Variant) -> None:
    with serve(variant(Mode.DDTREE)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("POST", "/v1/completions", json.dumps(LONG))
        wait_until(lambda: server.metric("ddtree_requests_running") == 1, "the request runs")
        connection.close()
        wait_until(lambda: server.metric("ddtree_requests_running") == 0, "the request is dropped")
        assert server.metric("ddtree_requests_total", outcome="cancelled") == 1


def test_what_was_taken_is_finished_when_the_server_stops(variant: Variant) -> None:
    text, _ = expected(variant(Mode.PLAIN), PROMPT, max_tokens=60, sampling=Sampling(0.0))
    got: list[Any] = []
    with serve(variant(Mode.DDTREE)) as server:

        def ask() -> None:
            got.append(server.ask("/v1/completions", {**LONG, "max_tokens": 60}).json())

        asker = threading.Thread(target=ask)
        asker.start()
        wait_until(lambda: server.metric("ddtree_requests_running") == 1 or bool(got), "the request runs")
    asker.join(60)
    assert got[0]["choices"][0]["text"] == text


class Fragile(Engine):
    """An engine that breaks on one prompt, as a kernel may on one shape."""

    def start(self, request: Request) -> Generation:
        if request.prompt == (13, 13, 13):
            raise RuntimeError("out of luck")
        return super().start(request)


def test_one_request_that_breaks_the_engine_ends_alone(pair: tuple[Path, Path]) -> None:
    good = load_engine(str(pair[0]), str(pair[1]), device="cpu")
    engine = Fragile(good.target, good.drafter, good.tokenizer, good.mode, 24, good.mask_token)
    with serve(engine) as server:
        bad = {"prompt": [13, 13, 13], "max_tokens": 4}
        whole = server.ask("/v1/completions", bad)
        assert whole.status == 500 and whole.error["code"] == "engine_failed" and "out of luck" in whole.error["message"]
        (streamed,) = events(server.ask("/v1/completions", {**bad, "stream": True}).body)
        assert streamed["error"]["code"] == "engine_failed"
        assert server.ask("/v1/completions", {"prompt": [13, 13], "max_tokens": 4}).status == 200
        assert server.metric("ddtree_requests_total", outcome="error") == 2
