"""Serve a model pair: `python -m ddtree.server --tiny`, or `--model TARGET --drafter DRAFTER`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddtree.server.errors import ModelError
from ddtree.server.options import add_model_options, load, model_name, positive, refusal

log = logging.getLogger("ddtree.server")

API_KEY_VARIABLE = "DDTREE_API_KEY"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m ddtree.server", description=__doc__)
    add_model_options(p)
    p.add_argument("--served-model-name", metavar="NAME", help="what clients call it (default: the last part of --model)")
    p.add_argument("--max-context", type=positive, metavar="N", help="tokens of prompt and answer (default: the model's)")
    net = p.add_argument_group("server")
    net.add_argument("--host", default="127.0.0.1")
    net.add_argument("--port", type=int, default=30000, help="0 takes a free one")
    net.add_argument("--max-running", type=positive, default=4, help="requests that take turns in the engine")
    net.add_argument("--max-waiting", type=int, default=64, help="requests in the queue; more get 429")
    net.add_argument("--max-body", type=positive, default=4 << 20, metavar="BYTES")
    net.add_argument("--drain-seconds", type=float, default=30, help="how long SIGTERM waits for answers in progress")
    net.add_argument("--api-key-file", type=Path, help=f"file with the key clients must send (or ${API_KEY_VARIABLE})")
    net.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until SIGTERM or SIGINT; return the exit code."""
    args = parser().parse_args(argv)
    try:
        key = api_key(args.api_key_file)
        # Taken before the model is loaded, so that a port in use is known at once.
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family, backlog=256)
    except (OSError, ValueError) as error:
        return _refuse(f"cannot start: {error}")
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    begin = time.monotonic()

    try:
        engine = load(args)
    except ModelError as error:
        return _refuse(error.message, error.mend)

    import uvicorn

    from ddtree.server.app import Settings, build_app
    from ddtree.server.engine import Mode
    from ddtree.server.metrics import Metrics
    from ddtree.server.scheduler import Scheduler

    mode, name = engine.mode, args.served_model_name or model_name(args)
    if args.max_context:
        engine.max_context = min(engine.max_context, args.max_context)
    metrics = Metrics(name, mode)
    scheduler = Scheduler(engine, max_running=args.max_running, max_waiting=args.max_waiting, observer=metrics)
    settings = Settings(name, key, args.max_body, drain_seconds=args.drain_seconds)

    class Server(uvicorn.Server):
        """uvicorn with our own signals: the first drains for a while, the second ends at once."""

        clean = True

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
            yield

        def stop(self) -> None:
            if self.should_exit:
                self.force_exit = True
                self.give_up()
                return
            self.should_exit = True
            scheduler.drain()
            asyncio.get_running_loop().call_later(args.drain_seconds, self.give_up)

        def give_up(self) -> None:
            self.clean = not scheduler.cancel_all()

    config = uvicorn.Config(
        build_app(scheduler, metrics, settings),
        log_config=None,
        log_level=args.log_level if args.log_level == "debug" else "warning",
        access_log=args.log_level == "debug",
        # Cancelled jobs tell their clients so; this is for clients that do not read it.
        timeout_graceful_shutdown=max(0, round(args.drain_seconds)) + 5,
    )
    server = Server(config)
    host, port = listener.getsockname()[:2]
    if key is None and not listener.getsockname()[0].startswith(("127.", "::1")):
        log.warning("no API key is set, and whoever reaches %s may use the model", args.host)
    shape = f"{mode}, budget {engine.budget}" if mode is Mode.DDTREE else str(mode)
    address = f"[{host}]" if ":" in host else host
    print(
        f"serving `{name}` ({shape}, {engine.target.device}) after {time.monotonic() - begin:.1f} s: http://{address}:{port}",
        file=sys.stderr,
        flush=True,
    )
    server.run([listener])
    return 0 if server.clean else 143


def api_key(file: Path | None) -> str | None:
    """Return the key from the file or the environment; never from the command line, which every user can read.

    Raises ValueError for an empty key.
    """
    key = file.read_text().strip() if file is not None else os.environ.get(API_KEY_VARIABLE)
    if key is not None and not key.strip():
        raise ValueError("the API key is empty")
    return key


def _refuse(message: str, mend: str = "") -> int:
    print(refusal(message, mend), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
