"""Read what the dynamic loader would read from an ELF file, and which GPU architectures it carries (`fatbin`).

Everything is found through PT_DYNAMIC, so stripped files work; sections are used only for GPU code. Content can not
make `read` raise: a damaged file gives `problems`, and whatever could still be read. Plain reads at offsets, no
mapping: a file that shrinks meanwhile is a short read here and would be a SIGBUS there.
Sources: the ELF-64 specification, the LSB chapter on symbol versioning, `elf.h`.
"""

from __future__ import annotations

import os
import struct
from collections import defaultdict
from itertools import repeat

from ddtree_deploy.agent import fatbin
from ddtree_deploy.agent.image import Damaged, Image

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Facts = dict[str, Any]


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
BINDINGS = frozenset([STB_GLOBAL, STB_WEAK, STB_GNU_UNIQUE])
BASE = 1  # the version number of a name without a version
STV_DEFAULT, STV_PROTECTED = 0, 3
STT_TLS = 6
SHN_ABS = 0xFFF1
VER_FLG_WEAK = 2

MAX_NAME = 1 << 16  # the longest mangled name in torch has about 9 000 bytes


def read(path: str, stamp: bool = False, exports: bool = True) -> Facts:
    """Read one file and return its facts as plain data; never raise for what the file contains.

    Keys: `size`, `machine`, `kind` (`dyn`, `exec`, `rel`, `other`, or None for what is no ELF file), `soname`,
    `needed`, `rpath`, `runpath` (lists of directories), `defines` (names; `name@VER` hidden, `name@@VER` default
    version), `undefined` and `weak` (names, or `name@VER`), `verneed` ({soname: [version]}), `verdef`, `archs` (sorted
    `sm_90a`, `compute_80`; None when there is a fatbin that can not be read), `stamp` (CUDA toolkit named in the file,
    with `stamp=True`), `problems` (what is wrong, in words). Without `exports`, `defines` stays empty.
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
            _read_into(facts, handle.fileno(), size, stamp, exports)
    except OSError as error:
        facts["problems"].append("unreadable: %s" % (error.strerror or error))
    return facts


def _not_elf(head: bytes, size: int) -> str:
    if size == 0:
        return "empty file"
    return "zero-filled: no ELF header" if not head.strip(b"\0") else "not an ELF file"


def _read_into(facts: Facts, fd: int, size: int, stamp: bool, exports: bool) -> None:
    try:
        image = Image(fd, size)
    except (Damaged, struct.error) as error:
        facts["problems"].append("truncated: %s" % error)
        return
    facts["machine"], facts["kind"] = image.machine, image.kind
    facts["problems"] += image.problems
    try:
        _dynamic(facts, image, exports)
    except (Damaged, struct.error, OverflowError, ValueError) as error:
        facts["problems"].append("damaged: %s" % error)
    facts["archs"] = None
    try:
        facts["archs"], problems = fatbin.architectures(image)
        facts["problems"] += problems
        if stamp:
            facts["stamp"] = fatbin.toolkit(image)
    except (Damaged, struct.error, OverflowError, ValueError) as error:
        facts["problems"].append("damaged: %s" % error)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _dynamic(facts: Facts, image: Image, exports: bool) -> None:
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
        raise Damaged("no string table")
    start = image.offset(tags[DT_STRTAB])
    strings = image.at(start, min(tags.get(DT_STRSZ, 0), image.size - start))

    def string(index: int) -> str:
        end = strings.find(b"\0", index)
        if index >= len(strings) or end < 0 or end - index > MAX_NAME:
            raise Damaged("string %d is not in the string table" % index)
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
        _symbols(facts, image, strings, tags, versions, exports)


def _verneed(facts: Facts, image: Image, string: Callable[[int], str], tags: dict[int, int], versions: dict[int, str]) -> None:
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


def _verdef(facts: Facts, image: Image, string: Callable[[int], str], tags: dict[int, int], versions: dict[int, str]) -> None:
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


def _symbol_count(image: Image, tags: dict[int, int], table: int) -> int:
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


def _symbols(
    facts: Facts, image: Image, strings: bytes, tags: dict[int, int], versions: dict[int, str], exports: bool
) -> None:
    """Sort the dynamic symbols into `defines`, `undefined` and `weak`.

    First offsets into the string table, by kind and version, then names in the order of that table: neighbours there are
    neighbours in memory, and compress well. A torch has a hundred thousand symbols; all else is cheap.
    """
    start = image.offset(tags[DT_SYMTAB])
    count = _symbol_count(image, tags, start)
    rows = struct.iter_unpack("<IBBHQQ", image.at(start, 24 * count))
    numbers: tuple[int, ...] | None = None
    if DT_VERSYM in tags:
        numbers = struct.unpack("<%dH" % count, image.at(image.offset(tags[DT_VERSYM]), 2 * count))
    defined: dict[int, list[int]] = defaultdict(list)
    missing: dict[int, list[int]] = defaultdict(list)
    weak: dict[int, list[int]] = defaultdict(list)
    for (name, info, other, section, value, _size), number in zip(rows, numbers or repeat(BASE)):
        if info < 16 or not name or info >> 4 not in BINDINGS:  # below 16 are local symbols
            continue
        if section == 0:
            (weak if info >> 4 == STB_WEAK else missing)[number].append(name)
        # A definition has a value (thread-local and absolute ones may have none), is visible, not local to a version script.
        elif number & 0x7FFF and (value or info & 15 == STT_TLS or section == SHN_ABS) and other & 3 in (STV_DEFAULT, STV_PROTECTED):
            defined[number].append(name)
    names = _Names(strings)
    for kind, found, default in (("defines", defined if exports else {}, "@@"), ("undefined", missing, "@"), ("weak", weak, "@")):
        out = facts[kind]
        for number, offsets in sorted(found.items()):
            version = versions.get(number & 0x7FFF)
            part = names.at(sorted(offsets))
            if version:
                mark = "@" if number & 0x8000 else default
                # `V_1@@V_1` only names a version
                part = [name + mark + version for name in part if name != version or kind != "defines"]
            out += part


class _Names:
    """A string table as text: checked once, so that a name costs no more than finding its end."""

    def __init__(self, raw: bytes) -> None:
        at = 0
        while at < len(raw):
            end = raw.rfind(b"\0", at, at + MAX_NAME)
            if end < 0:
                raise Damaged("a name in the string table does not end")
            at = end + 1
        self.plain = raw.isascii()
        self.text = raw.decode("ascii" if self.plain else "latin-1")
        self.budget = max(64 << 20, 8 * len(raw))  # overlapping names must not turn a small file into gigabytes

    def at(self, offsets: list[int]) -> list[str]:
        """Return the names at sorted offsets; raise Damaged for one outside the table."""
        if offsets and offsets[-1] >= len(self.text):
            raise Damaged("name %d is not in the string table" % offsets[-1])
        text, find, out = self.text, self.text.find, []
        for first in range(0, len(offsets), 512):
            part = [text[offset : find("\0", offset)] for offset in offsets[first : first + 512]]
            self.budget -= sum(map(len, part))
            if self.budget < 0:
                raise Damaged("the symbol names overlap without end")
            out += part
        return out if self.plain else [_text(name.encode("latin-1")) for name in out]
