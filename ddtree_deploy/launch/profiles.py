"""Where a launch's settings come from: the command line over a profile of `ddtree.toml` over a recorded launch. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ddtree_deploy.config_check import near
from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.launch.argv import Request, alike, pairs
from ddtree_deploy.models import Manifest, ServerCapture

#: What `[profiles.NAME]` may hold besides `env` (a table of strings) and `flags` (a list of strings).
FIELDS = ("engine", "model", "drafter", "algorithm", "budget", "gpus", "tp", "dp", "port", "listen", "router")
#: Places and processes of the host that was captured: they mean nothing on another one.
LOCAL = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_VISIBLE_DEVICES",
         "FLASHINFER_WORKSPACE_BASE", "TORCH_EXTENSIONS_DIR", "PYTHONUNBUFFERED")  # fmt: skip


def from_profile(profiles: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return a profile's settings as fields of Request; `default` applies when none is named and it is there."""
    if name and name not in profiles:
        raise UsageProblem(f"no profile `{name}`{near(name, sorted(profiles))}", mend=f"define `[profiles.{name}]` in ddtree.toml")
    table = dict(profiles.get(name or "default", {}))
    found = {key: table[key] for key in FIELDS if key in table}
    if "budget" in found:
        found["budget"] = str(found["budget"])
    return {**found, "env": dict(table.get("env") or {}), "extra": tuple(table.get("flags") or ())}


def captured(manifest: Manifest) -> ServerCapture:
    """Return the server that ran when a snapshot was taken. Raises UsageProblem when there was none."""
    if not manifest.servers:
        raise UsageProblem("no server ran on the host when this snapshot was taken", mend="take one while it serves, or use `--profile`")
    return manifest.servers[0]


def from_capture(capture: ServerCapture, manifest: Manifest, venv: str) -> tuple[Request, tuple[str, ...]]:
    """Return the request that a captured launch amounts to, and what of it was left out or changed, in words.

    Paths into the captured venv become paths into `venv`. Raises UsageProblem when its command line starts no server we know.
    """
    argv = capture.argv
    start = next((at for at, word in enumerate(argv[:-1]) if word == "-m"), None)
    if start is None:
        at = next((at for at, word in enumerate(argv) if word.endswith("launch_server.py") or word == "serve"), None)
        if at is None:
            raise UsageProblem(f"the captured command line starts no server that launch knows: {' '.join(argv[:4])}")
        tail: tuple[str, ...] = ("-m", "sglang.launch_server", *argv[at + 1 :])
    else:
        tail = argv[start:]
    notes = []
    moved = tuple(word.replace(manifest.venv + "/", venv + "/") for word in tail)
    if moved != tail:
        notes.append(f"paths below {manifest.venv} now lie below {venv}")
    request = alike(moved, Request(drafter="", model=""))
    hidden = [name for name, value, _words in pairs(moved) if value == "***"]
    if hidden:
        notes.append(f"secrets are never recorded: give {', '.join(hidden)} after `--`")
    env = {name: value for name, value in capture.env.items() if name not in LOCAL and "***" not in value}
    left = [name for name in capture.env if name in LOCAL]
    if left:
        notes.append(f"not taken over, for they belong to that host: {', '.join(left)}")
    return replace(request, env=env), tuple(notes)


def differences(manifest: Manifest, facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Say what of the new host differs from the one on which a launch was captured."""
    lines = []
    then = (
        (manifest.facts.get("gpus") or {}).get("list") if isinstance(manifest.facts.get("gpus"), Mapping) else manifest.facts.get("gpus")
    ) or []
    now = facts["gpus"]

    def kinds(gpus: Any) -> str:
        names: dict[str, int] = {}
        for gpu in gpus:
            names[str(gpu.get("name"))] = names.get(str(gpu.get("name")), 0) + 1
        return ", ".join(f"{count} x {name}" for name, count in sorted(names.items())) or "none"

    if kinds(then) != kinds(now):
        lines.append(f"GPUs: {kinds(then)} there, {kinds(now)} here")
    known = {dist.name.lower(): dist.shown_version for dist in manifest.distributions}
    if facts["sglang"] and known.get("sglang") and known["sglang"] != facts["sglang"]:
        lines.append(f"sglang: {known['sglang']} there, {facts['sglang']} here")
    if manifest.python.version != facts["python"]["version"]:
        lines.append(f"python: {manifest.python.version} there, {facts['python']['version']} here")
    return tuple(lines)
