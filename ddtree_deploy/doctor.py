"""Check this machine, and a host, for what a push needs. Reads only; a problem is a row, never an exception."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddtree_deploy.errors import DeployError
from ddtree_deploy.events import Emit, Step, ignore
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.models import Check

if TYPE_CHECKING:
    from ddtree_deploy.session import Session

LOW_BYTES = 20 << 30
SKEW_SECONDS = 60.0
SLOW_SECONDS = 2.0
# Where RENAME_EXCHANGE is known to work. ZFS has it since 2.2; what is not listed is found out by the first push.
EXCHANGING = ("ext4", "xfs", "btrfs", "tmpfs", "f2fs", "bcachefs", "overlay")


def ok(name: str, text: str) -> Check:
    return Check(name, "ok", text)


def warn(name: str, text: str, mend: str) -> Check:
    return Check(name, "warn", text, mend=mend)


def fail(name: str, text: str, mend: str) -> Check:
    return Check(name, "block", text, mend=mend)


def doctor(host: Host | None = None, *, needs: Sequence[str] = (), emit: Emit = ignore) -> list[Check]:
    """Return one row a check: this machine's, then those of `host` (`needs`: modules to import). `block` is what stops a push."""
    rows = list(_rows(emit, "this machine", _controller()))
    if host is not None:
        rows += _rows(emit, host.name, _host(host, needs))
    return rows


def _rows(emit: Emit, where: str, checks: Iterable[tuple[str, Callable[[], Iterable[Check]]]]) -> Iterator[Check]:
    for name, check in checks:
        emit(Step(where, f"check {name}"))
        try:
            yield from check()
        except DeployError as problem:
            yield Check(name, "block", problem.message, problem.causes, problem.mend)


# --- this machine


def _controller() -> Iterator[tuple[str, Callable[[], Iterable[Check]]]]:
    yield "python", _python
    yield "ssh", _ssh
    yield "known_hosts", _known_hosts
    yield "sshd", _sshd
    yield "config", _config
    yield "store", _store


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield ok("python", f"{version} at {sys.executable}")


def _ssh() -> Iterator[Check]:
    binary = shutil.which("ssh")
    if binary is None:
        yield warn("ssh", "no `ssh` binary: fabric is used, which is slower", "install openssh-client")
        return
    said = subprocess.run([binary, "-V"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    yield ok("ssh", f"{said.stderr.strip().partition(',')[0] or 'present'} at {binary}")


def _known_hosts() -> Iterator[Check]:
    path = Path.home() / ".ssh" / "known_hosts"
    if not path.exists():
        yield warn("known_hosts", f"{path} is not there yet", "first contact: `--accept-new-host-key`, or `ssh HOST`")
    elif not os.access(path, os.R_OK):
        yield fail("known_hosts", f"{path} can not be read", f"chown or chmod {path}")
    else:
        lines = [line for line in path.read_text("utf-8", "replace").splitlines() if line.strip() and line[0] != "#"]
        yield ok("known_hosts", f"{len(lines)} keys in {path}")


def _sshd() -> Iterator[Check]:
    from ddtree_deploy.demo.sshd import sshd_binary

    binary = sshd_binary()
    if binary is None:
        yield warn("sshd", "no `sshd`: the demo uses the local connector", "install openssh-server to see it over ssh")
    else:
        yield ok("sshd", f"{binary} (for the demo)")


def _config() -> Iterator[Check]:
    from ddtree_deploy import config

    config.load()
    files = ", ".join(map(str, config.config_files(Path.cwd())))
    yield ok("config", files or "no ddtree.toml (none is needed)")


def _store() -> Iterator[Check]:
    from ddtree_deploy.agent.facts import space
    from ddtree_deploy.render.words import size
    from ddtree_deploy.store import Store

    root = Store.open().root
    if not os.access(root, os.W_OK):
        yield fail("store", f"{root} can not be written", "chown it, or set DDTREE_HOME")
        return
    free = space(str(root))["free_bytes"]
    text = f"{root}, {size(free)} free"
    if free < LOW_BYTES:
        mend = "`ddtree-deploy cache prune`, or set DDTREE_HOME to a larger disk (a CUDA environment takes 7 GiB)"
        yield warn("store", text, mend)
    else:
        yield ok("store", text)


# --- a host


def _host(host: Host, needs: Sequence[str]) -> Iterator[tuple[str, Callable[[], Iterable[Check]]]]:
    if host.transport == "openssh" and shutil.which("ssh"):
        yield "cipher", lambda: _cipher(host)
    if host.via:
        yield "hop", lambda: _hop(host)
    yield "reach", lambda: _reach(host)
    if needs:
        yield "needs", lambda: _needs(host, needs)


def _cipher(host: Host) -> Iterator[Check]:
    """Tell which cipher this side prefers; the choice stays the user's."""
    config = ["-F", host.ssh_config] if host.ssh_config else []
    options = [word for option in host.ssh_options for word in ("-o", option)]
    argv = ["ssh", *config, *options, "-G", "--", host.address or host.name]
    shown = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    ciphers = [line.split()[1] for line in shown.stdout.splitlines() if line.lower().startswith("ciphers ")]
    first = ciphers[0].partition(",")[0] if ciphers else ""
    if first.startswith("chacha20"):
        mend = f"for large pushes put `Ciphers ^aes128-gcm@openssh.com` under `Host {host.name}` in ~/.ssh/config"
        yield warn("cipher", f"{first} is preferred; AES-GCM took half the time on a CPU with AES", mend)
    elif first:
        yield ok("cipher", f"{first} is preferred")


def _hop(host: Host) -> Iterator[Check]:
    """Tell how bytes get into the container: the hop is entered once more, for nothing but that."""
    from ddtree_deploy.hosts.connect import connector

    channel = connector(host).start(["true"])
    try:
        if channel.wait(30.0) != 0:
            raise channel.failure()
        changed = [text for text in channel.notices() if "changes bytes" in text]
    finally:
        channel.close()
    way = f"{host.via} behind {'this machine' if host.transport == 'local' else host.address or host.name}"
    if changed:
        yield warn("hop", f"{way}: {changed[0]}", "take away what gives `pct exec` a terminal there (a wrapper, an alias)")
    else:
        yield ok("hop", f"{way}: bytes pass as they are" + (" (a probe came back whole)" if host.via.startswith("pct") else ""))


def _needs(host: Host, needs: Sequence[str]) -> Iterator[Check]:
    from ddtree_deploy import venvs

    yield from venvs.checks(host, venvs.venvs(host, needs=needs), needs)


def _reach(host: Host) -> Iterator[Check]:
    """Everything that needs a connection, over one read-only session."""
    from ddtree_deploy.session import Session

    began = time.monotonic()
    with Session(host, writable=False) as session:
        hello = session.greet()
        spent = time.monotonic() - began
        text = f"`{host.name}` answers in {spent:.1f} s as {hello['user']} on {hello['hostname']}"
        if spent > SLOW_SECONDS:
            yield warn("reach", text, "a ControlMaster in ~/.ssh/config makes each contact faster")
        else:
            yield ok("reach", text)
        yield ok("agent", f"runs under Python {hello['python']} at {hello['executable']}")
        skew = hello["now_ns"] / 1e9 - time.time()
        if abs(skew) > SKEW_SECONDS:
            yield warn("clock", f"{abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}", "set the clock (NTP) there")
        else:
            yield ok("clock", "agrees with this machine's")
        if not host.venv:
            yield warn("venv", "none is configured", f"give `--venv PATH`, or `venv` under [hosts.{host.name}]")
            return
        look = session.ask("look", venv=host.venv)
        yield from _venv(look.fields)
        if not look.fields["inspect"].get("exists"):
            return
        scan = session.ask("scan", venv=host.venv)
        yield from _space(host, scan.fields)
        yield from _facts(scan.value)
        yield from _generation(host, look.fields)
        if look.fields.get("managed"):
            yield from _drift(host, session.ask("drift", venv=host.venv).value)
        yield from _users(session.ask("users", venv=host.venv).value)
        yield from _tree(session)


def _venv(look: Mapping[str, Any]) -> Iterator[Check]:
    seen, venv = look["inspect"], look["venv"]
    if not seen.get("exists"):
        yield fail("venv", f"there is no {venv}", "give another with `--venv PATH`, or push with `--create`")
    elif seen.get("dangling"):
        yield fail("venv", f"its interpreter is gone: {seen['dangling']}", "install it again, or push with `--create`")
    elif not seen.get("is_venv") and not seen.get("conda"):
        yield warn("venv", f"{venv} has no pyvenv.cfg", "is it a virtual environment? see `--venv PATH`")
    elif len(seen.get("sites", ())) != 1:
        count = len(seen.get("sites", ()))
        yield fail("venv", f"{venv} has {count} site-packages directories", "one is needed")
    else:
        yield ok("venv", f"{venv}, Python {seen.get('version') or '?'}")


def _space(host: Host, scan: Mapping[str, Any]) -> Iterator[Check]:
    from ddtree_deploy.render.words import size

    space = scan["space"]
    if space["read_only"] or not scan["writable"]:
        why = "the file system is read-only" if space["read_only"] else "no write permission"
        yield fail("write", f"{scan['venv']}: {why}", "connect as the owner of the venv, or remount it")
    else:
        yield ok("write", f"{scan['venv']} can be written")
    text = f"{size(space['free_bytes'])} free on {space['mount']} ({space['fs']})"
    if space["free_bytes"] < LOW_BYTES or space["free_inodes"] < 100_000:
        mend = f"drop old generations: `ddtree-deploy generations prune {host.name}`"
        yield warn("space", f"{text}, {space['free_inodes']} inodes", mend)
    else:
        yield ok("space", text)
    if space["noexec"]:
        yield fail("noexec", f"{space['mount']} is mounted noexec: no shared object loads from it", "remount it")
    if space["fs"] in EXCHANGING:
        yield ok("exchange", f"{space['fs']} has RENAME_EXCHANGE: the first push leaves no gap")
    else:
        mend = "the first push finds out, and refuses before it changes anything; `--accept-gap` accepts a short gap"
        yield warn("exchange", f"it is not known whether {space['fs']} has RENAME_EXCHANGE", mend)
    reflink = {True: "yes", False: "no: unchanged files are linked or copied", None: "not known; tried at each push"}
    yield ok("reflink", reflink[space["reflink"]])


def _facts(scan: Mapping[str, Any]) -> Iterator[Check]:
    python, facts = scan["python"], scan["facts"]
    yield ok("interpreter", f"{python['version']} {python['machine']}, glibc {facts['glibc'] or '?'}")
    gpus = facts["gpus"]
    if gpus:
        names = {f"{gpu['name']} (sm_{gpu['compute_capability'].replace('.', '')})" for gpu in gpus}
        yield ok("gpu", f"{len(gpus)} x {', '.join(sorted(names))}, driver {facts['driver']}")
    else:
        yield warn("gpu", "none is seen", "fine for a host that only keeps files; else look at `nvidia-smi` there")


def _generation(host: Host, look: Mapping[str, Any]) -> Iterator[Check]:
    if not look.get("managed"):
        yield ok("generation", "none yet: an ordinary venv, the first push keeps it as generation 0")
    else:
        yield ok("generation", f"{look['generation']} is live")
    if look.get("unfinished"):
        yield warn(
            "journal", f"unfinished work: {look['unfinished']}", f"push again, or `ddtree-deploy rollback {host.name}`"
        )
    else:
        yield ok("journal", "idle")
    lock = look.get("lock")
    if lock:
        from ddtree_deploy.render.views import holder

        yield warn("lock", f"held by {holder(lock)}", "wait for it with `--lock-wait SECS`")
    else:
        yield ok("lock", "free")


def _drift(host: Host, found: Mapping[str, Any]) -> Iterator[Check]:
    paths = [*found["changed"], *found["added"], *found["removed"]]
    if paths:
        mend = f"see `ddtree-deploy status {host.name}`; keep it with `ddtree-deploy snapshot {host.name}`"
        yield Check("drift", "warn", f"{len(paths)} files differ from what was pushed", tuple(paths[:5]), mend)
    else:
        yield ok("drift", "none")


def _tree(session: Session) -> Iterator[Check]:
    """Judge the environment as it stands: was it merged by hand, does everything link, whose are the JIT caches."""
    from ddtree_deploy.oracle import tree_checks

    yield from tree_checks(session)


def _users(found: Mapping[str, Any]) -> Iterator[Check]:
    pids = sorted({user["pid"] for user in found["users"]})
    count = found.get("unread")
    unread = f" ({count} process{'es' * (count > 1)} could not be looked at)" if count else ""
    yield ok("processes", (f"in use by pid {', '.join(map(str, pids))}" if pids else "none uses the venv") + unread)
