"""What the dynamic loader finds outside of a tree: LD_LIBRARY_PATH, ld.so.cache, the trusted directories (ld.so(8))."""

from __future__ import annotations

import glob
import os
from functools import lru_cache

TRUSTED_DIRS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")


def find(soname: str) -> str | None:
    """Return the path that a library of this name would be loaded from, or None."""
    dirs = [d for d in os.environ.get("LD_LIBRARY_PATH", "").split(":") if d]
    for directory in dirs:
        if os.path.isfile(os.path.join(directory, soname)):
            return os.path.join(directory, soname)
    found = cache().get(soname)
    if found and os.path.isfile(found):
        return found
    return next((p for d in TRUSTED_DIRS for p in [os.path.join(d, soname)] if os.path.isfile(p)), None)


@lru_cache(maxsize=2)
def cache(path: str = "/etc/ld.so.cache") -> dict[str, str]:
    """Return {soname: path} of a glibc-ld.so.cache1.1 file, 64-bit entries without hardware condition, first wins.

    Read once a session.
    """
    out: dict[str, str] = {}
    try:
        with open(path, "rb") as file:
            data = file.read()
        start = data.find(b"glibc-ld.so.cache1.1")
        if start < 0:
            return out
        count = min(int.from_bytes(data[start + 20 : start + 24], "little"), (len(data) - start) // 24)
        for index in range(count):
            at = start + 48 + 24 * index
            flags, key, value = (int.from_bytes(data[at + i : at + i + 4], "little") for i in (0, 4, 8))
            hardware = int.from_bytes(data[at + 16 : at + 24], "little")
            if hardware or flags & 0xFF00 == 0 or key >= len(data) or value >= len(data):
                continue
            name, target = (data[start + at : data.find(b"\0", start + at)].decode("utf-8", "replace") for at in (key, value))
            out.setdefault(name, target)
    except OSError:
        pass
    return out


def directories() -> list[str]:
    """Return the directories that ld.so.conf adds."""
    out: list[str] = []
    for path in ["/etc/ld.so.conf", *sorted(glob.glob("/etc/ld.so.conf.d/*.conf"))]:
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = [line.split("#", 1)[0].strip() for line in file]
        except OSError:
            continue
        out += [line for line in lines if line and not line.startswith("include")]
    return out
