"""Prometheus metrics of one server."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ddtree.server.scheduler import Job, Observer, Piece

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
ROUND_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)


class Metrics(Observer):
    """Count what the scheduler does. One registry a server, so that several can live in one process."""

    def __init__(self, model: str, mode: str) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        Gauge("ddtree_server_info", "What is served", ["model", "mode"], registry=r).labels(model, mode).set(1)
        self._waiting = Gauge("ddtree_requests_waiting", "Requests in the queue", registry=r)
        self._running = Gauge("ddtree_requests_running", "Requests being generated", registry=r)
        self._requests = Counter("ddtree_requests", "Finished requests by how they ended", ["outcome"], registry=r)
        self._rejected = Counter("ddtree_requests_rejected", "Requests refused, by HTTP status", ["status"], registry=r)
        self._prompt = Counter("ddtree_prompt_tokens", "Prompt tokens read", registry=r)
        self._tokens = Counter("ddtree_generation_tokens", "Tokens emitted", registry=r)
        self._drafted = Counter("ddtree_draft_tokens", "Draft tokens verified", registry=r)
        self._accepted = Counter("ddtree_accepted_tokens", "Draft tokens accepted", registry=r)
        self._per_round = Histogram(
            "ddtree_round_tokens", "Tokens emitted by a round (acceptance length)", registry=r, buckets=range(1, 17)
        )
        self._round = Histogram("ddtree_round_seconds", "Time of a round", registry=r, buckets=ROUND_SECONDS)
        self._first = Histogram("ddtree_time_to_first_token_seconds", "Queue and prompt", registry=r, buckets=SECONDS)
        self._whole = Histogram("ddtree_request_seconds", "Whole requests", registry=r, buckets=SECONDS)

    def queued(self, waiting: int, running: int) -> None:
        self._waiting.set(waiting)
        self._running.set(running)

    def round(self, seconds: float, tokens: int) -> None:
        self._round.observe(seconds)
        self._per_round.observe(tokens)

    def finished(self, job: Job, piece: Piece) -> None:
        self._requests.labels(piece.finish_reason).inc()
        if job.first_token is None:
            return
        self._prompt.inc(len(job.request.prompt))
        self._tokens.inc(piece.tokens)
        self._drafted.inc(piece.stats.drafted)
        self._accepted.inc(piece.stats.accepted)
        self._first.observe(job.first_token - job.submitted)
        self._whole.observe(time.monotonic() - job.submitted)

    def rejected(self, status: int) -> None:
        """Count a request that never reached the queue."""
        self._rejected.labels(str(status)).inc()

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)
