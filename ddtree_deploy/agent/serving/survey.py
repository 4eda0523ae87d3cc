"""What a launch depends on, gathered before it: GPUs, the engine's flags, models, port, caches, leftovers. Judged elsewhere."""

from __future__ import annotations

import glob
import json
import os
import subprocess

from ddtree_deploy.agent import durable, elf, facts, host_facts, layout
from ddtree_deploy.agent.serving import flags, gpus, place, plugin, ports
from ddtree_deploy.agent.serving.start import CACHES, STANDALONE_IMPORTS, jit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ddtree_deploy.agent.main import Session

    Json = dict[str, Any]

#: The binaries whose kernels every forward pass needs; a wheel names its architectures in them.
BINARIES = ("torch/lib/libtorch_cuda.so", "sgl_kernel/*.so", "sgl_kernel/sm*/*.so", "sgl_kernel/flash_ops*.so")
#: What SGLang calls its processes (setproctitle), and the command lines of servers.
ENGINE_NAMES = ("sglang::", "sgl_diffusion::")


def survey(_session: Session, header: Json, _value: object) -> Json:
    """Return the facts for a launch; `model`, `drafter`, `listen`, `ports` and `binaries` say which."""
    found = layout.locate(header["venv"])
    live = found.live()
    tree = os.path.realpath(found.site if live is None else found.tree(live))
    caches = jit(found, live)
    env = header.get("env") or {}
    overlay = os.path.isfile(os.path.join(tree, "sglang/srt/speculative/ddtree_utils.py"))
    plugged = not overlay and os.path.isdir(os.path.join(tree, "sglang_overlay"))
    wanted = header.get("engine") == "sglang" and header.get("algorithm") == "ddtree"
    return {
        "_big": {
            "python": facts.python_facts(os.path.join(found.venv, "bin", "python")),
            "venv": found.venv, "tree": tree, "generation": live, "gpus": gpus.seen(), "uid": os.getuid(),
            "sglang": flags.version(tree), "flags": flags.known(tree) if header.get("engine") == "sglang" else [],
            "overlay": overlay, "plugin": plugin.registration(found.venv, tree, env) if plugged and wanted else None,
            "router": os.path.isdir(os.path.join(tree, "sglang_router")),
            "ddtree": os.path.isfile(os.path.join(tree, "ddtree/server/__main__.py")),
            "missing": _missing(tree, found.venv) if header.get("engine") == "standalone" else [],
            "archs": _archs(tree) if header.get("binaries") else {},
            "model": _model(header.get("model", ""), env), "drafter": _model(header.get("drafter", ""), env),
            "ports": [[port, ports.is_free(header["listen"], port), ports.holder(port)] for port in header.get("ports", [])],
            "disk": facts.space(found.venv), "mount": host_facts.mount_of(found.venv),
            "caches": {name: os.path.join(caches, one) for name, one in CACHES.items()},
            "budgets": (durable.read_json(os.path.join(found.state, "budgets.json")) or {}).get("tables") or [],
            "code": _names(os.path.join(place.root(found), "code")),
            "orphans": orphans(found), "servers": [place.describe(found, name) for name in place.names(found)],
        }
    }  # fmt: skip


def _names(directory: str) -> list[str]:
    return sorted(os.listdir(directory)) if os.path.isdir(directory) else []


def _missing(tree: str, venv: str) -> list[str]:
    """Return which packages the standalone server will not find, by looking for them as the interpreter does."""
    code = "import importlib.util as u,json,sys;print(json.dumps([n for n in sys.argv[1:] if u.find_spec(n) is None]))"
    argv = [os.path.join(venv, "bin", "python"), "-c", code, *STANDALONE_IMPORTS]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PYTHONPATH"] = tree
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=True, env=env, cwd="/")
        missing: list[str] = json.loads(done.stdout)
        return missing
    except (OSError, subprocess.SubprocessError, ValueError):
        return list(STANDALONE_IMPORTS)


def _archs(tree: str) -> Json:
    """Return `{path: architectures}` (`sm_90a`, `compute_120`) of the deployed binaries that hold GPU code."""
    out = {}
    for pattern in BINARIES:
        for path in sorted(glob.glob(os.path.join(glob.escape(tree), pattern)))[:8]:
            archs = elf.read(path)["archs"]
            if archs:
                out[os.path.relpath(path, tree)] = archs
    return out


def _model(name: str, env: dict[str, str]) -> Json:
    """Return where a model is and its config.json: a directory, or a hub id with what the hub's cache has of it."""
    if not name or name == "tiny":
        return {"name": name, "path": None, "config": None, "hub": False}
    local = os.path.expanduser(name)
    if name.startswith(("/", "~", ".")) or os.path.isdir(local):
        return {"name": name, "path": local if os.path.isdir(local) else None, "config": _config(local), "hub": False}
    base = env.get("HF_HUB_CACHE") or os.environ.get("HF_HUB_CACHE")
    base = base or os.path.join(env.get("HF_HOME") or os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub")
    kept = sorted(glob.glob(os.path.join(glob.escape(base), "models--" + name.replace("/", "--"), "snapshots", "*", "config.json")))
    offline = (env.get("HF_HUB_OFFLINE") or os.environ.get("HF_HUB_OFFLINE") or "") in ("1", "true", "yes")
    path = os.path.dirname(kept[-1]) if kept else None
    return {"name": name, "path": path, "config": _config(path) if path else None, "hub": True, "offline": offline}


def _config(path: str) -> Json | None:
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return None
    keys = (
        "architectures", "hidden_size", "vocab_size", "num_hidden_layers", "num_target_layers", "block_size", "target_layer_ids",
        "dflash_config", "max_position_embeddings",
    )  # fmt: skip
    return {key: value[key] for key in keys if key in value} if isinstance(value, dict) else None


def orphans(found: layout.Layout) -> list[Json]:
    """Return `[{pid, ppid, command, devices}]` of engine processes that no parent looks after any more.

    Those of our own launches are not among them while their supervisor lives. `devices` counts the GPU files it has open.
    """
    kept = {pid for name in place.names(found) for pid in _kept(found, name)}
    out = []
    for text in os.listdir("/proc"):
        if not text.isdigit() or int(text) in kept:
            continue
        pid = int(text)
        try:
            with open("/proc/%d/cmdline" % pid, "rb") as file:
                title = file.read(4096).replace(b"\0", b" ").decode("utf-8", "replace")
            with open("/proc/%d/stat" % pid, "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
            if not title.startswith(ENGINE_NAMES) or parent not in (1, _reaper()):
                continue
            devices = sum(os.readlink("/proc/%d/fd/%s" % (pid, fd)).startswith("/dev/nvidia") for fd in os.listdir("/proc/%d/fd" % pid))
        except (OSError, ValueError):
            continue
        out.append({"pid": pid, "ppid": parent, "command": title.strip()[:120], "devices": devices})
    return out


def _kept(found: layout.Layout, name: str) -> list[int]:
    where = place.directory(found, name)
    return place.processes_of(where) if place.supervised(where) else []


def _reaper() -> int:
    """Return the pid to which orphans of this login fall: init, or a `systemd --user` between."""
    pid = os.getpid()
    while pid > 1:
        try:
            with open("/proc/%d/stat" % pid, "rb") as file:
                rest = file.read()
        except OSError:
            return 1
        if rest.partition(b"(")[2].startswith(b"systemd"):
            return pid
        pid = int(rest.rpartition(b")")[2].split()[1])
    return 1
