"""What is fuzzed: each target takes bytes that an enemy chose, and may end only as its contract says. Seeds are made, not stored.

A target raises AssertionError, or anything that its contract does not name, when it found something.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ddtree_deploy import answers, config, manifest
from ddtree_deploy.agent import dists, elf, frames, landing, layout, stage, zstd
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.errors import DeployError
from ddtree_deploy.models import UNOWNED, FileEntry, Manifest, PythonFacts

Target = Callable[[bytes], None]

#: In memory where that is possible: a disk flushes a file that is truncated and written again.
_PLACE = tempfile.TemporaryDirectory(prefix="ddtree-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
SCRATCH = Path(_PLACE.name)
EMPTY = hashlib.sha256(b"").hexdigest()
X = hashlib.sha256(b"x").hexdigest()


def _source(data: bytes) -> frames.ReadInto:
    left = memoryview(data)

    def readinto(view: memoryview) -> int:
        nonlocal left
        count = min(len(view), len(left))
        view[:count] = left[:count]
        left = left[count:]
        return count

    return readinto


def frames_target(data: bytes) -> None:
    """Frames as an agent or a session reads them: an end or a ProtocolError, objects that have their digest, nothing else."""
    reader = frames.Reader(_source(data))
    target = landing.Landing(os.fspath(SCRATCH / "in"), {EMPTY: 0, X: 1})
    (SCRATCH / "in").mkdir(exist_ok=True)
    with contextlib.suppress(frames.Closed, frames.ProtocolError):
        while True:
            header, _size = reader.header()
            if "objects" in header:
                target.receive(reader, header)
            else:
                value = frames.unpack(header, reader.take(1 << 16)) if "sha256" in header else reader.take(1 << 16)
                for op in answers.SHAPES:
                    answers.matches(op, header, value)
    _only_honest(SCRATCH / "in")


def _only_honest(directory: Path) -> None:
    """Assert that a directory of received objects holds nothing but what its name says; empty it."""
    for path in directory.iterdir():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
        path.unlink()


def manifest_target(data: bytes) -> None:
    """A manifest is refused, or it is one that can be written and read again, and stays below its root."""
    try:
        found = manifest.decode(data)
    except DeployError:
        return
    assert manifest.decode(manifest.encode(found)) == found
    for entry in found.files:
        assert os.path.normpath(f"/root/{entry.path}") == f"/root/{entry.path}"
        if entry.kind == "l":
            at = os.path.normpath(os.path.join("/root", os.path.dirname(entry.path), entry.digest))
            assert at == "/root" or at.startswith("/root/")


def rows_target(data: bytes) -> None:
    """The rows of a `stage` request, as an agent checks them."""
    with contextlib.suppress(Failure, frames.ProtocolError):
        for path, kind, _mode, _size, digest in stage.parse_result(frames.loads(data)):
            assert os.path.normpath(f"/root/{path}") == f"/root/{path}"
            if kind == "l":
                at = os.path.normpath(os.path.join("/root", os.path.dirname(path), digest))
                assert at == "/root" or at.startswith("/root/")


def elf_target(data: bytes) -> None:
    """A shared object: facts, and what is wrong with it, whatever it holds."""
    path = SCRATCH / "object.so"
    path.write_bytes(data)
    facts = elf.read(os.fspath(path), stamp=True)
    assert facts["size"] == len(data)
    json.dumps(facts)


def fatbin_target(data: bytes) -> None:
    """GPU code inside an otherwise honest shared object."""
    elf_target(_with_section(data))


def record_target(data: bytes) -> None:
    """The metadata of a distribution: RECORD, METADATA, entry points, direct_url.json, .pth, torch/version.py."""
    root = SCRATCH / "site"
    info = root / "x-1.dist-info"
    (root / "torch").mkdir(parents=True, exist_ok=True)
    info.mkdir(exist_ok=True)
    for path in (*(info / name for name in ("RECORD", "METADATA", "entry_points.txt", "direct_url.json", "INSTALLER")),
                 root / "x.pth", root / "torch" / "version.py"):  # fmt: skip
        path.write_bytes(data)
    rows = dists.read_distributions(os.fspath(root))
    shape = answers.each(answers._DISTRIBUTION)
    assert shape(json.loads(json.dumps(rows))), rows
    assert answers.each(answers.row(answers.text, *[answers.each(answers.text)] * 2))(dists.read_pth(os.fspath(root)))
    dists.torch_version(os.fspath(root))


def toml_target(data: bytes) -> None:
    """A `ddtree.toml`: a configuration, or a DeployError that says what is wrong."""
    directory = SCRATCH / "config"
    directory.mkdir(exist_ok=True)
    (directory / config.PROJECT_FILE).write_bytes(data)
    with contextlib.suppress(DeployError):
        found = config.load(directory, {"HOME": os.fspath(SCRATCH / "nobody")})
        for name in (*found.hosts, "ct200"):
            with contextlib.suppress(DeployError):
                config.resolve_host(name, config=found)
        assert all(isinstance(key, str) for key, _value, _origin in found.rows())


def index_target(data: bytes) -> None:
    """The index of a generation, its record and its ledger, as a torn disk may leave them."""
    found = layout.Layout(os.fspath(SCRATCH / "venv"), "lib/python3.11/site-packages")
    os.makedirs(found.directory(1), exist_ok=True)
    for path in (os.path.join(found.directory(1), "index"), os.path.join(found.directory(1), "generation.json"), found.ledger):
        Path(path).write_bytes(data)
    layout.Index.load(os.path.join(found.directory(1), "index"))
    layout.Index.seal_of(os.path.join(found.directory(1), "index"))
    found.numbers(), found.partials(), found.next_number(), found.previous_of(1)


def zstd_target(data: bytes) -> None:
    """A compressed object that arrives: it has its digest, or it is told to be bad."""
    if not zstd.available():
        return
    target = landing.Landing(os.fspath(SCRATCH / "in"), {X: 1})
    (SCRATCH / "in").mkdir(exist_ok=True)
    frame = frames.encode({"objects": [[X, 1, len(data)]]}, len(data)) + data
    reader = frames.Reader(_source(frame))
    target.receive(reader, reader.header()[0])
    _only_honest(SCRATCH / "in")
    assert target.bad == [X] or target.received == 1


TARGETS: dict[str, Target] = {
    "frames": frames_target, "manifest": manifest_target, "rows": rows_target, "elf": elf_target, "fatbin": fatbin_target,
    "record": record_target, "toml": toml_target, "index": index_target, "zstd": zstd_target,
}  # fmt: skip

#: What an enemy may do to any target's input beyond the seeds (libFuzzer's dictionary, and hypothesis' alphabet).
WORDS = (
    b"../", b"/", b"\0", b"\n", b"1e999", b"NaN", b"[" * 20, b"]", b"{", b'"', b",", b"\\u0000", b"\xff", b"\x7fELF", b"\x50\xed\x55\xba",
)  # fmt: skip


def seeds(name: str) -> Iterator[bytes]:
    """Yield small honest inputs of a target."""
    yield b""
    if name == "frames":
        fields, payload = frames.pack({"files": [["a", "f", 420, 1, X]]})
        yield frames.encode({"hello": {"protocol": 1}}) + frames.encode({"re": 1, "ok": True, **fields}, len(payload)) + payload
        yield frames.encode({"re": 2, "objects": [[X, 1], [EMPTY, 0]]}, 1) + b"x" + frames.encode({"pong": True})
        yield frames.encode({"re": 2, "objects": [[X, 1, 1]]}, 1) + b"x"
    elif name == "manifest":
        python = PythonFacts(**dict.fromkeys(PythonFacts.__dataclass_fields__, "") | {"debug": False, "free_threaded": False})
        files = (FileEntry("a/b.py", "f", 0o644, 1, X, UNOWNED, -1), FileEntry("a/l", "l", 0o777, 0, "b.py", UNOWNED, -1))
        yield manifest.encode(Manifest(host="h", venv="/v", python=python, distributions=(), files=files))
    elif name == "rows":
        yield json.dumps([["a/b", "f", 420, 1, X], ["a/l", "l", 511, 0, "b"]]).encode()
    elif name in ("elf", "fatbin"):
        code = _container()
        yield code if name == "fatbin" else _with_section(code)
        if name == "elf":
            yield Path("/proc/self/exe").read_bytes()[:16_000]
    elif name == "record":
        yield f"a/b.py,sha256={base64.urlsafe_b64encode(bytes(32)).decode().rstrip('=')},3\n\"a,b\",,\n../../../bin/x,,\n".encode()
        yield b"Metadata-Version: 2.1\nName: x\nVersion: 1\nRequires-Dist: y>=1\n\n[console_scripts]\nx = x:main\n"
        yield b'{"url": "https://u:p@h/x", "dir_info": {"editable": true}}'
        yield b"__version__ = '2.0+cu130'\ncuda: str = '13.0'\n"
    elif name == "toml":
        yield Path(config.__file__).with_name("config_example.toml").read_bytes()
        yield b'[hosts.ct200]\naddress = "u@h"\nvenv = "~/v"\n[hosts.ct200.service_env]\nA = "b"\n[profiles.x]\nonly = ["torch"]\n'
    elif name == "index":
        yield b'{"version": 1, "seal": "x"}\n[["a", "f", 420, 1, "' + X.encode() + b'", 1, 2, 3, 4]]\n'
        yield b'{"number": 1, "generation": 1, "event": "confirmed", "previous": 0}\n'
    elif name == "zstd":
        with contextlib.suppress(ImportError):
            import zstandard

            yield zstandard.ZstdCompressor().compress(b"x")
            yield zstandard.ZstdCompressor().compress(b"hello " * 100)


#: What short runs would not come to: found once, by hand or in a long run, and kept.
KNOWN: dict[str, tuple[bytes, ...]] = {
    "frames": (struct.pack(">IQ", 9, 0) + b"[" * 9,),
    "manifest": (b"[" * 100_000, b"9" * 5000, b"{}", b"null", b'{"schema": 1e999}', b'{"schema": {}}'),
    "rows": (b"[" * 100_000, b"[[[],1,2,3,4]]", b'[{"a": 1}]', b'[["a","f",{},2,"x"]]', b'[["\\ud800/..","l",420,1,"b"]]'),
    "record": (
        b"a," + b"x" * 200_000 + b",1\n", b"a\0b,,\n", b"a\rb,c\n", b"[" * 5000, b'{"url":' + b"[" * 100_000, b"x=" + b"(" * 3000,
        b"-" * 100_000, b"__version__ = " + b"9" * 5000,
    ),
    "toml": (
        b"a=" + b"[" * 5000, b"a=" + b"9" * 5000, b"ssh_config='~nobody-of-that-name/x'\n", b"a=1e999", b"hosts=3",
        b"[hosts.x]\ntransport='local'\nvenv='~nobody-of-that-name/x'\n", b"[hosts.x]\nservice_env=3", b"[[hosts.x]]\na=1", b"\xff",
    ),
    "index": (
        b"[" * 100_000, b'{"version":1}\n' + b"[" * 100_000, b"[1]\n[1]\n", b'{"version":1}\n{"a":1}', b'{"version":1}\n[[]]',
        b'{"generation":1e999}\n', b'{"version":1}\n[[["a"],1]]', b'{"previous":[1],"event":"confirmed","generation":1}',
    ),
}  # fmt: skip


def _container() -> bytes:
    """Return a fatbin with one ELF entry for sm_90a (the fields that `agent.fatbin` reads)."""
    entry = struct.pack("<HHIQ12xI8xQ", 2, 0x101, 64, 0, 90, 1 << 20).ljust(64, b"\0")
    return struct.pack("<4sHHQ", b"\x50\xed\x55\xba", 1, 16, len(entry)) + entry


def _with_section(data: bytes) -> bytes:
    """Return a shared object of the least size with `data` as its `.nv_fatbin` (ELF-64 specification)."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    at = 64 + len(data)
    table = at + len(names)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 56, 0, 64, 3, 2)
    row = struct.Struct("<IIQQQQIIQQ")
    sections = row.pack(*[0] * 10) + row.pack(1, 1, 2, 0, 64, len(data), 0, 0, 8, 0) + row.pack(12, 3, 0, 0, at, len(names), 0, 0, 1, 0)
    return head + data + names + sections
