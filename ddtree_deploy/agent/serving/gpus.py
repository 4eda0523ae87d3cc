"""GPUs as they are now: name, compute capability, memory in all and free (NVML in a child, else nvidia-smi)."""

from __future__ import annotations

import json
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Gpu = dict[str, Any]

_NVML = """
import ctypes, json
nvml = ctypes.CDLL("libnvidia-ml.so.1")
rows = []
if nvml.nvmlInit_v2() == 0:
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
            continue
        major, minor, memory = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ulonglong * 3)()
        nvml.nvmlDeviceGetName(handle, text, 96)
        nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        nvml.nvmlDeviceGetMemoryInfo(handle, memory)
        rows.append({"index": index, "name": text.value.decode(), "cc": "%d.%d" % (major.value, minor.value),
                     "memory": memory[0], "free": memory[1]})
    nvml.nvmlShutdown()
print(json.dumps(rows))
"""
_SMI = ["nvidia-smi", "--query-gpu=index,name,compute_cap,memory.total,memory.free", "--format=csv,noheader,nounits"]


def seen() -> list[Gpu]:
    """Return `[{index, name, cc, memory, free}]` (bytes), empty without GPUs."""
    try:
        argv = [sys.executable, "-I", "-S", "-c", _NVML]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=True)
        rows: list[Gpu] = json.loads(done.stdout)
        return rows
    except (OSError, subprocess.SubprocessError, ValueError):
        pass
    try:
        done = subprocess.run(_SMI, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = []
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5 and parts[0].isdigit() and parts[3].isdigit() and parts[4].isdigit():
            rows.append(
                {"index": int(parts[0]), "name": parts[1], "cc": parts[2], "memory": int(parts[3]) << 20, "free": int(parts[4]) << 20}
            )
    return rows


def back(before: list[Gpu], slack: int, seconds: float) -> list[Gpu]:
    """Wait until each GPU has as much free memory as `before` (less `slack`); return `[{index, free, before, back}]`."""
    end = time.monotonic() + seconds
    wanted = {gpu["index"]: gpu["free"] for gpu in before}
    while True:
        rows = [
            {
                "index": gpu["index"],
                "free": gpu["free"],
                "before": wanted[gpu["index"]],
                "back": gpu["free"] >= wanted[gpu["index"]] - slack,
            }
            for gpu in (seen() if wanted else [])
            if gpu["index"] in wanted
        ]
        if all(row["back"] for row in rows) or time.monotonic() > end:
            return rows
        time.sleep(0.5)
