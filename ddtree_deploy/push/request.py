"""What a push is asked to do, and the clock that says where its seconds went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree_deploy.abi import Allowance
    from ddtree_deploy.overlay import Overlay

ROOTS = ("sglang", "torch", "triton", "sgl_kernel")


@dataclass(frozen=True, slots=True)
class PushOptions:
    """What a user may ask of a push; times in seconds."""

    only: tuple[str, ...] = ()
    with_: tuple[str, ...] = ()
    verify: bool = True
    create: bool = False
    base: str = ""
    confirm_timeout: float = 30.0
    rollback: bool = True
    lock_wait: float = 0.0
    accept_gap: bool = False
    probe_timeout: float = 120.0
    keep_generations: int = 3
    roots: tuple[str, ...] = ROOTS
    allow: tuple[Allowance, ...] = ()
    overlays: tuple[Overlay, ...] | None = None  # None: none is wanted


def asked(snapshot_id: str, options: PushOptions) -> list[Any]:
    """Return what a push was asked to do, as the host records it to know a repetition."""
    overlays = [] if options.overlays is None else [[overlay.id for overlay in options.overlays]]
    return [snapshot_id, list(options.only), list(options.with_), *overlays]


class Clock:
    """Where the seconds of a push went."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + time.monotonic() - begun

    def total(self) -> float:
        return time.monotonic() - self.started
