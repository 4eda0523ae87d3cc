"""Read the GPU architectures embedded in an ELF file, and the CUDA toolkit that its read-only data names.

NVIDIA does not document the layout; the fields used here were checked against `cuobjdump --list-elf`. Only headers are
read: of a gigabyte of kernels some hundred kilobytes.
"""

from __future__ import annotations

import os
import re
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ddtree_deploy.agent.image import Image


MAGIC = b"\x50\xed\x55\xba"
PTX, ELF = 1, 2
ARCH_SPECIFIC, FAMILY = 1 << 20, 1 << 21
# Build stamps that NVIDIA leaves in read-only data, e.g. `2.28.9+cuda13.0`, `Build cuda_12.8.r12.8`, `toolkit/r13.0`.
TOOLKIT_STAMP = re.compile(rb"(?:\+cuda|cuda_|compiled with CUDA |toolkit/r|release )(1[0-9])\.(\d)")
STAMP_LIMIT = 64 << 20
CHUNK = 1 << 18
CONTAINER = struct.Struct("<4sHHQ")  # magic, version, size of this header, size of the entries
ENTRY = struct.Struct("<HHIQ12xI8xQ")  # kind, ?, size of this header, size of the padded payload, architecture, flags


def architectures(image: Image) -> tuple[list[str] | None, list[str]]:
    """Return the sorted architectures (`sm_90a`, `compute_80`) and what is wrong; None for GPU code that can not be read."""
    found: set[str] = set()
    problems: list[str] = []
    # What `__nv_relfatbin` holds went through the device linker into `.nv_fatbin`, not always for every architecture.
    name = b".nv_fatbin" if b".nv_fatbin" in image.sections else b"__nv_relfatbin"
    offset, size = image.sections.get(name, (0, 0))
    if size == 0:
        return [], []
    if offset + size > image.size:
        problems.append("truncated: the GPU code ends behind the end of the file")
        size = max(0, image.size - offset)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(image.fd, offset, size, os.POSIX_FADV_RANDOM)
    damage = walk(image, offset, offset + size, found)
    if damage or not found:
        problems.append("gpu code unknown: %s" % (damage or "no image in the fatbin section"))
    return (sorted(found, key=order) if found else None), problems


def walk(image: Image, at: int, end: int, found: set[str]) -> str | None:
    """Add the architectures of the containers in bytes at..end to `found`; return what is damaged, or None."""
    damage = None
    kinds: set[tuple[int, int, int]] = set()
    while at + 16 <= end:
        magic, _version, header, payload = CONTAINER.unpack(image.at(at, 16))
        if magic != MAGIC:
            at = _next_magic(image, at, end)
            continue
        stop = at + header + payload
        if header < 16 or stop > end:
            damage = "a container reaches beyond its section"
            at += 4
            continue
        entry = at + header
        while entry + 48 <= stop:
            kind, _unused, entry_header, padded, arch, flags = ENTRY.unpack(image.at(entry, 48))
            if entry_header < 48 or padded > stop - entry - entry_header:
                damage = "an entry reaches beyond its container"
                break
            kinds.add((kind, arch, flags & (ARCH_SPECIFIC | FAMILY)))
            entry += entry_header + padded
        at = stop
    for kind, arch, flags in kinds:
        if kind in (PTX, ELF) and 10 <= arch < 1000:
            suffix = "a" if flags & ARCH_SPECIFIC else "f" if flags & FAMILY else ""
            found.add("%s_%d%s" % ("sm" if kind == ELF else "compute", arch, suffix))
    return damage


def _next_magic(image: Image, at: int, end: int) -> int:
    while at < end:
        chunk = image.at(at, min(CHUNK, end - at))
        hit = chunk.find(MAGIC)
        if hit >= 0:
            return at + hit
        at += max(1, len(chunk) - 3) if at + len(chunk) < end else len(chunk)
    return end


def order(arch: str) -> tuple[bool, int, str]:
    """Sort code before PTX, then by number."""
    kind, _, rest = arch.partition("_")
    return kind != "sm", int(rest.rstrip("af")), rest


def toolkit(image: Image) -> str | None:
    """Return the CUDA toolkit (`13.0`) that the read-only data names most often, or None. A hint, not a proof."""
    offset, size = image.sections.get(b".rodata", (0, 0))
    tally: dict[str, int] = {}
    end = min(offset + size, offset + STAMP_LIMIT, image.size)
    for at in range(offset, end, CHUNK):
        for match in TOOLKIT_STAMP.finditer(image.at(at, min(CHUNK, end - at))):
            name = "%s.%s" % (match.group(1).decode(), match.group(2).decode())
            tally[name] = tally.get(name, 0) + 1
    return max(sorted(tally), key=lambda name: tally[name]) if tally else None
