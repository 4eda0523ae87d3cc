"""Ask a server many things at once and note when each piece of each answer came (server-sent events over http.client)."""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
import urllib.parse

from ddtree_deploy.agent import layout
from ddtree_deploy.agent.serving import place
from ddtree_deploy.agent.serving.watch import key_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from ddtree_deploy.agent.main import Session

    Json = dict[str, Any]

#: A line of an event stream is one piece; SGLang repeats the whole text in each.
LINE = 4 << 20


class Broken(Exception):
    """The server answered with something that is no answer."""


def run(session: Session, header: Json, value: Json) -> Json:
    """Send `prompts`, `concurrency` of them at a time, and return `{seconds, answers}` when all are answered.

    `value` has `prompts`, `concurrency`, `max_tokens`, `temperature`, and `seconds`, after which what is missing is an error. An
    answer is `{prompt, began, first, ended, gaps, tokens, rounds, text, error}`: its prompt's number, seconds since the start of
    the whole, seconds between its pieces, and what the server counts (`rounds`: verify passes, None when it does not say).
    """
    found = layout.locate(header["venv"])
    launch = place.read(place.directory(found, place.only(found, str(header.get("name") or ""))), "launch.json")
    server = Server(launch)
    prompts: list[str] = value["prompts"]
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(prompts)):
        waiting.put(number)
    answers: list[Json] = []
    over = threading.Event()
    begun = time.monotonic()

    def work() -> None:
        while not over.is_set():
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            answers.append(server.ask(number, prompts[number], value, begun))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(int(value["concurrency"]))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        session.progress("answers", len(answers), len(prompts), "answers")
        if time.monotonic() - begun > float(value["seconds"]) or session.wait_aborted(0.1):
            break
    over.set()
    rows = list(answers)  # a thread that is late adds to the other list
    missing = set(range(len(prompts))) - {row["prompt"] for row in rows}
    rows += [_row(number, 0.0, error="no answer within %s s" % value["seconds"]) for number in sorted(missing)]
    return {"_big": {"seconds": time.monotonic() - begun, "answers": sorted(rows, key=lambda row: int(row["prompt"]))}}


def _row(number: int, began: float, **more: object) -> Json:
    empty: Json = {"first": None, "ended": began, "gaps": [], "tokens": 0, "rounds": None, "text": "", "error": ""}
    return {"prompt": number, "began": began, **empty, **more}


class Server:
    """How to ask one server: where it is, its key, and which of two dialects it speaks.

    SGLang is asked by its own `/generate`, since its OpenAI routes do not say how often it verified.
    """

    def __init__(self, launch: Json) -> None:
        parts = urllib.parse.urlsplit(launch["url"])
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        argv = launch["argv"]
        self.native = "ddtree.server" not in argv
        self.incremental = "--incremental-streaming-output" in argv
        key = key_of(launch)
        self.headers = {"Content-Type": "application/json", **({"Authorization": "Bearer " + key} if key else {})}

    def ask(self, number: int, prompt: str, value: Json, begun: float) -> Json:
        """Ask once and return the answer's row; what goes wrong is in it."""
        times: list[float] = []
        end: Json = {}
        connection = http.client.HTTPConnection(self.host, self.port, timeout=float(value["seconds"]))
        began = time.monotonic()
        try:
            connection.connect()
            began = time.monotonic()
            path, body = self._body(prompt, value)
            connection.request("POST", path, json.dumps(body), self.headers)
            response = connection.getresponse()
            if response.status != 200:
                raise Broken("HTTP %d: %s" % (response.status, response.read(300).decode("utf-8", "replace")))
            end = (self._generate if self.native else self._openai)(_events(response), times)
        except (OSError, ValueError, KeyError, TypeError, http.client.HTTPException, Broken) as error:
            end = {"error": "%s: %s" % (type(error).__name__, error)}
        finally:
            connection.close()
        gaps = [round(times[n + 1] - times[n], 6) for n in range(len(times) - 1)]
        first = round(times[0] - begun, 6) if times else None
        return _row(number, round(began - begun, 6), first=first, ended=round((times or [began])[-1] - begun, 6), gaps=gaps, **end)

    def _body(self, prompt: str, value: Json) -> tuple[str, Json]:
        limit, temperature = value["max_tokens"], value["temperature"]
        if self.native:
            sampling = {"max_new_tokens": limit, "temperature": temperature}
            return "/generate", {"text": prompt, "sampling_params": sampling, "stream": True}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return "/v1/completions", {"prompt": prompt, "max_tokens": limit, "temperature": temperature, **options}

    def _openai(self, events: Iterator[tuple[float, Json]], times: list[float]) -> Json:
        text, usage = [], None
        for moment, event in events:
            if event.get("error"):
                raise Broken(str(event["error"].get("message")))
            for choice in event.get("choices") or []:
                if choice.get("text"):
                    times.append(moment)
                    text.append(choice["text"])
            usage = event.get("usage") or usage
        if usage is None:
            raise Broken("the answer ended without its usage")
        rounds = (usage.get("ddtree") or {}).get("rounds")
        return {"text": "".join(text), "tokens": int(usage["completion_tokens"]), "rounds": rounds}

    def _generate(self, events: Iterator[tuple[float, Json]], times: list[float]) -> Json:
        text, tokens, meta = "", 0, {}
        for moment, event in events:
            if event.get("error"):
                raise Broken(str(event["error"].get("message")))
            meta = event["meta_info"]
            if int(meta["completion_tokens"]) > tokens:
                tokens = int(meta["completion_tokens"])
                times.append(moment)
            if event.get("text"):
                text = text + event["text"] if self.incremental else event["text"]
        if not meta.get("finish_reason"):
            raise Broken("the answer broke off")
        rounds = int(meta["spec_verify_ct"]) if meta.get("spec_verify_ct") else None
        return {"text": text, "tokens": tokens, "rounds": rounds}


def _events(response: http.client.HTTPResponse) -> Iterator[tuple[float, Json]]:
    """Yield (time, event) of a stream up to its `[DONE]`. Raises Broken when it ends before."""
    while True:
        line = response.readline(LINE)
        moment = time.monotonic()
        if not line:
            raise Broken("the stream ended early")
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield moment, json.loads(data)
