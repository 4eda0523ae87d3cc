"""A SGLang server that a benchmark boots, asks and ends; used by `sglang_rounds.py`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START = time.monotonic()
COMMON = ["--host", "127.0.0.1", "--grammar-backend", "none", "--mem-fraction-static", "0.6", "--random-seed", "0"]
# The servers that wait leave the cores to the one that is measured.
COMMON += ["--sleep-on-idle"]


def log(*words: object) -> None:
    """Print with the seconds since the start."""
    print(f"[{time.monotonic() - START:6.1f}]", *words, flush=True)


@dataclass
class Server:
    """One server process and how to talk to it."""

    case: dict[str, Any]
    port: int
    log: Path
    process: subprocess.Popen[bytes] | None = None
    up_after: float | None = None
    failure: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.case["name"])

    def start(self) -> None:
        """Start the process, in a session of its own."""
        env = {**os.environ, **self.case.get("env", {})}
        if "pythonpath" in self.case:
            env["PYTHONPATH"] = f"{self.case['pythonpath']}:{env.get('PYTHONPATH', '')}"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.case["model"], "--port", str(self.port)]
        command += [*COMMON, *self.case["args"]]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)

    def poll(self) -> bool:
        """Start the server once the files it waits for are there; return whether the outcome is known."""
        if self.process is None:
            if Path(self.case.get("wait_for", "/")).exists():
                self.start()
            return False
        if self.up_after is None and self.failure is None:
            text = self.log.read_text(errors="replace")
            if "fired up and ready" in text:
                self.up_after = round(time.monotonic() - START, 1)
                log("up", self.name)
            elif self.process.poll() is not None:
                self.failure = text[-2500:]
                wanted = self.case.get("fails_with")
                self.facts["refused"] = bool(wanted and wanted in text)
                log("ended", self.name, "as it must" if self.facts["refused"] else self.failure)
        return self.up_after is not None or self.failure is not None

    def stop(self) -> None:
        """Kill the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            if self.process is not None:
                os.killpg(self.process.pid, signal.SIGKILL)

    def memory_mib(self) -> int | None:
        """Return the GPU memory of the server's processes; None where the driver does not tell."""
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        found = 0
        for line in subprocess.run(query, check=False, capture_output=True, text=True).stdout.splitlines():
            pid, _, used = line.partition(",")
            with contextlib.suppress(ValueError, ProcessLookupError):
                if self.process is not None and os.getsid(int(pid)) == self.process.pid:
                    found += int(used)
        return found or None

    def ask(self, ids: list[int], **params: Any) -> dict[str, Any]:
        """Generate; returns SGLang's answer with `stamps`, the time of each piece that arrived and its token count."""
        body = json.dumps({"input_ids": ids, "sampling_params": {"temperature": 0, **params}, "stream": True})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(response.read()[:300])
            answer: dict[str, Any] = {}
            stamps = []
            for line in response:
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    answer = json.loads(line[5:])
                    if "error" in answer:
                        raise RuntimeError(answer["error"])
                    stamps.append((time.monotonic(), answer["meta_info"]["completion_tokens"]))
            return {**answer, "stamps": stamps}
        finally:
            connection.close()

    def in_use(self) -> int:
        """Return how many cache slots are neither free nor evictable."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", "/get_load")
        loads = json.loads(connection.getresponse().read())
        return sum(int(load["num_tokens"]) for load in loads)


def many(server: Server, jobs: list[tuple[list[int], dict[str, Any]]], concurrency: int) -> list[dict[str, Any]]:
    """Ask (token ids, sampling parameters) so many at a time; the answers come in the order of the jobs."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda job: server.ask(job[0], **job[1]), jobs))


def acceptance(answers: list[dict[str, Any]]) -> float | None:
    """Return tokens per verify round, bonus included; None without speculation."""
    rounds = sum(int(a["meta_info"].get("spec_verify_ct") or 0) for a in answers)
    tokens = sum(int(a["meta_info"]["completion_tokens"]) - 1 for a in answers)
    return round(tokens / rounds, 3) if rounds else None
