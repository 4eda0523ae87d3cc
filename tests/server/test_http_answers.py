"""The OpenAI routes over a real socket: what chat and completions answer, with the `openai` client and without."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ddtree.sampling import Sampling
from ddtree.server.engine import Engine, Mode, Request, run
from tests.server.conftest import Variant
from tests.server.live import CHAT, MODEL, PROMPT, Live, events, expected

NO_END = {"ignore_eos": True}


def chat_text(engine: Engine) -> str:
    text: str = engine.tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    return text


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
