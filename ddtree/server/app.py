"""The HTTP side: routes in OpenAI's shapes over a scheduler."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ddtree.server.engine import Request
from ddtree.server.errors import (
    BadRequest,
    BodyTooLarge,
    Bug,
    EngineFailed,
    ModelNotFound,
    ServerError,
    ShuttingDown,
    Unauthorized,
)
from ddtree.server.metrics import Metrics
from ddtree.server.protocol import (
    ChatRequest,
    Common,
    CompletionRequest,
    Shape,
    chat_prompt,
    parse,
    text_prompt,
    to_engine,
    usage,
)
from ddtree.server.scheduler import Job, Piece, Scheduler

OPEN_PATHS = ("/health", "/health_generate", "/metrics")  # probes carry no key


@dataclass(frozen=True)
class Settings:
    """What the HTTP side needs to know."""

    model: str
    api_key: str | None = None
    max_body: int = 4 << 20
    probe_seconds: float = 30.0
    drain_seconds: float = 30.0


@dataclass
class Stream:
    """The pieces of one job, handed from the engine's thread to the event loop."""

    job: Job
    pieces: asyncio.Queue[Piece]
    over: bool = field(default=False)

    @classmethod
    def submit(cls, scheduler: Scheduler, request: Request) -> Stream:
        """Queue a request. Raises QueueFull or ShuttingDown."""
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Piece]()

        def hand_over(piece: Piece) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        return cls(scheduler.submit(request, hand_over), pieces)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Yield pieces up to the last one. Raises the error that the engine reports."""
        while not self.over:
            piece = await self.pieces.get()
            self.over = piece.finish_reason is not None
            if piece.error is not None:
                raise piece.error
            if piece.finish_reason == "cancelled":  # and somebody still listens: not the client's doing
                raise ShuttingDown("the server stopped before the answer was complete")
            yield piece

    async def whole(self) -> tuple[str, Piece]:
        """Return the whole text and the last piece."""
        text = []
        async for piece in self:
            text.append(piece.text)
        return "".join(text), piece

    def drop(self) -> None:
        """Cancel the job unless it is over."""
        if not self.over:
            self.job.cancel()


def build_app(scheduler: Scheduler, metrics: Metrics, settings: Settings) -> FastAPI:
    """Return the application. It starts the scheduler's thread and drains it at the end."""
    engine = scheduler.engine
    created = int(time.time())
    tokenizing = asyncio.Lock()

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        scheduler.start()
        yield
        await asyncio.to_thread(scheduler.close, settings.drain_seconds)

    app = FastAPI(title="DDTree", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(ServerError)
    async def server_error(_request: HttpRequest, error: ServerError) -> JSONResponse:
        metrics.rejected(error.status)
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        return JSONResponse(error.body(), error.status, headers)

    @app.exception_handler(Exception)
    async def bug(_request: HttpRequest, error: Exception) -> JSONResponse:
        return JSONResponse(Bug(f"the server failed: {type(error).__name__}").body(), Bug.status)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def no_route(request: HttpRequest, error: Any) -> JSONResponse:
        message = f"no such route: {request.method} {request.url.path}"
        return JSONResponse(BadRequest(message).body(), error.status_code)

    def authorize(request: HttpRequest) -> None:
        if settings.api_key is None or request.url.path in OPEN_PATHS:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), settings.api_key.encode()):
            raise Unauthorized("the API key is missing or wrong")

    @app.get("/health")
    async def health() -> JSONResponse:
        return JSONResponse(
            {"status": "ok" if scheduler.accepting else "draining"}, 200 if scheduler.accepting else 503
        )

    @app.get("/health_generate")
    async def health_generate() -> JSONResponse:
        """Prove that the model answers, not only the process."""
        stream = Stream.submit(scheduler, Request(prompt=(1,), max_tokens=1, ignore_eos=True))
        try:
            async with asyncio.timeout(settings.probe_seconds):
                await stream.whole()
        except TimeoutError as error:
            raise EngineFailed(f"no token within {settings.probe_seconds:g} s") from error
        finally:
            stream.drop()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/server_info")
    async def server_info(request: HttpRequest) -> dict[str, Any]:
        authorize(request)
        waiting, running = scheduler.load
        return {
            "model": settings.model,
            "mode": str(engine.mode),
            "budget": engine.budget,
            "block_size": engine.drafter.config.block_size if engine.drafter else None,
            "device": str(engine.target.device),
            "dtype": str(engine.target.dtype).removeprefix("torch."),
            "max_context": engine.max_context,
            "max_running": scheduler.max_running,
            "max_waiting": scheduler.max_waiting,
            "waiting": waiting,
            "running": running,
        }

    card = {
        "id": settings.model,
        "object": "model",
        "created": created,
        "owned_by": "ddtree",
        "max_model_len": engine.max_context,
    }

    @app.get("/v1/models")
    async def models(request: HttpRequest) -> dict[str, Any]:
        authorize(request)
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(request: HttpRequest, name: str) -> dict[str, Any]:
        authorize(request)
        check_model(name)
        return card

    @app.post("/v1/chat/completions")
    async def chat(request: HttpRequest) -> Response:
        authorize(request)
        body = parse(ChatRequest, await read_json(request, settings.max_body))
        check_model(body.model)
        async with tokenizing:
            prompt = await asyncio.to_thread(chat_prompt, body, engine.tokenizer)
        return await answer(request, body, prompt, Shape.new(True, settings.model))

    @app.post("/v1/completions")
    async def complete(request: HttpRequest) -> Response:
        authorize(request)
        body = parse(CompletionRequest, await read_json(request, settings.max_body))
        check_model(body.model)
        async with tokenizing:
            prompt = await asyncio.to_thread(text_prompt, body, engine.tokenizer)
        return await answer(request, body, prompt, Shape.new(False, settings.model))

    def check_model(name: str | None) -> None:
        if name not in (None, settings.model):
            raise ModelNotFound(f"the model `{name}` is not served here, `{settings.model}` is", "model")

    async def answer(http: HttpRequest, body: Common, prompt: list[int], shape: Shape) -> Response:
        stream = Stream.submit(scheduler, to_engine(body, prompt, engine))
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            events = server_sent_events(stream, shape, len(prompt), with_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        gone = asyncio.create_task(client_gone(http))
        work = asyncio.create_task(stream.whole())
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)  # nobody reads it
            text, last = work.result()
        finally:
            stream.drop()
            gone.cancel()
            work.cancel()
        use = usage(len(prompt), last.tokens, last.stats)
        return JSONResponse(shape.whole(text, last.finish_reason or "stop", use))

    return app


async def server_sent_events(stream: Stream, shape: Shape, prompt_tokens: int, with_usage: bool) -> AsyncIterator[str]:
    """Yield the events of a streamed answer; cancels the job when the reader goes away."""

    def event(data: dict[str, Any]) -> str:
        return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"

    first = True
    try:
        async for piece in stream:
            if first and shape.chat:
                yield event(shape.piece("", None, True))
            first = False
            if piece.text:
                yield event(shape.piece(piece.text, None, False))
            if piece.finish_reason is not None:
                yield event(shape.piece("", piece.finish_reason, False))
                if with_usage:
                    yield event(shape.last(usage(prompt_tokens, piece.tokens, piece.stats)))
    except ServerError as error:  # the status line is long gone
        yield event(error.body())
    finally:
        stream.drop()
    yield "data: [DONE]\n\n"


async def client_gone(request: HttpRequest) -> None:
    """Return when the client closes the connection; only after its body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def read_json(request: HttpRequest, limit: int) -> Any:
    """Read a JSON body of at most `limit` bytes. Raises BodyTooLarge or BadRequest."""
    body = bytearray()
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(f"the body has {declared} bytes, the limit is {limit}")
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLarge(f"the body has more than {limit} bytes")
    try:
        data = json.loads(body)
        if b"\\u" in body:  # half of a surrogate pair is valid JSON, but no text
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadRequest("the body has half of a surrogate pair in a string") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    return data
