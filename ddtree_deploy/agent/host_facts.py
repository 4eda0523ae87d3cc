"""Facts of a host beside its files: interpreter, libc, driver, GPUs, environment, mounts, JIT caches, compilers."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys

from ddtree_deploy.agent import elf, ld_so

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Facts = dict[str, Any]


ENVIRONMENT = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "PATH")
CACHES = (
    ("triton", "TRITON_CACHE_DIR", "~/.triton/cache"),
    ("inductor", "TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_{user}"),
    ("flashinfer", "FLASHINFER_WORKSPACE_BASE", "~/.cache/flashinfer"),
    ("torch_extensions", "TORCH_EXTENSIONS_DIR", "~/.cache/torch_extensions"),
    ("deep_gemm", "DG_JIT_CACHE_DIR", "~/.deep_gemm"),
)
PROBE_PYTHON = (
    "import json,platform,sys,sysconfig;g=sysconfig.get_config_var;"
    "print(json.dumps({'version':platform.python_version(),'tag':'cp%d%d'%sys.version_info[:2],'ext_suffix':g('EXT_SUFFIX'),"
    "'free_threaded':bool(g('Py_GIL_DISABLED')),'machine':platform.machine(),'executable':sys.executable}))"
)
MAX_CACHE_OBJECTS = 200
TRITON_VERSION = re.compile(r'"triton_version": ?"([^"]+)"')


def host(root: str, python: str | None, env: Mapping[str, str], home: str) -> Facts:
    """Return the facts of this host for the environment at `root`, as plain data; missing things are None or empty."""
    return {
        "python": interpreter(python),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "glibc": _glibc(),
        "driver": driver(),
        "gpus": gpus(),
        "env": {name: env[name] for name in ENVIRONMENT if env.get(name)},
        "ld_so_conf": ld_so.directories(),
        "shadowing": _shadowing(env),
        "mounts": {name: mount_of(path) for name, path in (("site", root), ("tmp", env.get("TMPDIR", "/tmp")), ("home", home))},
        "disk": _disk(root),
        "owner": _owner(root),
        "caches": caches(env, home),
        "tools": tools(env),
        "users": users(root),
    }


def interpreter(python: str | None) -> Facts:
    """Return version, tag, EXT_SUFFIX and path of the venv's interpreter, asked from itself (PEP 425, PEP 3149)."""
    argv = [python or sys.executable, "-I", "-S", "-c", PROBE_PYTHON]
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=30, check=True)
        answer: Facts = json.loads(done.stdout)
        return answer
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {
            "version": None, "tag": None, "ext_suffix": None, "free_threaded": False,
            "machine": platform.machine(), "executable": argv[0], "error": str(error)[:300],
        }  # fmt: skip


def _glibc() -> str | None:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").split()[1]
    except (AttributeError, ValueError, OSError, IndexError):
        return None


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def driver() -> Facts:
    """Return the driver's kernel side (`/proc/driver/nvidia/version`) and its library side (`libcuda.so`).

    A container sees the host's kernel module and its own `libcuda.so`; when they differ nothing works (NVML error 18).
    """
    out: Facts = {"kernel": None, "user": None, "libcuda": None}
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", _read("/proc/driver/nvidia/version") or "")
    out["kernel"] = match.group(1) if match else None
    path = ld_so.find("libcuda.so.1")
    if path:
        out["libcuda"] = os.path.realpath(path)
        match = re.search(r"libcuda\.so\.(\d+\.[\d.]+)$", out["libcuda"])
        out["user"] = match.group(1) if match else None
    return out


# --- GPUs -----------------------------------------------------------------------------------------------------------

NVML_PROBE = """
import ctypes, json

nvml = ctypes.CDLL("libnvidia-ml.so.1")
code = nvml.nvmlInit_v2()
out = {"error": code, "gpus": []}
if code == 0:
    text, number, count = ctypes.create_string_buffer(96), ctypes.c_int(), ctypes.c_uint()
    nvml.nvmlSystemGetDriverVersion(text, 96)
    out["driver"] = text.value.decode()
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number))
    out["cuda"] = "%d.%d" % (number.value // 1000, number.value % 1000 // 10)
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            continue
        major, minor, memory = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ulonglong * 3)()
        nvml.nvmlDeviceGetName(handle, text, 96)
        nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        nvml.nvmlDeviceGetMemoryInfo(handle, memory)
        out["gpus"].append({"index": index, "name": text.value.decode(), "cc": "%d.%d" % (major.value, minor.value),
                            "memory": memory[0]})
    nvml.nvmlShutdown()
print(json.dumps(out))
"""


def gpus() -> Facts:
    """Return `{"list": [{index, name, cc, memory}], "driver", "cuda", "from", "error"}` from NVML, else from
    nvidia-smi.

    NVML runs in a process of its own: a library that does not fit the kernel module may crash it.
    """
    out: Facts = {"list": [], "driver": None, "cuda": None, "from": None, "error": None}
    if ld_so.find("libnvidia-ml.so.1"):
        try:
            argv = [sys.executable, "-I", "-S", "-c", NVML_PROBE]
            done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=30, check=True)
            answer = json.loads(done.stdout)
            if answer["error"] == 0:
                out.update({"list": answer["gpus"], "driver": answer["driver"], "cuda": answer["cuda"], "from": "nvml"})
                return out
            reason = "driver/library version mismatch" if answer["error"] == 18 else "NVML error %d" % answer["error"]
            out["error"] = reason
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            out["error"] = "NVML: %s" % str(error)[:200]
    argv = [
        "nvidia-smi",
        "--query-gpu=index,name,compute_cap,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=30, check=True)
    except subprocess.CalledProcessError as error:
        out["error"] = error.stdout.decode("utf-8", "replace").strip()[:200] or out["error"]
        return out
    except (OSError, subprocess.SubprocessError):
        return out
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5 and parts[0].isdigit():
            memory = int(parts[3]) << 20 if parts[3].isdigit() else None
            out["list"].append({"index": int(parts[0]), "name": parts[1], "cc": parts[2], "memory": memory})
            out["driver"] = parts[4]
            out["from"] = "nvidia-smi"
    return out


# --- environment, file systems ---------------------------------------------------------------------------------------


def _shadowing(env: Mapping[str, str]) -> list[list[str]]:
    """Return PYTHONPATH entries that hold packages which a venv's site-packages should provide."""
    out = []
    for entry in env.get("PYTHONPATH", "").split(":"):
        for package in ("torch", "triton", "nvidia", "sglang", "sgl_kernel", "flashinfer"):
            if entry and os.path.isdir(os.path.join(entry, package)):
                out.append([entry, package])
    return out


def mount_of(path: str, mountinfo: str | None = None) -> Facts | None:
    """Return `{"point", "fs", "options"}` of the mount that holds `path` (proc(5), mountinfo)."""
    if mountinfo is None:
        mountinfo = _read("/proc/self/mountinfo") or ""
    path = os.path.realpath(path)
    best = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) < 6 or not rest:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and (best is None or len(point) >= len(best["point"])):
            best = {"point": point, "fs": rest[0], "options": fields[5].split(",")}
    return best


def _disk(root: str) -> Facts | None:
    try:
        info = os.statvfs(root)
    except OSError:
        return None
    return {"free_bytes": info.f_bavail * info.f_frsize, "free_inodes": info.f_favail}


def _owner(root: str) -> Facts | None:
    try:
        info = os.stat(root)
    except OSError:
        return None
    return {"uid": info.st_uid, "mode": "%o" % (info.st_mode & 0o7777)}


def caches(env: Mapping[str, str], home: str) -> list[Facts]:
    """Return the JIT caches that exist, with their shared objects (at most 200): what they need, for which GPU.

    `triton` are the versions of Triton that wrote kernels there, as their metadata says (200 of them are read).
    """
    out = []
    user = os.path.basename(home) or "root"
    for kind, variable, default in CACHES:
        base = env.get(variable)
        if base and kind == "flashinfer":
            base = os.path.join(base, ".cache", "flashinfer")
        path = os.path.expandvars(base or default.format(user=user).replace("~", home, 1))
        if not os.path.isdir(path):
            continue
        objects: list[Facts] = []
        versions: set[str] = set()
        count = asked = 0
        for directory, _names, files in os.walk(path):
            count += len(files)
            for name in files:
                if name.endswith(".so") and len(objects) < MAX_CACHE_OBJECTS:
                    facts = elf.read(os.path.join(directory, name))
                    row = {key: facts[key] for key in ("needed", "archs", "problems")}
                    row["path"] = os.path.relpath(os.path.join(directory, name), path)
                    objects.append(row)
                elif kind == "triton" and name.endswith(".json") and not name.startswith("__grp__") and asked < MAX_CACHE_OBJECTS:
                    asked += 1
                    match = TRITON_VERSION.search(_read(os.path.join(directory, name)) or "")
                    versions.update(match.groups() if match else ())
        row = {"kind": kind, "path": path, "files": count, "objects": objects, "mount": mount_of(path)}
        out.append(dict(row, triton=sorted(versions)))
    return out


def tools(env: Mapping[str, str]) -> Facts:
    """Return `{"nvcc": {"path", "version"}, ...}` for what a JIT would pick: CUDA_HOME first, then PATH."""
    out: Facts = {}
    search = env.get("PATH", os.defpath).split(":")
    cuda = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    for name, dirs, pattern in (
        (
            "nvcc",
            ([os.path.join(cuda, "bin")] if cuda else []) + search + ["/usr/local/cuda/bin"],
            r"release (\d+\.\d+)",
        ),
        ("gcc", search, r"(\d+\.\d+\.\d+)"),
        ("ninja", search, r"(\d+\.\d+\S*)"),
    ):
        path = next((p for d in dirs for p in [os.path.join(d, name)] if os.access(p, os.X_OK)), None)
        out[name] = None
        if path:
            try:
                done = subprocess.run([path, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20, check=False)
                match = re.search(pattern, done.stdout.decode("utf-8", "replace"))
            except (OSError, subprocess.SubprocessError):
                match = None
            out[name] = {"path": path, "version": match.group(1) if match else None}
    return out


def users(root: str) -> list[Facts]:
    """Return the processes that have files of this tree mapped: `{"pid", "command", "deleted"}` (proc(5))."""
    root = os.path.realpath(root)
    out = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        maps = _read("/proc/%s/maps" % name)
        if maps and root + "/" in maps:
            command = (_read("/proc/%s/comm" % name) or "").strip()  # not argv: it may carry a key
            deleted = any(root + "/" in line and line.endswith("(deleted)") for line in maps.splitlines())
            out.append({"pid": int(name), "command": command, "deleted": deleted})
    return out
