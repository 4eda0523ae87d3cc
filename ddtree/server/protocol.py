"""The OpenAI request and response shapes, as far as this server speaks them; what it does not do it refuses by name."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from ddtree.sampling import Sampling
from ddtree.server.engine import Engine, Request, Stats
from ddtree.server.errors import BadRequest, ContextTooLong

T = TypeVar("T", bound="Common")

DEFAULT_MAX_TOKENS = 256
MAX_STOPS = 16


class TextPart(BaseModel):
    """A piece of a message; text is the only kind that is taken."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None

    def text(self) -> str:
        """Return the text of all parts."""
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class StreamOptions(BaseModel):
    """What a stream carries besides its pieces."""

    include_usage: bool = False


class Common(BaseModel):
    """Fields that chat and text completions share; unknown fields are accepted only when they ask for nothing."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def null_is_absent(cls, raw: Any) -> Any:
        """Drop what is null: clients may spell a default so."""
        return {name: value for name, value in raw.items() if value is not None} if isinstance(raw, dict) else raw

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    ignore_eos: bool = False

    def limit(self) -> int | None:
        """Return how many new tokens are asked for, None for the default."""
        return self.max_tokens


class ChatRequest(Common):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Common):
    """The body of `POST /v1/completions`."""

    prompt: str | list[StrictInt] | list[str]
    echo: bool = False


# A field asks for something unless it has one of these values. Penalties look at text that a tree has not fixed yet.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "audio": (None,),
    "modalities": (None, ["text"]),
}


def parse(kind: type[T], raw: Any) -> T:
    """Read a request body. Raises BadRequest, naming the field."""
    try:
        request = kind.model_validate(raw)
    except ValidationError as error:
        # Of a field with several forms, the error that goes deepest is about the form that was meant.
        worst = max(error.errors(), key=lambda one: len(one["loc"]))
        where = ".".join(str(part) for part in worst["loc"] if part != "str" and "[" not in str(part)) or None
        raise BadRequest(f"{where or 'the body'}: {worst['msg']}", where) from error
    for name, value in (request.model_extra or {}).items():
        if name in REFUSED and value not in REFUSED[name]:
            raise BadRequest(f"`{name}` is not supported by this server", name)
    if request.n != 1:
        raise BadRequest("`n` must be 1", "n")
    if isinstance(request, CompletionRequest) and request.echo:
        raise BadRequest("`echo` is not supported by this server", "echo")
    return request


def to_engine(request: Common, prompt: Sequence[int], engine: Engine) -> Request:
    """Turn a parsed request and its prompt into what the engine runs. Raises BadRequest or ContextTooLong."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"at most {MAX_STOPS} stop strings are allowed: {len(stops)}", "stop")
    if not prompt:
        raise BadRequest("the prompt is empty", "prompt")
    room = engine.max_context - len(prompt)
    wanted = request.limit()
    if room < 1 or (wanted or 1) > room:
        asked = f"{len(prompt)} prompt tokens" + (f" and {wanted} new ones" if wanted else "")
        raise ContextTooLong(f"{asked} do not fit the context of {engine.max_context} tokens", "max_tokens")
    if any(not 0 <= token < engine.target.vocab_size for token in prompt):
        raise BadRequest("the prompt has a token id outside the vocabulary", "prompt")
    return Request(
        prompt=tuple(prompt),
        max_tokens=min(wanted or DEFAULT_MAX_TOKENS, room),
        sampling=Sampling(request.temperature, max(request.top_k, 0), request.top_p, request.min_p),
        seed=(secrets.randbits(62) if request.seed is None else request.seed) & ((1 << 62) - 1),
        stop=tuple(stops),
        ignore_eos=request.ignore_eos,
    )


def chat_prompt(request: ChatRequest, tokenizer: Any) -> list[int]:
    """Render the messages through the model's chat template. Raises BadRequest when there is none or it refuses."""
    if not tokenizer.chat_template:
        raise BadRequest("this model has no chat template, use /v1/completions", "messages")
    messages = [{"role": message.role, "content": message.text()} for message in request.messages]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what they like
        raise BadRequest(f"the chat template refuses these messages: {error}", "messages") from error
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def text_prompt(request: CompletionRequest, tokenizer: Any) -> list[int]:
    """Return the tokens of the prompt: one string, or token ids. Raises BadRequest for several prompts."""
    prompt: Any = request.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
        if len(prompt) != 1:
            raise BadRequest("one prompt a request is supported", "prompt")
        prompt = prompt[0]
    ids: list[int] = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return ids


def usage(prompt_tokens: int, completion_tokens: int, stats: Stats) -> dict[str, Any]:
    """Return the usage block; the prediction counts are OpenAI's, the `ddtree` block says how drafting went."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        },
        "ddtree": {"rounds": stats.rounds, "acceptance_length": round(stats.acceptance_length, 3)},
    }


@dataclass(frozen=True)
class Shape:
    """Write responses of one request: chat or text, whole or in pieces."""

    chat: bool
    id: str
    model: str
    created: int

    @classmethod
    def new(cls, chat: bool, model: str) -> Shape:
        return cls(chat, ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12), model, int(time.time()))

    def _body(self, kind: str, choices: list[dict[str, Any]], use: dict[str, Any] | None) -> dict[str, Any]:
        body = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return body if use is None else {**body, "usage": use}

    def whole(self, text: str, finish_reason: str, use: dict[str, Any]) -> dict[str, Any]:
        """Return the response that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            return self._body("chat.completion", [choice], use)
        return self._body("text_completion", [{**choice, "text": text}], use)

    def piece(self, text: str, finish_reason: str | None, first: bool) -> dict[str, Any]:
        """Return one streamed piece."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self.chat:
            delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
            return self._body("chat.completion.chunk", [{**choice, "delta": delta}], None)
        return self._body("text_completion", [{**choice, "text": text}], None)

    def last(self, use: dict[str, Any]) -> dict[str, Any]:
        """Return the streamed piece that carries the usage and no text."""
        return self._body("chat.completion.chunk" if self.chat else "text_completion", [], use)
