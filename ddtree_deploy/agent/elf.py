"""Read what the dynamic loader would read from an ELF file, and the GPU architectures embedded in it.

Everything is found through PT_DYNAMIC, so stripped files work; sections are used only for `.nv_fatbin`. Content can
not make `read` raise: a damaged file gives `problems`, and whatever could still be read. Plain reads at offsets, no
mapping: a file that shrinks meanwhile is a short read here and would be a SIGBUS there.
Sources: the ELF-64 specification, the LSB chapter on symbol versioning, `elf.h`. The fatbin layout is not documented by
NVIDIA; the fields used here were checked against `cuobjdump --list-elf`.
"""

from __future__ import annotations

import os
import re
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Facts = dict[str, Any]


MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le", 22: "s390x"}

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NEEDED, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SONAME, DT_RPATH = 1, 4, 5, 6, 10, 14, 15
DT_RUNPATH, DT_GNU_HASH, DT_VERSYM, DT_VERDEF, DT_VERDEFNUM, DT_VERNEED, DT_VERNEEDNUM = (
    29,
    0x6FFFFEF5,
    0x6FFFFFF0,
    0x6FFFFFFC,
    0x6FFFFFFD,
    0x6FFFFFFE,
    0x6FFFFFFF,
)
DT_FLAGS_1, DF_1_PIE = 0x6FFFFFFB, 0x08000000
STB_GLOBAL, STB_WEAK, STB_GNU_UNIQUE = 1, 2, 10
STV_DEFAULT, STV_PROTECTED = 0, 3
STT_TLS = 6
VER_FLG_WEAK = 2

MAX_NAME = 1 << 16  # the longest mangled name in torch has about 9 000 bytes
FATBIN_MAGIC = b"\x50\xed\x55\xba"
FATBIN_PTX, FATBIN_ELF = 1, 2
FATBIN_ARCH_SPECIFIC, FATBIN_FAMILY = 1 << 20, 1 << 21
# Build stamps that NVIDIA leaves in read-only data, e.g. `2.28.9+cuda13.0`, `Build cuda_12.8.r12.8`, `toolkit/r13.0`.
TOOLKIT_STAMP = re.compile(rb"(?:\+cuda|cuda_|compiled with CUDA |toolkit/r|release )(1[0-9])\.(\d)")
STAMP_LIMIT = 64 << 20
CHUNK = 1 << 18


class _Damaged(Exception):
    """A structure points outside the file or is not what it must be."""


def read(path: str, stamp: bool = False) -> Facts:
    """Read one file and return its facts as plain data; never raise for what the file contains.

    Keys: `size`, `machine`, `kind` (`dyn`, `exec`, `rel`, `other`, or None for what is no ELF file), `soname`,
    `needed`, `rpath`, `runpath` (lists of directories), `defines` (names; `name@VER` hidden, `name@@VER` default
    version), `undefined` and `weak` (names, or `name@VER`), `verneed` ({soname: [version]}), `verdef`, `archs` (sorted
    `sm_90a`, `compute_80`; None when there is a fatbin that can not be read), `stamp` (CUDA toolkit named in the file,
    with `stamp=True`), `problems` (what is wrong, in words).
    """
    facts: Facts = {
        "size": 0, "machine": None, "kind": None, "soname": None, "needed": [], "rpath": [], "runpath": [],
        "defines": [], "undefined": [], "weak": [], "verneed": {}, "verdef": [], "archs": [], "problems": [],
    }  # fmt: skip
    try:
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            facts["size"] = size
            head = handle.read(64)
            if head[:4] != b"\x7fELF":
                facts["problems"].append(_not_elf(head, size))
                return facts
            _read_into(facts, handle.fileno(), size, stamp)
    except OSError as error:
        facts["problems"].append("unreadable: %s" % (error.strerror or error))
    return facts


def _not_elf(head: bytes, size: int) -> str:
    if size == 0:
        return "empty file"
    return "zero-filled: no ELF header" if not head.strip(b"\0") else "not an ELF file"


def _read_into(facts: Facts, fd: int, size: int, stamp: bool) -> None:
    try:
        image = _Image(fd, size)
    except (_Damaged, struct.error) as error:
        facts["problems"].append("truncated: %s" % error)
        return
    facts["machine"], facts["kind"] = image.machine, image.kind
    facts["problems"] += image.problems
    for part in (_dynamic, _fatbins):
        try:
            part(facts, image)
        except (_Damaged, struct.error, OverflowError, ValueError) as error:
            facts["problems"].append("damaged: %s" % error)
            if part is _fatbins:
                facts["archs"] = None
    if stamp:
        try:
            facts["stamp"] = _toolkit(image)
        except _Damaged:
            facts["stamp"] = None


class _Image:
    """Header, segments and sections of one file; offsets are checked here and nowhere else."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self.problems: list[str] = []
        head = self.at(0, 64)
        if head[4] != 2 or head[5] != 1:
            raise _Damaged("not a 64-bit little-endian file")
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
            raise _Damaged("bytes %d..%d lie outside the file of %d" % (offset, offset + length, self.size))
        data = os.pread(self.fd, length, offset)
        if len(data) != length:
            raise _Damaged("the file shrank while it was read")
        return data

    def offset(self, vaddr: int) -> int:
        for start, filesz, offset in self.loads:
            if start <= vaddr < start + filesz:
                return offset + vaddr - start
        raise _Damaged("address 0x%x is in no segment" % vaddr)

    def _sections(self, shoff: int, shentsize: int, shnum: int, shstrndx: int) -> dict[bytes, tuple[int, int]]:
        """Return {name: (offset, size)}; an unreadable table is a problem, an absent one is not."""
        if not shoff or not shnum:
            return {}
        try:
            table = self.at(shoff, shentsize * shnum)
            if shentsize < 64:
                raise _Damaged("section headers of %d bytes" % shentsize)
            if not table.strip(b"\0"):
                self.problems.append("zero-filled: the section headers are empty")
                return {}
            rows = [struct.unpack_from("<IIQQQQ", table, index * shentsize) for index in range(shnum)]
            if shstrndx >= shnum:
                return {}
            names = self.at(rows[shstrndx][4], rows[shstrndx][5])
        except _Damaged as error:
            self.problems.append("truncated: %s" % error)
            return {}
        out: dict[bytes, tuple[int, int]] = {}
        for name, kind, _flags, _addr, offset, size in rows:
            if kind != 8 and name < len(names):  # 8 is SHT_NOBITS: it has no bytes in the file
                out.setdefault(names[name : names.find(b"\0", name)], (offset, size))
        return out


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _dynamic(facts: Facts, image: _Image) -> None:
    if image.dynamic is None:
        return
    offset, length = image.dynamic
    tags: dict[int, int] = {}
    needed: list[int] = []
    soname: int | None = None
    rpath: int | None = None
    runpath: int | None = None
    for tag, value in struct.iter_unpack("<QQ", image.at(offset, length - length % 16)):
        if tag == 0:
            break
        if tag == DT_NEEDED:
            needed.append(value)
        elif tag == DT_SONAME:
            soname = value
        elif tag == DT_RPATH:
            rpath = value
        elif tag == DT_RUNPATH:
            runpath = value
        else:
            tags.setdefault(tag, value)
    if not tags and not needed:
        facts["problems"].append("zero-filled: the dynamic section is empty")
        return
    if tags.get(DT_FLAGS_1, 0) & DF_1_PIE:
        facts["kind"] = "exec"  # position-independent executables are ET_DYN as well
    if DT_STRTAB not in tags:
        raise _Damaged("no string table")
    start = image.offset(tags[DT_STRTAB])
    strings = image.at(start, min(tags.get(DT_STRSZ, 0), image.size - start))

    def string(index: int) -> str:
        end = strings.find(b"\0", index)
        if index >= len(strings) or end < 0 or end - index > MAX_NAME:
            raise _Damaged("string %d is not in the string table" % index)
        return _text(strings[index:end])

    def paths(index: int | None) -> list[str]:
        return [] if index is None else [part for part in string(index).split(":") if part]

    facts["needed"] = [string(index) for index in needed]
    facts["soname"] = None if soname is None else string(soname)
    facts["rpath"], facts["runpath"] = paths(rpath), paths(runpath)
    if facts["kind"] == "dyn" and not facts["needed"] and DT_SYMTAB not in tags:
        facts["problems"].append("zero-filled: neither needed libraries nor symbols")
        return
    versions: dict[int, str] = {}
    if DT_VERNEED in tags:
        _verneed(facts, image, string, tags, versions)
    if DT_VERDEF in tags:
        _verdef(facts, image, string, tags, versions)
    if DT_SYMTAB in tags:
        _symbols(facts, image, strings, tags, versions)


def _verneed(facts: Facts, image: _Image, string: Callable[[int], str], tags: dict[int, int], versions: dict[int, str]) -> None:
    offset = image.offset(tags[DT_VERNEED])
    for _ in range(min(tags.get(DT_VERNEEDNUM, 0), 4096)):
        _version, count, file, aux, following = struct.unpack("<HHIII", image.at(offset, 16))
        wanted = facts["verneed"].setdefault(string(file), [])
        at = offset + aux
        for _ in range(count):
            _hash, flags, other, name, step = struct.unpack("<IHHII", image.at(at, 16))
            versions[other & 0x7FFF] = string(name)
            if not flags & VER_FLG_WEAK:
                wanted.append(string(name))
            if not step:
                break
            at += step
        if not following:
            break
        offset += following


def _verdef(facts: Facts, image: _Image, string: Callable[[int], str], tags: dict[int, int], versions: dict[int, str]) -> None:
    offset = image.offset(tags[DT_VERDEF])
    for _ in range(min(tags.get(DT_VERDEFNUM, 0), 65536)):
        _version, flags, index, count, _hash, aux, following = struct.unpack("<HHHHIII", image.at(offset, 20))
        if count:
            name = string(struct.unpack("<I", image.at(offset + aux, 4))[0])
            if not flags & 1:  # VER_FLG_BASE names the file itself
                facts["verdef"].append(name)
                versions[index & 0x7FFF] = name
        if not following:
            break
        offset += following


def _symbol_count(image: _Image, tags: dict[int, int], table: int) -> int:
    if DT_HASH in tags:
        _nbucket, nchain = struct.unpack("<II", image.at(image.offset(tags[DT_HASH]), 8))
        return int(nchain)
    if DT_GNU_HASH in tags:
        at = image.offset(tags[DT_GNU_HASH])
        nbuckets, first, bloom, _shift = struct.unpack("<IIII", image.at(at, 16))
        at += 16 + 8 * bloom
        buckets = struct.unpack("<%dI" % nbuckets, image.at(at, 4 * nbuckets))
        last: int = max(buckets, default=0)
        if last < first:
            return int(first)
        chain = at + 4 * nbuckets + 4 * (last - first)
        while not struct.unpack("<I", image.at(chain, 4))[0] & 1:
            chain += 4
            last += 1
        return last + 1
    offset, size = image.sections.get(b".dynsym", (0, 0))
    return size // 24 if offset == table else 0


def _symbols(facts: Facts, image: _Image, strings: bytes, tags: dict[int, int], versions: dict[int, str]) -> None:
    table = image.offset(tags[DT_SYMTAB])
    count = _symbol_count(image, tags, table)
    rows = image.at(table, 24 * count)
    versym: tuple[int, ...] = ()
    if DT_VERSYM in tags:
        raw = image.at(image.offset(tags[DT_VERSYM]), 2 * count)
        versym = struct.unpack("<%dH" % count, raw)
    defines, undefined, weak = facts["defines"], facts["undefined"], facts["weak"]
    budget = max(64 << 20, 8 * len(strings))  # overlapping strings must not turn a small file into gigabytes
    find, limit = strings.find, len(strings)
    for index, (name, info, other, section, value, _size) in enumerate(struct.iter_unpack("<IBBHQQ", rows)):
        bind = info >> 4
        if bind not in (STB_GLOBAL, STB_WEAK, STB_GNU_UNIQUE) or not name:
            continue
        end = find(b"\0", name)
        if name >= limit or end < 0 or end - name > MAX_NAME:
            raise _Damaged("symbol %d has no name in the string table" % index)
        budget -= end - name
        if budget < 0:
            raise _Damaged("the symbol names overlap without end")
        text = _text(strings[name:end])
        number = versym[index] if versym else 1
        version = versions.get(number & 0x7FFF)
        if section == 0:
            if version:
                text += "@" + version
            (weak if bind == STB_WEAK else undefined).append(text)
        elif other & 3 in (STV_DEFAULT, STV_PROTECTED) and (value or info & 15 == STT_TLS or section == 0xFFF1):
            if section == 0xFFF1 and text == version:
                continue  # the absolute symbol that names a version
            if versym and number & 0x7FFF == 0:
                continue  # made local by a version script
            if version:
                text += ("@" if number & 0x8000 else "@@") + version
            defines.append(text)


def _fatbins(facts: Facts, image: _Image) -> None:
    found: set[str] = set()
    seen, damage = False, None
    # What `__nv_relfatbin` holds went through the device linker into `.nv_fatbin`, not always for every architecture.
    for name in (b".nv_fatbin",) if b".nv_fatbin" in image.sections else (b"__nv_relfatbin",):
        if name not in image.sections:
            continue
        offset, size = image.sections[name]
        if size == 0:
            continue
        if offset + size > image.size:
            facts["problems"].append("truncated: the GPU code ends behind the end of the file")
            size = max(0, image.size - offset)
        seen = True
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(image.fd, offset, size, os.POSIX_FADV_RANDOM)
        damage = _walk_fatbin(image, offset, offset + size, found) or damage
    facts["archs"] = sorted(found, key=_arch_order)
    if seen and (damage or not found):
        facts["problems"].append("gpu code unknown: %s" % (damage or "no image in the fatbin section"))
        if not found:
            facts["archs"] = None


def _walk_fatbin(image: _Image, at: int, end: int, found: set[str]) -> str | None:
    """Add the architectures of the containers in bytes at..end to `found`; return what is damaged, or None."""
    damage = None
    while at + 16 <= end:
        magic, _version, header, payload = struct.unpack("<4sHHQ", image.at(at, 16))
        if magic != FATBIN_MAGIC:
            at = _next_magic(image, at, end)
            continue
        stop = at + header + payload
        if header < 16 or stop > end:
            damage = "a container reaches beyond its section"
            at += 4
            continue
        entry = at + header
        while entry + 48 <= stop:
            fields = image.at(entry, 48)
            kind, _unused, entry_header, padded = struct.unpack_from("<HHIQ", fields)
            if entry_header < 48 or padded > stop - entry - entry_header:
                damage = "an entry reaches beyond its container"
                break
            arch, flags = struct.unpack_from("<I", fields, 28)[0], struct.unpack_from("<Q", fields, 40)[0]
            if kind in (FATBIN_PTX, FATBIN_ELF) and 10 <= arch < 1000:
                suffix = "a" if flags & FATBIN_ARCH_SPECIFIC else "f" if flags & FATBIN_FAMILY else ""
                found.add("%s_%d%s" % ("sm" if kind == FATBIN_ELF else "compute", arch, suffix))
            entry += entry_header + padded
        at = stop
    return damage


def _next_magic(image: _Image, at: int, end: int) -> int:
    while at < end:
        chunk = image.at(at, min(CHUNK, end - at))
        hit = chunk.find(FATBIN_MAGIC)
        if hit >= 0:
            return at + hit
        at += max(1, len(chunk) - 3) if at + len(chunk) < end else len(chunk)
    return end


def _arch_order(arch: str) -> tuple[bool, int, str]:
    kind, _, rest = arch.partition("_")
    return kind != "sm", int(rest.rstrip("af")), rest


def _toolkit(image: _Image) -> str | None:
    """Return the CUDA toolkit (`13.0`) that the read-only data names most often, or None. A hint, not a proof."""
    offset, size = image.sections.get(b".rodata", (0, 0))
    tally: dict[str, int] = {}
    end = min(offset + size, offset + STAMP_LIMIT, image.size)
    for at in range(offset, end, CHUNK):
        for match in TOOLKIT_STAMP.finditer(image.at(at, min(CHUNK, end - at))):
            name = "%s.%s" % (match.group(1).decode(), match.group(2).decode())
            tally[name] = tally.get(name, 0) + 1
    return max(sorted(tally), key=lambda name: tally[name]) if tally else None
