"""Small file systems for the tests: a tmpfs that is unmounted whatever happens."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def tmpfs(at: Path, size: int, inodes: int = 0) -> Iterator[Path]:
    """Mount a tmpfs of `size` bytes and (0: no limit but the kernel's) `inodes`."""
    at.mkdir(parents=True, exist_ok=True)
    options = f"size={size}" + (f",nr_inodes={inodes}" if inodes else "")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "ddtree-test", str(at)], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def free(at: Path) -> tuple[int, int]:
    """Return free bytes and inodes."""
    info = os.statvfs(at)
    return info.f_bfree * info.f_frsize, info.f_ffree


def fill(at: Path) -> Path:
    """Use up the space of a file system; remove the returned file to give it back."""
    filler = at / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        os.posix_fallocate(file.fileno(), 0, max(1, free(at)[0] - (1 << 20)))
        file.seek(0, os.SEEK_END)
        while True:  # others write meanwhile
            file.write(bytes(4096))
    return filler


def fill_inodes(at: Path) -> Path:
    """Use up the inodes of a file system; remove the returned directory to give them back."""
    directory = at / "inodes"
    directory.mkdir()
    with contextlib.suppress(OSError):
        for number in range(free(at)[1] + 1):
            (directory / str(number)).touch()
    return directory
