"""Look at a server: what there is, its log from an offset or since a time, and one HTTP request to it."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request

from ddtree_deploy.agent import durable, layout, locks, procs
from ddtree_deploy.agent.serving import place
from ddtree_deploy.agent.serving.start import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ddtree_deploy.agent.main import Session

CHUNK = 256 << 10
BODY = 256 << 10


def look(_session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Return `place.describe` of each server of the venv, or of `name` alone."""
    found = layout.locate(header["venv"])
    name = str(header.get("name") or "")
    wanted = [place.only(found, name)] if name else place.names(found)
    rows = [place.describe(found, one) for one in wanted]
    return {"_big": [row for row in rows if row], "generation": found.live()}


def log(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Return the log of a server from `offset`: `{name, offset, text, server}`; the next offset, what came, how it is now.

    What looks like a secret is hidden: SGLang writes its arguments there.
    With `since` (a time) or `lines` instead of an offset it begins there. An offset beyond the end means that the log was
    rotated meanwhile: it begins anew. `wait` seconds are waited for something new to come or the phase to change from `phase`.
    """
    found = layout.locate(header["venv"])
    name = place.only(found, str(header.get("name") or ""))
    where = place.directory(found, name)
    path = os.path.join(where, "server.log")
    offset = header.get("offset")
    older = ""
    if offset is None:
        older, offset = _begin(where, path, header)
    end = time.monotonic() + float(header.get("wait") or 0)
    while True:
        text, after = _read(path, int(offset))
        described = place.describe(found, name) or {}
        changed = header.get("phase") is not None and described.get("phase") != header["phase"]
        if text or older or changed or time.monotonic() >= end or session.aborted():
            break
        session.wait_aborted(0.2)
    return {"_big": {"name": name, "offset": after, "text": procs.scrub(older + text), "server": described}}


def _read(path: str, offset: int) -> tuple[str, int]:
    """Return what stands there from `offset` up to the last whole line, and the offset after it."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if offset > size:
                offset = 0
            file.seek(offset)
            data = file.read(CHUNK)
    except OSError:
        return "", offset
    cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    if cut == 0 and len(data) < CHUNK:
        return "", offset
    data = data[: cut or len(data)]
    return data.decode("utf-8", "replace"), offset + len(data)


def _begin(where: str, path: str, header: dict[str, Any]) -> tuple[str, int]:
    """Return text of rotated logs and the offset in the present one, for `since` or the newest `lines`."""
    rotated = sorted((name for name in os.listdir(where) if name.startswith("server.log.")), key=_age, reverse=True)
    if header.get("since") is not None:
        since = float(header["since"])
        logs = [*rotated, "server.log"]
        rows = [_times(os.path.join(where, name.replace("server.log", "times.jsonl"))) for name in logs]
        # The newest log that begins before then, and all after it.
        first = max((at for at, times in enumerate(rows) if times and times[0][0] <= since), default=0)
        offset = next((int(size) for moment, size in rows[first] if moment >= since), None)
        if offset is None:
            offset = int(rows[first][-1][1]) if rows[first] else 0
        if logs[first] == "server.log":
            return "", offset
        older = ""
        for number, name in enumerate(logs[first:-1]):
            with open(os.path.join(where, name), "rb") as file:
                file.seek(0 if number else offset)
                older += file.read().decode("utf-8", "replace")
        return older, 0
    lines = int(header.get("lines") or 0)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - CHUNK))
            data = file.read()
    except OSError:
        return "", 0
    kept = data.splitlines(keepends=True)[-lines:] if lines else []
    return "", size - sum(map(len, kept))


def _age(name: str) -> int:
    return int(name.rpartition(".")[2])


def _times(path: str) -> list[tuple[float, int]]:
    """Return `(time, size)` of a log at each moment when it was seen to have grown: what was written then begins at `size`."""
    rows = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                try:
                    moment, size = json.loads(line)
                except (ValueError, TypeError):
                    continue
                rows.append((float(moment), int(size)))
    except OSError:
        pass
    return rows


def request(session: Session, header: dict[str, Any], value: Any) -> dict[str, Any]:
    """Send one HTTP request to a server and return `{status, body, error, seconds, phase}`; `value` is a JSON body for POST.

    The server's own key goes along. It ends early, with the `phase`, when the server is gone meanwhile.
    """
    found = layout.locate(header["venv"])
    name = place.only(found, str(header.get("name") or ""))
    launch = place.read(place.directory(found, name), "launch.json")
    headers = {"Content-Type": "application/json"}
    key = key_of(launch)
    if key:
        headers["Authorization"] = "Bearer " + key
    data = None if value is None else json.dumps(value).encode()
    sent = urllib.request.Request(launch["url"] + header["path"], data=data, headers=headers)
    answer: dict[str, Any] = {"status": None, "body": "", "error": ""}
    over = threading.Event()
    timeout = float(header.get("timeout", 30))

    def ask() -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(sent, timeout=timeout) as response:
                answer.update(status=response.status, body=response.read(BODY).decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            answer.update(status=error.code, body=error.read(BODY).decode("utf-8", "replace"))
        except (OSError, ValueError) as error:
            answer["error"] = str(getattr(error, "reason", error))
        over.set()

    began = time.monotonic()
    threading.Thread(target=ask, daemon=True).start()
    phase = ""
    while not over.wait(0.2):
        phase = (place.describe(found, name) or {}).get("phase", "")
        if phase in ("failed", "stopped", "dead", "restarting") or session.aborted():
            break
        if time.monotonic() - began > timeout:  # a server that sends a byte now and then keeps urllib waiting for ever
            break
    if not over.is_set():
        answer["error"] = "no answer within %.0f s" % (time.monotonic() - began)
    return {"_big": {**answer, "seconds": time.monotonic() - began, "phase": (place.describe(found, name) or {}).get("phase", "")}}


def key_of(launch: dict[str, Any]) -> str:
    """Return the key that the server wants from its clients, or an empty string."""
    argv = list(launch.get("argv") or [])
    for index, word in enumerate(argv):
        name, equals, given = word.partition("=")
        following = given if equals else argv[index + 1] if index + 1 < len(argv) else ""
        if name == "--api-key":
            return str(following)
        if name == "--api-key-file":
            try:
                with open(following, encoding="utf-8") as file:
                    return file.read().strip()
            except OSError:
                return ""
    return str((launch.get("env") or {}).get("DDTREE_API_KEY", ""))


def proved(_session: Session, header: dict[str, Any], value: dict[str, Any]) -> dict[str, Any]:
    """Note how a launch ended, in the server's directory and in the ledger: `value` has `ok`, `algorithm`, `seconds`, `why`."""
    found = layout.locate(header["venv"])
    where = place.directory(found, str(header["name"]))
    launch = place.read(where, "launch.json")
    if launch.get("id") == header["launch"]:
        with place.turn(found):
            durable.write_json(os.path.join(where, "proved.json"), {"launch": launch["id"], "time": locks.utc(), **value})
        event = "serving" if value.get("ok") else "launch-failed"
        note(found, event, launch.get("generation"), str(header["name"]), launch, **{k: v for k, v in value.items() if k != "ok"})
    return {}
