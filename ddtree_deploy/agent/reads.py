"""Requests that only look: what is here, which files, what they hash to, their bytes. A read-only session has only these."""

from __future__ import annotations

import os
import sys
import time

# What a handler alone needs, it imports: every command that looks at a host pays for what is here.
from ddtree_deploy.agent import PROTOCOL, layout, locks, objects, walk
from ddtree_deploy.agent.ahead import ahead
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.paths import HostilePath, Tree, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ddtree_deploy.agent.main import Session

    #: Session, header and structured value of a request; the answer's fields, `_big` for a structured value, `_then` for what to do
    #: when it is sent.
    Handler = Callable[[Session, dict[str, Any], Any], dict[str, Any]]


def hello() -> dict[str, Any]:
    """Return what the agent says of itself before the first request."""
    return {
        "protocol": PROTOCOL,
        "python": "%d.%d.%d" % sys.version_info[:3],
        "executable": sys.executable,
        "user": os.environ.get("USER") or str(os.getuid()),
        "uid": os.getuid(),
        "hostname": os.uname().nodename,
        "pid": os.getpid(),
        "now_ns": time.time_ns(),
    }


def _root(found: layout.Layout) -> str:
    live = found.live()
    if live is None and not os.path.lexists(found.site):
        return found.tree(0)  # an adoption was cut in its gap; the next push mends it
    return found.site if live is None else found.tree(live)


def venv_python(venv: str) -> str:
    return os.path.join(os.path.abspath(os.path.expanduser(venv)), "bin", "python")


def scan(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Walk the venv's site-packages: entries with stat stamps, digests that the host can vouch for, owners, facts.

    When every file still is what the live generation was made of, the answer says `clean`; then the files are left out, if the
    controller said that it knows that result (`knows`), and with `unless` equal to what was asked for then, so is the rest.
    """
    found = layout.locate(header["venv"])
    live = found.live()
    root = _root(found)
    index_file = "" if live is None else os.path.join(found.directory(live), "index")
    info = (found.info(live) if live is not None else None) or {}
    repeated = bool(header.get("unless")) and info.get("asked") == header["unless"]  # then, most likely, only the walk is needed

    def host() -> dict[str, Any]:
        from ddtree_deploy.agent import facts

        return {"python": facts.python_facts(venv_python(found.venv)), "facts": facts.host_facts(found.venv)}

    facts = host if repeated else ahead(host)  # other programs are asked, and nvidia-smi takes up to seconds
    locks.steady(found)
    now_ns = time.time_ns()
    directories: dict[str, int] = {}
    entries = walk.walk(root, directories)
    unfinished = locks.journal_state(found)  # a switch that nobody confirmed yet is not what anybody asked for
    clean = bool(info.get("result")) and not unfinished and layout.Index.seal_of(index_file) == walk.seal(entries)
    common: dict[str, Any] = {
        "venv": found.venv, "site": found.site_relative, "generation": live, "now_ns": now_ns, "info": info, "clean": clean,
        "unfinished": unfinished,
    }
    if clean and repeated:
        return {**common, "same": True}
    from ddtree_deploy.agent import dists, procs
    from ddtree_deploy.agent.facts import space

    session.walked = (root, entries, directories, walk.fingerprint(entries))
    common.update(
        same=False, fingerprint=session.walked[3], space=space(found.venv),
        writable=os.access(found.venv, os.W_OK) and os.access(os.path.dirname(found.site), os.W_OK),
    )
    big: dict[str, Any] = {"servers": procs.servers(found.venv), "torch": dists.torch_version(root), **facts()}
    if not (clean and info["result"] in header.get("knows", ())):
        index = (layout.Index.load(index_file) if index_file else None) or layout.Index()
        big["files"] = [[*entry[:9], index.digest(entry)] for entry in entries]
        big["distributions"] = dists.read_distributions(root)
        big["pth"] = dists.read_pth(root)
    return {**common, "_big": big}


def _get_ready(session: Session, found: layout.Layout) -> None:
    from ddtree_deploy.agent import writes  # to compile it is a part of the work

    writes.get_ready(session, found)


def hash_files(session: Session, header: dict[str, Any], value: list[str]) -> dict[str, Any]:
    """Return `{path: sha256 or None}` of files below the venv's site-packages."""
    found = layout.locate(header["venv"])
    total = int(header.get("total", 0))
    done = [0]

    def moved(size: int, path: str) -> None:
        done[0] += size
        session.progress("hash", done[0], total, "bytes", path)

    digests = walk.hash_paths(_root(found), [parse(path) for path in value], session.aborted, moved)
    if session.aborted():
        raise Failure("interrupted", "hashing was cancelled")
    return {"_big": digests}


def fetch(session: Session, header: dict[str, Any], value: list[Any]) -> dict[str, Any]:
    """Stream files as objects; `changed` names the ones that are no longer what was promised."""
    found = layout.locate(header["venv"])
    changed: list[str] = []
    with Tree(_root(found)) as tree:

        def open_item(item: tuple[str, int, str]) -> int:
            try:
                return tree.open(item[2])
            except HostilePath as error:
                raise OSError(str(error)) from None

        wanted = [(row[1], row[2], parse(row[0])) for row in value]
        if not all(objects.valid_digest(item[0]) and isinstance(item[1], int) for item in wanted):
            raise Failure("integrity", "a fetch request with a malformed digest")
        paths = {item[0]: item[2] for item in wanted}
        for batch in objects.batches(wanted):
            if session.aborted():
                raise Failure("interrupted", "the transfer was cancelled")
            with session.out_lock():
                short = objects.send_batch(
                    batch, {"re": session.current}, open_item, session.write, session.fd_out
                )
            changed += [paths[digest] for digest in short]
    return {"changed": changed}


def users(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Return the processes that use files of the venv's trees."""
    from ddtree_deploy.agent import procs

    found = layout.locate(header["venv"])
    return {
        "_big": procs.users_of([os.path.realpath(found.site), found.generations, found.site]),
        # The controller plans a push now, which takes as long.
        "_then": None if session.read_only else lambda: _get_ready(session, found),
    }


def look(_session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Return what the venv is, without walking it: generation, journal, lock, ledger tail, generations."""
    from ddtree_deploy.agent import venvs

    venv = os.path.abspath(os.path.expanduser(header["venv"]))
    seen = venvs.inspect(venv)
    if not seen.get("exists"):
        return {"venv": venv, "inspect": seen, "managed": False}
    found = layout.locate(venv)
    live = found.live()
    return {
        "venv": venv, "inspect": seen, "managed": os.path.isdir(found.state), "generation": live,
        "info": None if live is None else found.info(live), "unfinished": locks.journal_state(found),
        "lock": locks.holder(found), "launched": os.path.isdir(os.path.join(found.state, "servers")),
        "_big": {
            "generations": [[number, found.info(number)] for number in found.numbers()],
            "partials": [os.path.basename(path) for path in found.partials()],
            "ledger": found.ledger_entries()[-int(header.get("ledger", 200)):],
        },
    }


def drift(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Compare the live generation with what was pushed: changed, added, removed, by stat first and by hash where that moved."""
    found = layout.locate(header["venv"])
    live = found.live()
    if live is None:
        return {"_big": {"changed": [], "added": [], "removed": [], "unknown": True}}
    root, file = found.tree(live), os.path.join(found.directory(live), "index")
    locks.steady(found)
    entries = walk.walk(root)
    if layout.Index.seal_of(file) == walk.seal(entries):
        return {"_big": {"changed": [], "added": [], "removed": [], "unknown": False}}
    index = layout.Index.load(file) or layout.Index()
    seen = {entry[0] for entry in entries}
    added = [entry[0] for entry in entries if entry[0] not in index.rows]
    removed = [path for path in index.rows if path not in seen]
    doubtful, changed = [], []
    for entry in entries:
        row = index.rows.get(entry[0])
        if row is None:
            continue
        if row[0] != entry[1] or row[1] != entry[2] or (entry[1] == "l" and row[3] != entry[8]) or row[2] != entry[3]:
            changed.append(entry[0])
        elif entry[1] == "f" and index.digest(entry) is None:
            doubtful.append(entry[0])
    digests = walk.hash_paths(root, doubtful, session.aborted, lambda _size, _path: None)
    changed += [path for path in doubtful if digests.get(path) != index.rows[path][3]]
    return {"_big": {"changed": sorted(changed), "added": sorted(added), "removed": sorted(removed), "unknown": False}}


def probe(session: Session, header: dict[str, Any], value: list[str]) -> dict[str, Any]:
    """Import packages, one process each, from the live tree (`value`: module names); read-only: no bytecode is written."""
    from ddtree_deploy.agent import prove

    found = layout.locate(header["venv"])
    root = _root(found)
    return {
        "_big": prove.imports(
            session, venv_python(found.venv), root, root, found.venv, value, header.get("user", ""),
            {**header.get("env", {}), "PYTHONDONTWRITEBYTECODE": "1"}, float(header.get("timeout", 120)), header.get("jobs"),
            header.get("code"),
        )
    }


def hashes(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Prove the live generation's files against what was pushed; `deep` trusts no stat stamp."""
    from ddtree_deploy.agent import prove

    found = layout.locate(header["venv"])
    live = found.live()
    index = None if live is None else layout.Index.load(os.path.join(found.directory(live), "index"))
    if live is None or index is None:
        raise Failure("usage", "`%s` has no generation of ours to compare with" % found.venv, mend="push to it first")
    hashed, vouched, bad = prove.hashes(session, found.tree(live), index.rows, stamps=not header.get("deep"))
    return {"hashed": hashed, "vouched": vouched, "generation": live, "_big": bad}


def syntax(session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Compile every source of the live tree in memory with the venv's interpreter; nothing is written."""
    from ddtree_deploy.agent import prove

    found = layout.locate(header["venv"])
    root = _root(found)
    sources = [entry[0] for entry in walk.walk(root) if entry[1] == "f" and entry[0].endswith(".py")]
    compiled, errors = prove.syntax(session, venv_python(found.venv), root, sources, write=False)
    return {"compiled": compiled, "_big": errors}


def prunable(_session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Return the generations that `prune` would remove now."""
    from ddtree_deploy.agent import tidy

    found = layout.locate(header["venv"])
    return {"generations": tidy.prunable(found, int(header["keep"]), found.live())}


def abi(session: Session, header: dict[str, Any], value: list[str] | None) -> dict[str, Any]:
    """Return the ABI facts of the live tree and of the host; `value` are sonames that the snapshot needs."""
    from ddtree_deploy.agent import abi_facts

    found = layout.locate(header["venv"])
    root = _root(found)
    entries = session.walked[1] if session.walked is not None and session.walked[0] == root else None
    env = header.get("env") or {}
    return {"_big": abi_facts.collect(root, venv_python(found.venv), env, tuple(value or ()), entries=entries)}


def gpu(_session: Session, header: dict[str, Any], _value: object) -> dict[str, Any]:
    """Run one tiny operation per extension on every GPU."""
    from ddtree_deploy.agent import gpu_probe

    found = layout.locate(header["venv"])
    return {"_big": gpu_probe.probe(_root(found), venv_python(found.venv), header.get("env") or {})}


HANDLERS: dict[str, Handler] = {
    "abi": abi,
    "prunable": prunable,
    "gpu": gpu,
    "scan": scan,
    "hash": hash_files,
    "fetch": fetch,
    "users": users,
    "look": look,
    "drift": drift,
    "probe": probe,
    "hashes": hashes,
    "syntax": syntax,
}
