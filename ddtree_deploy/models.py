"""The nouns: what a snapshot holds, what a target looks like, what a push will do and did. Frozen, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ddtree_deploy.abi import Verdict
    from ddtree_deploy.launch.models import Server

STOCK, PATCHED, UNOWNED = "stock", "patched", "unowned"


class FileEntry(NamedTuple):
    """One file of a tree (a named tuple, since a tree holds tens of thousands and a dataclass costs four times as much).

    `kind` is `f` or `l`; `digest` is the sha256 of the content, or the target of a link; `origin` is `stock` (equals RECORD),
    `patched` (differs from it), or `unowned` (in nobody's RECORD); `owner` indexes `Manifest.distributions`, -1 for nobody.
    """

    path: str
    kind: str
    mode: int
    size: int
    digest: str
    origin: str
    owner: int


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed distribution: its name as METADATA spells it, its version, and what it owns.

    `version` is METADATA's; `build` is the version that the code itself reports where they differ (`2.11.0+cu130` from
    `torch/version.py`), else empty. `packages` are the import packages it owns, `scripts` its console scripts
    (`name`, `module:attr`). `shares` are the files that its RECORD lists too, and that belong to another one.
    """

    name: str
    version: str
    directory: str
    build: str = ""
    packages: tuple[str, ...] = ()
    scripts: tuple[tuple[str, str], ...] = ()
    requires: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()

    @property
    def shown_version(self) -> str:
        return self.build or self.version


@dataclass(frozen=True, slots=True)
class PythonFacts:
    """The interpreter of a venv: what extension modules depend on (PEP 425, PEP 3149)."""

    version: str
    implementation: str
    cache_tag: str
    ext_suffix: str
    abiflags: str
    debug: bool
    free_threaded: bool
    machine: str
    libc: str
    executable: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a reader of a snapshot must know: `kind` (`editable`, `pth-path`, `outside-link`, `missing`, ...), where, what to do."""

    kind: str
    where: str
    text: str


@dataclass(frozen=True, slots=True)
class ServerCapture:
    """The command line and environment of a server that ran while the snapshot was taken (secrets replaced)."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A tree of site-packages with its provenance; its identity is the sha256 of its canonical form (`manifest.py`).

    `facts` is what the agent says of the host beyond the interpreter (JSON: glibc, GPUs, driver, ...), as far as it is stable.
    """

    host: str
    venv: str
    python: PythonFacts
    distributions: tuple[Distribution, ...]
    files: tuple[FileEntry, ...]
    findings: tuple[Finding, ...] = ()
    servers: tuple[ServerCapture, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(entry.size for entry in self.files)


@dataclass(frozen=True, slots=True)
class SnapshotRef:
    """A snapshot as the store lists it. `created` is ISO 8601 UTC; `complete` is false when an object is missing."""

    id: str
    label: str
    host: str
    venv: str
    created: str
    files: int
    bytes: int
    patched: int
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Taken:
    """What `snapshot` did: the snapshot, and how much of it the store did not have yet."""

    ref: SnapshotRef
    manifest: Manifest
    new_objects: int
    new_bytes: int
    hashed_files: int
    reused_files: int
    import_failures: tuple[ImportProof, ...] = ()


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a target holds now. `generation` is None when it is an ordinary venv; `fingerprint` guards the plan."""

    host: str
    venv: str
    site: str
    python: PythonFacts | None
    generation: int | None
    fingerprint: str
    distributions: tuple[Distribution, ...]
    files: tuple[FileEntry, ...]
    free_bytes: int
    free_inodes: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PackageChange:
    """A row of the package table: `action` is `add`, `replace`, `change` (same version, other files), `keep`, or `remove`."""

    action: str
    name: str
    before: str
    after: str
    files: int
    bytes: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class FileChange:
    """A line of `diff --files`: `+` added, `~` changed, `-` removed."""

    sign: str
    path: str
    size: int
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Use:
    """A process that uses files of a tree: how (`maps`, `fd`, `cwd`, `exe`, `path`), and of which generation (None: not one).

    `root` is the pid of its farthest ancestor that does so, too: of a server's worker it is the server.
    """

    pid: int
    command: str
    how: str
    generation: int | None
    root: int


@dataclass(frozen=True, slots=True)
class Check:
    """A preflight check or an ABI rule: `level` is `ok`, `warn` or `block`; `evidence` names the file, symbol or mount."""

    id: str
    level: str
    text: str
    evidence: tuple[str, ...] = ()
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a push will do; pure data, made by `plan.py`, shown by `diff` and `push -n`, applied by `transfer.py`.

    `result` is the whole tree that will be live. `base` is the inventory fingerprint that the plan is valid for. `overlay` is
    the id of the DDTree overlay that was laid over it, or empty.
    """

    target: str
    venv: str
    snapshot: str
    selected: tuple[str, ...]
    base: str
    base_generation: int | None
    result: Manifest
    packages: tuple[PackageChange, ...]
    changes: tuple[FileChange, ...]
    checks: tuple[Check, ...] = ()
    uses: tuple[Use, ...] = ()
    oracle: Verdict | None = None
    overlay: str = ""

    @property
    def empty(self) -> bool:
        return not self.changes

    @property
    def blocks(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.level == "block")


@dataclass(frozen=True, slots=True)
class ImportProof:
    """The import of one package in a process of its own. `signal` is the name of the signal it died of, or empty."""

    module: str
    ok: bool
    seconds: float
    error: str = ""
    traceback: str = ""
    signal: str = ""
    foreign_libraries: tuple[str, ...] = ()
    baseline: bool = False


@dataclass(frozen=True, slots=True)
class Proofs:
    """What the proofs found, on the staged or the live tree. Levels that did not run are None."""

    where: str
    hashed: int | None = None
    vouched: int = 0
    bad_files: tuple[str, ...] = ()
    compiled: int | None = None
    syntax_errors: tuple[tuple[str, str], ...] = ()
    imports: tuple[ImportProof, ...] | None = None
    extra: tuple[Check, ...] = ()

    @property
    def ok(self) -> bool:
        return (
            not self.bad_files
            and not self.syntax_errors
            and all(proof.ok or proof.baseline for proof in self.imports or ())
            and all(check.level != "block" for check in self.extra)
        )


@dataclass(frozen=True, slots=True)
class Pushed:
    """How a push ended, as the host's ledger has it. `already` means that there was nothing to do.

    `sent_bytes` left this machine; `fed_bytes` came from the hosts `fed_by` (`--relay`).
    """

    host: str
    generation: int
    previous: int | None
    snapshot: str
    changed_files: int
    sent_objects: int
    sent_bytes: int
    seconds: float
    phases: Mapping[str, float]
    verified: bool
    already: bool = False
    proofs: tuple[Proofs, ...] = ()
    in_use: tuple[Use, ...] = ()
    fed_by: tuple[str, ...] = ()
    fed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class GenerationInfo:
    """One row of `generations`. `state` is `live`, `kept`, `as-found`, or `partial`; `in_use` lists pids."""

    number: int
    state: str
    snapshot: str
    created: str
    files: int
    bytes: int
    in_use: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """What a host says of its venv: the live generation, drift since it went live, unfinished work, the lock."""

    host: str
    venv: str
    managed: bool
    generation: int | None
    snapshot: str
    since: str
    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    journal: str
    lock: Mapping[str, Any] | None
    uses: tuple[Use, ...]
    packages: tuple[tuple[str, str], ...] = ()
    servers: tuple[Server, ...] = ()
    overlay: str = ""


@dataclass(frozen=True, slots=True)
class RolledBack:
    """How a rollback ended: which generation is live now, and which was before."""

    host: str
    generation: int
    previous: int
    proofs: tuple[Proofs, ...] = ()
