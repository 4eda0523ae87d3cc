"""Reach a container whose `pct exec` does not pass bytes as they are: lines of base64, and `pct push` for what is large.

A small program in the guest stands between the pipe and the real process. It reads lines (`D` base64 of input, `F` a
file with its size and sha256, `E` the end of the input) and writes lines (`O` base64 of output, `R` of errors); no
byte of them means anything to a terminal. What is written in bulk is staged: a file on the node, `pct push` into the
guest's /tmp under a name nobody can guess, checked there, then fed to the process. So the frames above are the same
as anywhere else, and the process does not know.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import secrets
import select
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

from ddtree_deploy.errors import DeployError, HostUnreachable
from ddtree_deploy.hosts.base import Connector, Host
from ddtree_deploy.hosts.hop import through, write_all
from ddtree_deploy.hosts.pct import HINTS
from ddtree_deploy.hosts.pipes import GRACE_SECONDS, TAIL_BYTES, early_death

INLINE = 256 << 10
#: A staged file; small enough that the agent's lease (60 s without a byte) outlives its way over a line of 10 Mbit/s.
SEGMENT = 16 << 20
LULL = 0.05
START_SECONDS = 30.0
PIPE = 64 << 10  # what a pipe holds (pipe(7))
PIECE = 30 << 10  # of input in one line

_FIND = (
    'code=$1 n=$2; shift 2; while [ "$n" -gt 0 ]; do p=$1; shift; n=$((n-1)); '
    'if [ -z "$found" ] && command -v "$p" >/dev/null 2>&1; then found=$p; fi; done; '
    '[ "$found" ] || { echo "no python found in the container" >&2; exit 127; }; exec "$found" -I -S -c "$code" "$@"'
)
_STAGE = (
    'umask 077; f=$(mktemp "${TMPDIR:-/tmp}/.ddtree-XXXXXXXX") || exit 1; trap \'rm -f "$f"\' EXIT; trap "exit 1" HUP INT TERM; cat >"$f"; '
    '[ "$(wc -c <"$f")" -eq "$3" ] || { echo "the file was cut on its way to the node" >&2; exit 1; }; '
    'pct push "$1" "$f" "$2" --perms 0600 >&2'
)


class PushChannel:
    """A process in the guest, as a Channel; `why` says why its pipe is not used as it is."""

    def __init__(self, host: Host, node: Connector, enter: Sequence[str], argv: Sequence[str], why: str) -> None:
        self._host, self._node, self._argv, self._number = host, node, argv, enter[2]
        self._why = why
        own = [word for word in (host.python, host.venv and f"{host.venv}/bin/python") if word.startswith("/")]
        pythons = [*own, "python3", "/usr/bin/python3"]
        program = Path(__file__).with_name("pct_guest.py").read_text("utf-8")
        shell = ["sh", "-c", _FIND, "sh", program, str(len(pythons)), *pythons, *argv]
        self._inner = through(host, node, [*enter, *shell], HINTS)
        self._errors = bytearray()
        self._fault = ""
        self._in, writable = os.pipe()
        readable, self._out = os.pipe()
        self.stdin = cast(BinaryIO, os.fdopen(writable, "wb", 0))
        self.stdout = cast(BinaryIO, os.fdopen(readable, "rb", 0))
        self.stdin_fd: int | None = writable
        self.stdout_fd: int | None = readable
        self._ready = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True, name=work.__name__) for work in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    # to the guest

    def _send(self) -> None:
        try:
            self._ready.wait()
            while data := os.read(self._in, 1 << 20):
                block = bytearray(data)
                # A pipe that was full means that more is on its way.
                while len(block) < SEGMENT and select.select([self._in], [], [], LULL if len(data) >= PIPE else 0)[0]:
                    more = os.read(self._in, 1 << 20)
                    if not more:
                        break
                    block += more
                self._stage(bytes(block)) if len(block) > INLINE else self._line(bytes(block))
            write_all(self._inner, b"E\n")
        except (OSError, ValueError) as problem:
            self._fault = self._fault or str(problem)
        except DeployError as problem:
            self._fault = "; ".join((problem.message, *problem.causes))
            self._inner.close()
        finally:
            os.close(self._in)

    def _line(self, data: bytes) -> None:
        for at in range(0, len(data), PIECE):
            write_all(self._inner, b"D" + base64.b64encode(data[at : at + PIECE]) + b"\n")

    def _stage(self, data: bytes) -> None:
        path = f"/tmp/.ddtree-{secrets.token_hex(16)}"
        write_all(self._inner, f"P{path}\n".encode())  # so that the guest removes it, whatever happens
        argv = ["sh", "-c", _STAGE, "sh", self._number, path, str(len(data))]
        with contextlib.closing(through(self._host, self._node, argv, HINTS)) as way:
            with contextlib.suppress(OSError):
                write_all(way, data)
                way.stdin.close()
            if way.wait(120) != 0:
                said = tuple(way.stderr_tail().splitlines()[-4:])
                raise HostUnreachable(f"`pct push` to `{self._host.name}` failed", causes=said)
        write_all(self._inner, f"F{path} {len(data)} {hashlib.sha256(data).hexdigest()}\n".encode())

    # from the guest

    def _receive(self) -> None:
        rest = b""
        try:
            while data := self._inner.stdout.read(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._take(line.rstrip(b"\r"))
        except (OSError, ValueError):
            pass
        finally:
            self._ready.set()
            os.close(self._out)

    def _take(self, line: bytes) -> None:
        tag, _, text = line.partition(b":")
        if tag == b"ddtree-ready":
            self._ready.set()
        elif tag == b"ddtree-O":
            data = memoryview(base64.b64decode(text))
            while data:
                data = data[os.write(self._out, data) :]
        else:
            self._errors += base64.b64decode(text) if tag == b"ddtree-R" else line + b"\n"
            del self._errors[:-TAIL_BYTES]

    # the rest of a Channel

    def wait(self, timeout: float | None = None) -> int | None:
        return self._inner.wait(timeout)

    def stderr_tail(self) -> str:
        own = bytes(self._errors).decode("utf-8", "replace").strip()
        return "\n".join(text for text in (own, self._inner.stderr_tail(), self._fault) if text)[-TAIL_BYTES:]

    def failure(self) -> DeployError:
        self._ready.wait(START_SECONDS)
        status = self.wait(GRACE_SECONDS)
        self._threads[1].join(GRACE_SECONDS)
        return early_death(self._host.name, self._argv, status, self.stderr_tail())

    def notices(self) -> tuple[str, ...]:
        return (*self._inner.notices(), f"`pct exec` changes bytes ({self._why}): they travel by `pct push`, which is slower")

    def close(self) -> None:
        """Show the process the end of its input, give it two seconds, then end what leads to it."""
        with contextlib.suppress(OSError):
            self.stdin.close()
        self.wait(GRACE_SECONDS)
        self._inner.close()
        for thread in self._threads:
            thread.join(1.0)
        with contextlib.suppress(OSError):
            self.stdout.close()  # last, as another thread may be reading its descriptor; it ends one that still writes
