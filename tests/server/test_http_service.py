"""Around the answers: models, probes, metrics, keys, the queue, clients that leave, and what breaks on one request alone."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from ddtree.sampling import Sampling
from ddtree.server.engine import Engine, Generation, Mode, Request
from ddtree.server.load import load_engine
from tests.fixtures.until import until
from tests.server.conftest import Variant
from tests.server.live import LONG, MODEL, PROMPT, Live, events, expected, serve


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
                until(lambda: busy.metric("ddtree_requests_waiting") == 1, "the second request waits")
                third = busy.ask("/v1/completions", {**LONG, "max_tokens": 2})
                assert third.status == 429 and third.error["code"] == "queue_full"
                assert int(third.headers["retry-after"]) >= 1
                with pytest.raises(openai.RateLimitError):
                    busy.client().completions.create(model=MODEL, prompt="x", max_tokens=2)
        until(lambda: busy.metric("ddtree_requests_running") == 0, "both are dropped")
        assert busy.metric("ddtree_requests_total", outcome="cancelled") == 2
        assert busy.metric("ddtree_generation_tokens_total") < 1500
        assert busy.ask("/v1/completions", {**LONG, "max_tokens": 2}).status == 200


def test_a_client_that_disconnects_without_streaming_is_dropped_too(variant: Variant) -> None:
    with serve(variant(Mode.DDTREE)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port)
        connection.request("POST", "/v1/completions", json.dumps(LONG))
        until(lambda: server.metric("ddtree_requests_running") == 1, "the request runs")
        connection.close()
        until(lambda: server.metric("ddtree_requests_running") == 0, "the request is dropped")
        assert server.metric("ddtree_requests_total", outcome="cancelled") == 1


def test_what_was_taken_is_finished_when_the_server_stops(variant: Variant) -> None:
    text, _ = expected(variant(Mode.PLAIN), PROMPT, max_tokens=60, sampling=Sampling(0.0))
    got: list[Any] = []
    with serve(variant(Mode.DDTREE)) as server:

        def ask() -> None:
            got.append(server.ask("/v1/completions", {**LONG, "max_tokens": 60}).json())

        asker = threading.Thread(target=ask)
        asker.start()
        until(lambda: server.metric("ddtree_requests_running") == 1 or bool(got), "the request runs")
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
