"""What a host is, as far as a deployment depends on it: its interpreter, its C library, its GPUs, its file systems."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shutil
import subprocess

from ddtree_deploy.agent.failure import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ASK = """
import json, os, platform, sys, sysconfig
try:
    libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").strip()
except (ValueError, OSError):
    libc = ""
config = sysconfig.get_config_var
if not libc:
    libc = "musl" if "musl" in (config("HOST_GNU_TYPE") or "") else ""
site = sysconfig.get_path("purelib", "posix_prefix", {"base": "", "installed_base": ""})
print(json.dumps({
    "version": platform.python_version(), "implementation": sys.implementation.name,
    "cache_tag": sys.implementation.cache_tag or "", "ext_suffix": config("EXT_SUFFIX") or "",
    "abiflags": getattr(sys, "abiflags", ""), "debug": hasattr(sys, "gettotalrefcount"),
    "free_threaded": bool(config("Py_GIL_DISABLED")), "machine": sysconfig.get_platform().split("-", 1)[-1],
    "libc": libc, "executable": os.path.realpath(sys.executable), "purelib": site.lstrip("/"),
}))
"""


def python_facts(python: str) -> dict[str, Any]:
    """Return what extension modules depend on (`models.PythonFacts`), and `purelib`, where its venvs keep packages.

    Raises Failure when the interpreter is not there or does not run.
    """
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-c", _ASK],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=30,
            check=True,
            cwd="/",
        )
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
    except FileNotFoundError:
        link = os.path.realpath(python)
        why = "it is a link to `%s`, which is gone" % link if os.path.islink(python) else "there is no such file"
    except OSError as error:
        why = str(error.strerror)
    except subprocess.TimeoutExpired:
        why = "no answer within 30 s"
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip().splitlines()
        why = said[-1] if said else "exit status %d" % error.returncode
    except ValueError:
        why = "its answer is not ours"
    raise Failure(
        "incompatible",
        "the interpreter `%s` does not run: %s" % (python, why),
        mend="install that interpreter again, or make the venv anew with `push --create`",
    )


def host_facts(_venv: str) -> dict[str, Any]:
    """Return what stays the same between two looks: kernel, C and C++ library, GPUs, driver, nvcc, OS."""
    gpus, driver = _gpus()
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "glibc": _glibc(),
        "libstdcxx": _libstdcxx(),
        "gpus": gpus,
        "driver": driver,
        "nvcc": _nvcc(),
        "os": _os_release(),
    }


def _glibc() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2]
    except (ValueError, OSError):
        return ""


def _libstdcxx() -> str:
    # Loaded by soname, so that it is the one that the dynamic linker of this host takes.
    try:
        ctypes.CDLL("libstdc++.so.6")
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                found = re.search(r"libstdc\+\+\.so\.(6[\d.]*)$", line.rstrip())
                if found:
                    return found.group(1)
    except OSError:
        pass
    return ""


def _run(*argv: str) -> str | None:
    """Return the stdout of a short command, or None when it is not there, fails, or takes over 20 seconds."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=True, cwd="/")
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")


def _gpus() -> tuple[list[dict[str, Any]], str]:
    """Return `([{name, compute_capability, memory_mib}], driver version)`, by nvidia-smi, else by NVML itself."""
    query = "--query-gpu=name,compute_cap,memory.total,driver_version"
    text = _run("nvidia-smi", query, "--format=csv,noheader,nounits")
    if text is None:
        return _nvml()
    gpus: list[dict[str, Any]] = []
    driver = ""
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4:
            memory = int(fields[2]) if fields[2].isdigit() else 0
            gpus.append({"name": fields[0], "compute_capability": fields[1], "memory_mib": memory})
            driver = fields[3]
    return gpus, driver


def _nvml() -> tuple[list[dict[str, Any]], str]:
    """Ask libnvidia-ml (NVML API reference): a container may have the driver's library without its tools."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return [], ""
    except (OSError, AttributeError):
        return [], ""
    try:
        text = ctypes.create_string_buffer(96)
        driver = "" if nvml.nvmlSystemGetDriverVersion(text, len(text)) else text.value.decode()
        count = ctypes.c_uint(0)
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        gpus = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
                continue
            major, minor = ctypes.c_int(0), ctypes.c_int(0)
            nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
            memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
            nvml.nvmlDeviceGetMemoryInfo(device, memory)
            name = "" if nvml.nvmlDeviceGetName(device, text, len(text)) else text.value.decode()
            capability = "%d.%d" % (major.value, minor.value)
            gpus.append({"name": name, "compute_capability": capability, "memory_mib": memory[0] >> 20})
        return gpus, driver
    finally:
        nvml.nvmlShutdown()


def _nvcc() -> dict[str, str] | None:
    """Return `{path, release}` of the nvcc that a JIT compile would find on this PATH, or None."""
    path = shutil.which("nvcc")
    if path is None:
        return None
    found = re.search(r"release (\d+\.\d+)", _run(path, "--version") or "")
    return {"path": path, "release": found.group(1) if found else ""}


def _os_release() -> str:
    fields: dict[str, str] = {}
    for name in ("/etc/os-release", "/usr/lib/os-release"):
        try:
            with open(name, encoding="utf-8", errors="replace") as file:
                for line in file:
                    key, _, value = line.strip().partition("=")
                    fields.setdefault(key, value.strip("\"'"))
            break
        except OSError:
            continue
    return " ".join(filter(None, [fields.get("ID", ""), fields.get("VERSION_ID", "")]))


# --- file systems

#: Stands for "as many as you like" where a file system makes inodes as it needs them (btrfs, and others that say 0).
UNLIMITED = 1 << 62
_REFLINK = {"btrfs": True, "bcachefs": True, "ext4": False, "ext3": False, "tmpfs": False}


def mounts() -> list[tuple[str, str, set[str]]]:
    """Return `[(mount point, file system type, options)]` in mount order (proc_pid_mountinfo(5))."""
    out = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            head, _, tail = line.partition(" - ")
            fields, rest = head.split(" "), tail.split(" ")
            if len(fields) < 6 or len(rest) < 3:
                continue
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[4])
            out.append((point, rest[0], set(fields[5].split(",")) | set(rest[2].strip().split(","))))
    return out


def space(path: str) -> dict[str, Any]:
    """Return what the file system of `path` (or of its nearest parent that is there) offers to this user.

    Keys: `free_bytes`, `free_inodes` (`UNLIMITED` where there is no such limit), `fs` (type), `reflink` (None: not
    known without a try), `noexec`, `read_only`, `nfs`, `mount`.
    """
    path = os.path.realpath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    info = os.statvfs(path)
    root = os.geteuid() == 0
    blocks = info.f_bfree if root else info.f_bavail
    inodes = info.f_ffree if root else info.f_favail
    point, kind = "/", ""
    options: set[str] = set()
    for mount in mounts():
        # The longest mount point above the path holds; of two on one point, the later.
        inside = mount[0] == "/" or path == mount[0] or path.startswith(mount[0] + "/")
        if inside and len(mount[0]) >= len(point):
            point, kind, options = mount
    return {
        "free_bytes": blocks * info.f_frsize,
        "free_inodes": inodes if info.f_files else UNLIMITED,
        "fs": kind,
        "reflink": _REFLINK.get(kind),
        "noexec": "noexec" in options,
        "read_only": bool(info.f_flag & os.ST_RDONLY),
        "nfs": kind.startswith("nfs"),
        "mount": point,
    }
