"""Take objects that another host sends: only what the push still lacks, each checked as if the controller had sent it.

The door is a socket in the abstract namespace (unix(7)): no file, gone with this process. The feeder's ssh starts `PIPE` here, which
only passes its input on; so whoever comes has logged in as our user, and the kernel says so (SO_PEERCRED).
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import threading
import time

from ddtree_deploy.agent import frames
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.landing import Landing
from ddtree_deploy.agent.push import need, opened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ddtree_deploy.agent.main import Session

#: Says `+` when it was let in, and ends with 0 only when all that it brought was taken.
PIPE = """
import os, socket, sys
door = socket.socket(socket.AF_UNIX)
door.connect("\\0" + sys.argv[1])
if door.recv(1) != b"+":
    sys.exit("not let in")
os.write(1, b"+")
while True:
    data = os.read(0, 1 << 20)
    if not data:
        break
    door.sendall(data)
door.shutdown(socket.SHUT_WR)
sys.exit(door.recv(1) != b"+")
"""
TICK = 0.5
#: After the feeder has ended, so long may what is still on its way take.
LAST_SECONDS = 10.0


class Door:
    """Let one visitor in and receive its objects on a thread of its own; `why` says what was wrong with them."""

    def __init__(self, session: Session, landing: Landing) -> None:
        self.landing = landing
        self.name = "ddtree-relay-%s" % secrets.token_hex(16)
        self.why = ""
        self._session = session
        self._until: float | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.name)
        self._listener.listen(1)
        self._listener.settimeout(TICK)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._until = time.monotonic() + LAST_SECONDS
        self._thread.join()

    def _run(self) -> None:
        with self._listener:
            guest = self._admit()
        if guest is None:
            return
        with guest:
            try:
                guest.settimeout(TICK)
                guest.sendall(b"+")
                self._receive(frames.Reader(lambda view: self._readinto(guest, view)))
            except frames.Closed as end:
                if end.clean and not self._over():
                    guest.sendall(b"+")
            except Exception as error:  # the visitor's fault or the disk's: the controller hears of it and sends the rest itself
                self.why = str(error)

    def _over(self) -> bool:
        return self._session.aborted() or (self._until is not None and time.monotonic() > self._until)

    def _admit(self) -> socket.socket | None:
        while self._until is None and not self._session.aborted():
            try:
                guest, _address = self._listener.accept()
            except socket.timeout:  # not TimeoutError: that is another class before Python 3.10
                continue
            _pid, uid, _gid = struct.unpack("3i", guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid == os.getuid():
                return guest
            guest.close()
        return None

    def _readinto(self, guest: socket.socket, view: memoryview) -> int:
        while not self._over():
            try:
                return guest.recv_into(view)
            except socket.timeout:
                if self._until is not None:
                    break
        return 0

    def _receive(self, reader: frames.Reader) -> None:
        while True:
            header, _size = reader.header()
            if not header.get("objects"):
                raise frames.ProtocolError("a frame without objects")
            self.landing.receive(reader, header)
            if self.landing.error is not None:
                raise self.landing.error
            if self.landing.bad:
                raise frames.ProtocolError("damaged objects: %s" % ", ".join(digest[:12] for digest in self.landing.bad[:3]))


_open: list[Door] = []


def open_door(session: Session, _header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Let another host bring what this push lacks; answer what it has to run here for that."""
    push = opened(session)
    if _open:
        raise Failure("internal", "the door is open already")
    # Its own buffers; what is still expected is shared, and nothing else of ours is within the visitor's reach.
    _open.append(Door(session, Landing(push.found.incoming, need(need(push.landing).expected))))
    return {"command": [sys.executable, "-I", "-S", "-c", PIPE, _open[0].name]}


def close_door(_session: Session, _header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Let nobody in any more; answer what came, and which digests are still missing."""
    if not _open:
        raise Failure("internal", "no door is open")
    door = _open.pop()
    door.close()
    return {"bytes": door.landing.bytes, "why": door.why, "_big": sorted(door.landing.expected or ())}
