"""What a directory is as a venv (PEP 405), and how to make one where an interpreter of the right minor version is."""

from __future__ import annotations

import fcntl
import glob
import os
import re
import shutil
import subprocess

from ddtree_deploy.agent import durable, facts
from ddtree_deploy.agent.failure import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

#: In a venv that is being made, until a push takes it; a run that dies leaves it, and the next one begins anew.
UNFINISHED = ".ddtree-unfinished"
_GENERATION = re.compile(r"(?:^|/)\.ddtree/generations/(\d+)/site-packages/?\Z")


def _config(venv: str) -> dict[str, str] | None:
    """Return the fields of pyvenv.cfg, lower-case keys, or None when there is none."""
    fields: dict[str, str] = {}
    try:
        with open(os.path.join(venv, "pyvenv.cfg"), encoding="utf-8", errors="replace") as file:
            for line in file:
                key, equals, value = line.partition("=")
                if equals:
                    fields[key.strip().lower()] = value.strip()
    except OSError:
        return None
    return fields


def _dangling(path: str) -> str:
    """Return the first link target on the way from `path` that is not there, or an empty string."""
    for _ in range(40):
        if not os.path.islink(path):
            return "" if os.path.lexists(path) else path
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    return path


def _sites(venv: str) -> list[str]:
    return sorted(
        os.path.relpath(path, venv)
        for path in glob.glob(os.path.join(glob.escape(venv), "lib", "python3*", "site-packages"))
        + glob.glob(os.path.join(glob.escape(venv), "lib", "pypy3*", "site-packages"))
    )


def _unfinished(venv: str) -> bool:
    return os.path.lexists(os.path.join(venv, UNFINISHED))


def inspect(venv: str) -> dict[str, Any]:
    """Return what is at `venv`, by looking at files alone.

    Keys: `exists` (an empty directory does not, nor one whose making was cut off), `is_venv` (has pyvenv.cfg), `conda`,
    `home` and `version` (of pyvenv.cfg), `system_site`, `python` (`bin/python`, or empty), `dangling` (what its link
    points at that is gone, or empty), `site` (relative; empty when there is not exactly one), `sites`, `lib64` (`link`,
    `directory`, or empty), `generation` (what the site-packages link of ours points at, or None), `nested_mounts`
    (mount points inside), `writable`.
    """
    venv = os.path.abspath(os.path.expanduser(venv))
    config = _config(venv)
    fields = config or {}
    python = os.path.join(venv, "bin", "python")
    sites = _sites(venv)
    if len(sites) > 1:
        version = ".".join((fields.get("version", "") or fields.get("version_info", "")).split(".")[:2])
        sites = [site for site in sites if re.match(r"lib/python%st?/" % re.escape(version), site)] or sites
    lib64 = os.path.join(venv, "lib64")
    generation = None
    if len(sites) == 1 and os.path.islink(os.path.join(venv, sites[0])):
        match = _GENERATION.search(os.readlink(os.path.join(venv, sites[0])))
        generation = int(match.group(1)) if match else None
    real = os.path.realpath(venv)
    return {
        "exists": os.path.isdir(venv) and bool(os.listdir(venv)) and not _unfinished(venv),
        "is_venv": config is not None,
        "conda": os.path.isdir(os.path.join(venv, "conda-meta")),
        "home": fields.get("home", ""),
        "version": fields.get("version", "") or fields.get("version_info", ""),
        "system_site": fields.get("include-system-site-packages", "false").lower() == "true",
        "python": python if os.path.lexists(python) else "",
        "dangling": _dangling(python) if os.path.islink(python) else "",
        "site": sites[0] if len(sites) == 1 else "",
        "sites": sites,
        "lib64": "link" if os.path.islink(lib64) else "directory" if os.path.isdir(lib64) else "",
        "generation": generation,
        "nested_mounts": sorted({point for point, _fs, _options in facts.mounts() if point.startswith(real + "/")}),
        "writable": os.access(venv, os.W_OK),
    }


def interpreters(minor: str) -> Iterator[str]:
    """Yield the paths where an interpreter of `minor` (`3.12`) may be: PATH, the system, uv, pyenv, conda."""
    name = "python" + minor
    home = os.path.expanduser("~")
    found = shutil.which(name)
    if found:
        yield found
    patterns = [
        "/usr/bin/" + name,
        "/usr/local/bin/" + name,
        "/opt/python/*/bin/" + name,
        home + "/.local/bin/" + name,
        os.environ.get("UV_PYTHON_INSTALL_DIR", home + "/.local/share/uv/python")
        + "/cpython-%s*/bin/%s" % (minor, name),
        os.environ.get("PYENV_ROOT", home + "/.pyenv") + "/versions/%s*/bin/%s" % (minor, name),
    ]
    for base in (home + "/miniconda3", home + "/anaconda3", home + "/miniforge3", "/opt/conda"):
        patterns += [base + "/bin/" + name, base + "/envs/*/bin/" + name]
    for pattern in patterns:
        yield from sorted(glob.glob(pattern), reverse=True)


def find(minor: str, candidates: Iterable[str] = ()) -> dict[str, Any] | None:
    """Return the facts of the first interpreter of `minor` that runs (`facts.python_facts`), or None.

    `candidates` are tried first. Debug and free-threaded builds are passed over: no ordinary wheel loads in them.
    """
    seen: set[str] = set()
    for path in [*candidates, *interpreters(minor)]:
        real = os.path.realpath(path)
        if real in seen:
            continue
        seen.add(real)
        try:
            known = facts.python_facts(path)
        except Failure:
            continue
        if known["version"].split(".")[:2] == minor.split(".") and not known["debug"] and not known["free_threaded"]:
            return {**known, "found_as": path}
    return None


class Making:
    """A venv that is being made: it goes again unless it is kept. Its mark is locked meanwhile, so that two runs do not make one."""

    def __init__(self, venv: str) -> None:
        self.venv = venv
        self.python: dict[str, Any] = {}
        self._there = os.path.isdir(venv)
        os.makedirs(venv, exist_ok=True)
        self._mark = os.path.join(venv, UNFINISHED)
        self._fd = os.open(self._mark, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise Failure("locked", "`%s` is being made by another run" % venv) from None
        self._clear()

    def _clear(self) -> None:
        for name in os.listdir(self.venv):
            path = os.path.join(self.venv, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            elif path != self._mark:
                os.unlink(path)

    def keep(self) -> None:
        """Make it an ordinary venv, also for a host that loses power now: what bears the mark is emptied by the next run."""
        os.unlink(self._mark)
        durable.sync_directory(self.venv)
        os.close(self._fd)

    def remove(self) -> None:
        """Leave what was there before: nothing, or an empty directory."""
        self._clear()
        os.unlink(self._mark)
        if not self._there:
            os.rmdir(self.venv)
        os.close(self._fd)


def create(venv: str, minor: str, candidates: Iterable[str] = ()) -> Making:
    """Make the venv by the first interpreter of `minor` that is found, which `python` of the answer tells of.

    Raises Failure when there is no such interpreter, or something is there already. What a failure leaves is removed.
    """
    venv = os.path.abspath(os.path.expanduser(venv))
    begun = _unfinished(venv) and not os.path.islink(venv)
    if os.path.lexists(venv) and not begun and (not os.path.isdir(venv) or os.path.islink(venv) or os.listdir(venv)):
        mend = "give another with `--venv PATH`, or push without `--create`"
        raise Failure("usage", "`%s` is there already" % venv, mend)
    base = find(minor, candidates)
    if base is None:
        raise Failure(
            "incompatible",
            "the host has no CPython %s to make a venv of" % minor,
            mend="install it there, for example by `uv python install %s`" % minor,
        )
    making = Making(venv)
    try:
        subprocess.run(
            [base["found_as"], "-I", "-m", "venv", "--without-pip", venv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=120,
            check=True,
            cwd="/",
        )
        making.python = facts.python_facts(os.path.join(venv, "bin", "python"))
        durable.sync_file_system(venv)
        return making
    except (OSError, subprocess.SubprocessError, Failure) as error:
        making.remove()
        detail = (getattr(error, "stderr", None) or b"").decode("utf-8", "replace").strip().splitlines()
        why = "`%s` could not make the venv `%s`" % (base["found_as"], venv)
        raise Failure("incompatible", why, causes=detail[-5:] or [str(error)]) from None
