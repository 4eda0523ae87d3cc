"""GPU code containers written by hand: the outline of a `.nv_fatbin` section, with empty payloads."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SPECIFIC, FAMILY, ZSTD = 1 << 20, 1 << 21, 1 << 15


def entry(arch: str, header: int = 64, payload: int = 24) -> bytes:
    """Write one entry for `sm_90a`, `sm_100f` or `compute_80`; header sizes of 64 to 112 occur."""
    kind, _, number = arch.partition("_")
    flags = SPECIFIC if number.endswith("a") else FAMILY if number.endswith("f") else 0
    fields = bytearray(header)
    struct.pack_into("<HHIQ", fields, 0, 2 if kind == "sm" else 1, 0x101, header, payload)
    struct.pack_into("<I", fields, 28, int(number.rstrip("af")))
    struct.pack_into("<Q", fields, 40, flags | ZSTD)
    return bytes(fields) + b"\xaa" * payload


def container(archs: Sequence[str], header: int = 64) -> bytes:
    body = b"".join(entry(arch, header) for arch in archs)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def shared_object(path: Path, section: bytes, name: str = ".nv_fatbin") -> Path:
    """Link a shared object that carries one such section; return its path."""
    return shared_objects(path, {name: section})


def shared_objects(path: Path, sections: Mapping[str, bytes]) -> Path:
    """Link a shared object that carries the sections; return its path."""
    source = path.with_suffix(".s")
    text = '.section .note.GNU-stack,""\n'
    for name, content in sections.items():
        raw = path.with_suffix(f".{name.strip('._')}.bin")
        raw.write_bytes(content)
        text += f'.section {name},"a"\n.balign 8\n.incbin "{raw}"\n'
    source.write_text(text)
    subprocess.run(["gcc", "-shared", "-nostdlib", "-o", str(path), str(source)], check=True, capture_output=True)
    return path
