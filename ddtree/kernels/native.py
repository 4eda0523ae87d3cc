"""Compile and load the C form of the CPU builder, where a C compiler is at hand; without one Python does the same work.

The library is built once per source and machine type into the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`),
which must belong to the user alone. `DDTREE_NATIVE=0` turns it off.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

_C_FLAGS = ("-O2", "-std=c99", "-shared", "-fPIC")


@lru_cache(maxsize=1)
def native_library() -> ctypes.CDLL | None:
    """Return the loaded library with its argument types set, or None where it cannot be had."""
    source = Path(__file__).with_name("tree.c")
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if os.environ.get("DDTREE_NATIVE") == "0" or not source.is_file():
        return None
    tag = hashlib.sha256(source.read_bytes() + repr((_C_FLAGS, platform.machine(), platform.libc_ver())).encode())
    try:
        folder = _native_folder()
        library = folder / f"tree-{tag.hexdigest()[:16]}.so"
        if not library.exists():
            if compiler is None:
                return None
            _compile(compiler, source, library)
        loaded = ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError):
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    loaded.ddtree_build.argtypes = [
        *(pointer, pointer, integer, integer, integer, ctypes.c_float, integer, pointer, integer)
    ]
    loaded.ddtree_build.restype = integer
    loaded.ddtree_closure.argtypes = [pointer, integer, pointer]
    loaded.ddtree_closure.restype = None
    return loaded


def _native_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "ddtree"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    # Code is loaded from here: nobody else may be able to put a file into it.
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"cache folder is open to others: {folder}")
    return folder


def _compile(compiler: str, source: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        command = [compiler, *_C_FLAGS, "-o", str(built), str(source), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        # Two processes may build at once: each renames a whole file into place.
        built.replace(library)
