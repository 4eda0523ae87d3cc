"""The first request travels with the agent's code: a host that starts slowly finds it there, and is not asked a round trip later."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ddtree_deploy
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.session import Session

#: Run as the host's interpreter: it takes the code, greets only when it was asked something, and then answers.
SHY = """#!{python}
import os, sys
if len(sys.argv) < 6:
    sys.exit(0)  # only asked for its version
sys.path.insert(0, {root!r})
from ddtree_deploy.agent import PROTOCOL, frames
reader = frames.Reader(frames.from_fd(0))
reader._exactly(int(reader._exactly(8)))
header, _size = reader.header()
frames.write_all(1, frames.encode({{"hello": {{"protocol": PROTOCOL}}}}))
frames.write_all(1, frames.encode({{"re": header["id"], "ok": True, "objects": 3, "bytes": 7, "bad": []}}))
"""


def test_a_request_does_not_wait_for_the_greeting_and_what_is_done_meanwhile_does(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(SHY.format(python=sys.executable, root=str(Path(ddtree_deploy.__file__).parent.parent)))
    python.chmod(0o755)
    seen: list[dict[str, Any]] = []
    with Session(Host("shy", transport="local", python=str(python)), writable=False) as session:
        reply = session.ask("received", None, lambda: seen.append(session.hello))
    assert (reply.fields["objects"], reply.fields["bytes"]) == (3, 7)
    assert [hello["protocol"] for hello in seen] == [session.hello["protocol"]]
