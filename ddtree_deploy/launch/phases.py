"""What a server that starts is doing now, by its log: weights, KV cache, graphs, warm-up. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Of SGLang and of the standalone server, in the order in which they come.
MARKS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("import", re.compile(r"^ddtree-deploy \S+: started pid")),
    ("distributed", re.compile(r"Init torch distributed begin")),
    ("weights", re.compile(r"Load weight begin|Loading safetensors|Multi-thread loading shards|Loading weights:")),
    ("KV cache", re.compile(r"Load weight end|KV Cache is allocated|Memory pool end")),
    ("graphs", re.compile(r"Capture .*cuda graph|Capturing batches|Compiling num tokens")),
    ("warm-up", re.compile(r"max_total_num_tokens=|Uvicorn running|^serving `|Started server process|DDTREE ready")),
)
_PERCENT = re.compile(r"(\d{1,3})%(?:\|| Completed)")


@dataclass(frozen=True, slots=True)
class Phase:
    """Where a start is: the name of the phase, its number from 0, and per cent of it where a bar says so (-1: unknown)."""

    name: str = "start"
    number: int = -1
    percent: int = -1


def follow(phase: Phase, text: str) -> Phase:
    """Return the phase after `text` was written. A phase never goes back: ranks are not equally fast."""
    for line in re.split(r"[\r\n]+", text):
        for number, (name, pattern) in enumerate(MARKS):
            if number >= phase.number and pattern.search(line):
                percent = _PERCENT.search(line)
                phase = Phase(name, number, int(percent[1]) if percent else -1 if number != phase.number else phase.percent)
    return phase
