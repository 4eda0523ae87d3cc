"""Open an ELF-64 file by its headers: segments, sections, and reads that are checked against its size."""

from __future__ import annotations

import os
import struct

MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 22: "s390x"}

PT_LOAD, PT_DYNAMIC = 1, 2


class Damaged(Exception):
    """A structure points outside the file or is not what it must be."""


class Image:
    """Header, segments and sections of one file; offsets are checked here and nowhere else."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self.problems: list[str] = []
        head = self.at(0, 64)
        if head[4] != 2 or head[5] != 1:
            raise Damaged("not a 64-bit little-endian file")
        kind, machine = struct.unpack_from("<HH", head, 16)
        self.kind = {1: "rel", 2: "exec", 3: "dyn"}.get(kind, "other")
        self.machine = MACHINES.get(machine, "machine %d" % machine)
        phoff, shoff = struct.unpack_from("<QQ", head, 32)
        phentsize, phnum, shentsize, shnum, shstrndx = struct.unpack_from("<HHHHH", head, 54)
        self.loads: list[tuple[int, int, int]] = []
        self.dynamic: tuple[int, int] | None = None
        for index in range(phnum):
            ptype, _flags, offset, vaddr, _paddr, filesz, _memsz, _align = struct.unpack_from(
                "<IIQQQQQQ", self.at(phoff + index * phentsize, 56)
            )
            if ptype == PT_LOAD:
                self.loads.append((vaddr, filesz, offset))
            elif ptype == PT_DYNAMIC:
                self.dynamic = (offset, filesz)
        end = max([offset + filesz for _vaddr, filesz, offset in self.loads], default=0)
        if end > size:
            self.problems.append("truncated: segments end at byte %d of %d" % (end, size))
        self.sections = self._sections(shoff, shentsize, shnum, shstrndx)

    def at(self, offset: int, length: int) -> bytes:
        if offset < 0 or offset + length > self.size:
            raise Damaged("bytes %d..%d lie outside the file of %d" % (offset, offset + length, self.size))
        data = os.pread(self.fd, length, offset)
        if len(data) != length:
            raise Damaged("the file shrank while it was read")
        return data

    def offset(self, vaddr: int) -> int:
        for start, filesz, offset in self.loads:
            if start <= vaddr < start + filesz:
                return offset + vaddr - start
        raise Damaged("address 0x%x is in no segment" % vaddr)

    def _sections(self, shoff: int, shentsize: int, shnum: int, shstrndx: int) -> dict[bytes, tuple[int, int]]:
        """Return {name: (offset, size)}; an unreadable table is a problem, an absent one is not."""
        if not shoff or not shnum:
            return {}
        try:
            table = self.at(shoff, shentsize * shnum)
            if shentsize < 64:
                raise Damaged("section headers of %d bytes" % shentsize)
            if not table.strip(b"\0"):
                self.problems.append("zero-filled: the section headers are empty")
                return {}
            rows = [struct.unpack_from("<IIQQQQ", table, index * shentsize) for index in range(shnum)]
            if shstrndx >= shnum:
                return {}
            names = self.at(rows[shstrndx][4], rows[shstrndx][5])
        except Damaged as error:
            self.problems.append("truncated: %s" % error)
            return {}
        out: dict[bytes, tuple[int, int]] = {}
        for name, kind, _flags, _addr, offset, size in rows:
            if kind != 8 and name < len(names):  # 8 is SHT_NOBITS: it has no bytes in the file
                out.setdefault(names[name : names.find(b"\0", name)], (offset, size))
        return out
