"""What a directory is as a venv (PEP 405), and how to make one where an interpreter of the right minor version is."""

from __future__ import annotations

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

#: In a venv that is being made; a run that dies leaves it, and the next one begins anew.
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


def _empty(venv: str) -> None:
    """Remove what is in a directory; the mark that it is unfinished goes last."""
    for name in sorted(os.listdir(venv), key=lambda name: name == UNFINISHED):
        path = os.path.join(venv, name)
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)


def create(venv: str, minor: str, candidates: Iterable[str] = ()) -> dict[str, Any]:
    """Make the venv by the first interpreter of `minor` that is found; return the facts of its interpreter.

    Raises Failure when there is no such interpreter, or something is there already. What a failure leaves is removed.
    """
    venv = os.path.abspath(os.path.expanduser(venv))
    if _unfinished(venv) and not os.path.islink(venv):
        _empty(venv)
    if os.path.lexists(venv) and (not os.path.isdir(venv) or os.path.islink(venv) or os.listdir(venv)):
        mend = "give another with `--venv PATH`, or push without `--create`"
        raise Failure("usage", "`%s` is there already" % venv, mend)
    base = find(minor, candidates)
    if base is None:
        raise Failure(
            "incompatible",
            "the host has no CPython %s to make a venv of" % minor,
            mend="install it there, for example by `uv python install %s`" % minor,
        )
    there = os.path.isdir(venv)
    try:
        os.makedirs(venv, exist_ok=True)
        durable.write_file(os.path.join(venv, UNFINISHED), b"")
        subprocess.run(
            [base["found_as"], "-I", "-m", "venv", "--without-pip", venv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=120,
            check=True,
            cwd="/",
        )
        made = facts.python_facts(os.path.join(venv, "bin", "python"))
        durable.sync_file_system(venv)
        os.unlink(os.path.join(venv, UNFINISHED))
        return made
    except (OSError, subprocess.SubprocessError, Failure) as error:
        if there:
            _empty(venv)
        else:
            shutil.rmtree(venv, ignore_errors=True)
        detail = (getattr(error, "stderr", None) or b"").decode("utf-8", "replace").strip().splitlines()
        why = "`%s` could not make the venv `%s`" % (base["found_as"], venv)
        raise Failure("incompatible", why, causes=detail[-5:] or [str(error)]) from None
