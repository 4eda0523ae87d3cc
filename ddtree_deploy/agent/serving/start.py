"""Start a server from the resolved generation, in a session or a systemd unit of its own, with JIT caches of its own."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
import uuid

from ddtree_deploy.agent import children, durable, layout, locks
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.serving import gpus, place, ports, supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ddtree_deploy.agent.main import Session

LOG_BYTES, LOG_FILES = 16 << 20, 5
RESTARTS, WINDOW = 3, 900.0
BEGIN_SECONDS = 20.0
#: A variable for each cache that an engine fills with code for one torch, one CUDA, one GPU: never shared by generations.
CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
}
#: What the standalone server imports from the venv.
STANDALONE_IMPORTS = ("torch", "transformers", "fastapi", "uvicorn", "prometheus_client", "numpy")
_DROPPED = (
    "SSH_",
    "DDTREE_",
    "SUDO_",
    "XDG_SESSION",
    "OLDPWD",
    "PWD",
    "SHLVL",
    "_",
    "LS_COLORS",
    "TERM",
    "PYTHON",
    "VIRTUAL_ENV",
    "PYTEST_",
)


def jit(found: layout.Layout, live: int | None) -> str:
    """Return the directory that holds a generation's caches; it goes when the generation goes."""
    return os.path.join(found.state, "jit") if live is None else os.path.join(found.directory(live), "jit")


def environment(
    found: layout.Layout, tree: str, caches: str, wish: dict[str, Any], more: str, account: pwd.struct_passwd
) -> dict[str, str]:
    """Return the server's environment: this login's, the generation first on PYTHONPATH, caches of its own, the wish above all."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    env.update(HOME=account.pw_dir, USER=account.pw_name, LOGNAME=account.pw_name, VIRTUAL_ENV=found.venv)
    env["PATH"] = os.path.join(found.venv, "bin") + ":" + env.get("PATH", os.defpath)
    env.update({variable: os.path.join(caches, name) for variable, name in CACHES.items()})
    env.update(wish.get("env") or {})
    env["PYTHONPATH"] = ":".join(part for part in (tree, more, (wish.get("env") or {}).get("PYTHONPATH", "")) if part)
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env


def user(name: str) -> pwd.struct_passwd:
    """Return the account that the server shall run as; raise Failure when it is not there or can not be taken."""
    try:
        account = pwd.getpwnam(name) if name else pwd.getpwuid(os.getuid())
    except KeyError:
        raise Failure(
            "usage", "there is no user `%s` on the host" % (name or os.getuid()), "correct `service_user` in ddtree.toml"
        ) from None
    if os.getuid() not in (0, account.pw_uid):
        raise Failure("usage", "only root can start a server as `%s`" % name, "connect as root or as `%s`" % name)
    return account


def sources(found: layout.Layout, digest: str, sent: dict[str, str]) -> str:
    """Return the directory of the standalone server's sources, laid beside the generations by their digest; none: empty."""
    if not digest:
        return ""
    top = os.path.join(place.root(found), "code")
    target = os.path.join(top, digest)
    if os.path.isdir(target) or not sent:
        return target
    if sources_digest(sent) != digest or not re.fullmatch(r"[0-9a-f]{16}", digest):
        raise Failure("integrity", "the server's sources are not what their digest says")
    temporary = os.path.join(top, ".tmp-sources")  # one at a time, in our turn: what a killed one left is ours to replace
    shutil.rmtree(temporary, ignore_errors=True)
    for name, data in sent.items():
        path = os.path.normpath(os.path.join(temporary, name))
        if not path.startswith(temporary + "/"):
            raise Failure("integrity", "a hostile path in the server's sources: %r" % name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
    durable.sync_file_system(temporary)
    os.rename(temporary, target)
    return target


def sources_digest(sent: dict[str, str]) -> str:
    """Return the name of a set of sources: `{path: base64}`."""
    return hashlib.sha256("".join("%s\0%s\0" % item for item in sorted(sent.items())).encode()).hexdigest()[:16]


def start(_session: Session, header: dict[str, Any], value: dict[str, Any] | None) -> dict[str, Any]:
    """Start a server and return what `place.describe` says of it. `value` is the wish, or None for the one of the last launch.

    Raises Failure: `busy` when it runs already, or its port is taken.
    """
    found = layout.locate(header["venv"])
    name = str(header["name"])
    where = place.directory(found, name)
    unfinished = locks.journal_state(found)
    if unfinished:
        raise Failure("busy", "a push to `%s` is not over: %s" % (found.venv, unfinished), "wait for it, or push again to finish it")
    os.makedirs(where, exist_ok=True)
    # Who starts first wins; the others wait for their turn and then see its server.
    with place.turn(found):
        return _start(header, value, found, name, where)


def _start(header: dict[str, Any], value: dict[str, Any] | None, found: layout.Layout, name: str, where: str) -> dict[str, Any]:
    before = settled(found, name)
    if before and (before["supervised"] or before["processes"]):
        raise _there(name, before)
    wish = value or place.read(where, "launch.json").get("wish")
    if not wish:
        raise Failure("usage", "there is no launch of `%s` to repeat" % name, "start it with `ddtree-deploy launch`")
    port, listen = int(wish["port"]), str(wish["listen"])
    if not ports.is_free(listen, port):
        raise Failure("busy", "port %d is taken%s" % (port, _by(ports.holder(port))), "stop that process, or take another `--port`")
    live = found.live()
    tree = os.path.realpath(found.site if live is None else found.tree(live))
    account = user(str(wish.get("user") or ""))
    caches = jit(found, live)
    # An empty directory inside the generation: as a working directory it tells `prune` and `push` that the generation is in
    # use. A venv without generations has only its site-packages for that; a first push takes it along as generation 0.
    run = os.path.join(caches, "run")
    for path in (run, *(os.path.join(caches, one) for one in CACHES.values())):
        os.makedirs(path, exist_ok=True)
        if os.getuid() == 0:
            os.chown(path, account.pw_uid, account.pw_gid)
    more = sources(found, str(wish.get("sources") or ""), wish.get("code") or {})
    wish = {**wish, "code": None}
    launch = {
        "id": uuid.uuid4().hex,
        "name": name,
        "wish": wish,
        "generation": live,
        "tree": tree,
        "argv": [os.path.join(found.venv, "bin", "python"), *wish["tail"]],
        "cwd": tree if live is None else run,
        "url": "http://%s:%d" % (ports.address(listen), port),
        "who": header.get("who", ""),
        "started": locks.utc(),
        "restart": wish.get("restart", "on-failure"),
        "most": RESTARTS,
        "window": WINDOW,
        "drain": float(wish.get("drain", 30)),
        "log_bytes": int(wish.get("log_bytes") or LOG_BYTES),
        "log_files": LOG_FILES,
        "gpus": gpus.seen(),
        "user": account.pw_name,
    }
    env = environment(found, tree, caches, wish, more, account)
    launch["env"] = {**env, supervisor.MARK: launch["id"]}
    if account.pw_uid != os.getuid():
        launch.update(uid=account.pw_uid, gid=account.pw_gid, groups=os.getgrouplist(account.pw_name, account.pw_gid))
    launch["unit"] = unit_name(found, name) if systemd() else ""
    # The supervisor's lock, as long as its orders are written: one whose starter was killed a moment ago may still be on its way.
    own = place.claim(where)
    if own is None:
        raise _there(name, place.describe(found, name) or {})
    try:
        place.clear(where)
        _put_aside(where)
        durable.write_file(os.path.join(where, "supervisor.py"), children.source_of(supervisor).encode())
        durable.write_file(os.path.join(where, "launch.json"), durable_json(launch), 0o600)
        # Before it is so: whatever runs is in the ledger.
        note(found, "launched", live, name, launch)
    finally:
        os.close(own)
    _begin(where, str(launch["unit"]), str(launch["id"]))
    described = place.describe(found, name)
    assert described is not None
    return {"_big": described}


def _there(name: str, before: dict[str, Any]) -> Failure:
    launch = before.get("launch") or {}
    return Failure(
        "busy",
        "the server `%s` is there already: %s since its launch by %s at %s"
        % (name, before.get("phase", "starting"), launch.get("who") or "somebody", launch.get("started")),
        "see `ddtree-deploy status`; `stop` it first, or take another `--port`",
    )


def settled(found: layout.Layout, name: str) -> dict[str, Any] | None:
    """Return what is known of a server, a supervisor that is about to leave after its server waited for."""
    end = time.monotonic() + BEGIN_SECONDS
    while True:
        before = place.describe(found, name)
        if not before or not before["supervised"] or before["phase"] not in ("failed", "stopped") or time.monotonic() > end:
            return before
        time.sleep(0.05)


def durable_json(value: object) -> bytes:
    return (json.dumps(value, sort_keys=True) + "\n").encode()


def note(found: layout.Layout, event: str, live: int | None, name: str, launch: dict[str, Any], **more: object) -> None:
    """Add a line about a server to the host's ledger."""
    durable.append_line(found.ledger, durable_json(
        {"event": event, "time": locks.utc(), "server": name, "generation": live, "who": launch.get("who", ""), **more}
    ).decode().rstrip())  # fmt: skip


def _by(holder: str) -> str:
    return " by %s" % holder if holder else ""


def _put_aside(where: str) -> None:
    """Keep the log of the launch before as the first older one, and forget its state."""
    for log in ("server.log", "times.jsonl"):
        path = os.path.join(where, log)
        if os.path.exists(path) and os.path.getsize(path):
            for number in range(LOG_FILES - 1, 0, -1):
                if os.path.exists("%s.%d" % (path, number)):
                    os.replace("%s.%d" % (path, number), "%s.%d" % (path, number + 1))
            os.replace(path, path + ".1")
    for name in ("state.json", "proved.json", "stop.json"):
        layout.remove(os.path.join(where, name))


# --- the supervisor's own container


def systemd() -> bool:
    """Tell whether a transient system unit can be made here: systemd runs this host, and we are root (sd_booted(3))."""
    return os.getuid() == 0 and os.path.isdir("/run/systemd/system") and shutil.which("systemd-run") is not None


def unit_name(found: layout.Layout, name: str) -> str:
    return "ddtree-%s-%s.service" % (hashlib.sha256(found.venv.encode()).hexdigest()[:8], name)


def _begin(where: str, unit: str, launch: str) -> None:
    argv = [sys.executable, "-I", "-S", os.path.join(where, "supervisor.py"), where]
    log = os.open(os.path.join(where, "supervisor.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        if unit:
            begun = subprocess.run(
                [
                    "systemd-run",
                    "--quiet",
                    "--collect",
                    "--unit=" + unit,
                    "--description=DDTree server (ddtree-deploy)",
                    "--property=KillMode=mixed",
                    "--property=TimeoutStopSec=infinity",
                    "--property=Restart=on-failure",
                    "--property=RestartSec=2",
                    "--property=LimitNOFILE=1048576",
                    "--property=OOMPolicy=continue",
                    *argv,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=False,
                timeout=60,
            )
            process = None
        else:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/")
            begun = None
    finally:
        os.close(log)
    end = time.monotonic() + BEGIN_SECONDS
    while time.monotonic() < end:
        if durable.read_json(os.path.join(where, "state.json")) is not None:
            return
        if (process is not None and process.poll() is not None) or (begun is not None and begun.returncode):
            break
        time.sleep(0.02)
    if place.supervised(where):
        return  # it is there, and only can not write
    with open(os.path.join(where, "supervisor.log"), encoding="utf-8", errors="replace") as file:
        said = file.read().splitlines()[-8:]
    raise Failure("internal", "the supervisor of launch %s did not start" % launch[:8], causes=said)
