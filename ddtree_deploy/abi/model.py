"""Facts of a host and its Python environment as frozen values, read from the agent's JSON (`agent.abi_facts.collect`).

Every key may be missing, so that a hand-written case stays short; a missing fact is an unknown, never a guess.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from packaging.utils import canonicalize_name

from ddtree_deploy.composition import Part, objects
from ddtree_deploy.origins import import_packages

Json: TypeAlias = Mapping[str, Any]


def unpack(names: Any) -> tuple[str, ...]:
    """Return the names in a list, or in the packed form of `agent.abi_facts.pack`."""
    if isinstance(names, Mapping):
        text = zlib.decompress(base64.b64decode(names["z"])).decode("utf-8", "surrogateescape")
        return tuple(text.split("\n"))
    return tuple(names or ())


@dataclass(frozen=True, eq=False)
class SharedObject:
    """What the loader reads from one ELF file (see `agent.elf.read` for the fields); `path` is absolute on its host."""

    path: str
    raw: Json

    @property
    def kind(self) -> str | None:
        kind: str | None = self.raw.get("kind", "dyn")
        return kind

    @property
    def machine(self) -> str | None:
        return self.raw.get("machine")

    @property
    def soname(self) -> str | None:
        return self.raw.get("soname")

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    @property
    def needed(self) -> tuple[str, ...]:
        return tuple(self.raw.get("needed") or ())

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(self.raw.get("problems") or ())

    @property
    def damaged(self) -> str | None:
        """The first problem that makes the loader refuse the file, or None (unknown GPU code does not)."""
        return next((text for text in self.problems if not text.startswith("gpu code")), None)

    @property
    def archs(self) -> tuple[str, ...] | None:
        """Embedded GPU architectures; empty for none, None for unknown."""
        archs = self.raw.get("archs", ())
        return None if archs is None else tuple(archs)

    @property
    def verneed(self) -> Mapping[str, list[str]]:
        return self.raw.get("verneed") or {}

    @cached_property
    def verdef(self) -> frozenset[str]:
        return frozenset(self.raw.get("verdef") or ())

    @cached_property
    def defines(self) -> frozenset[str]:
        """Names that a reference may bind to: `name` (unversioned or default) and `name@VERSION`."""
        names = unpack(self.raw.get("defines"))
        versioned = [text for text in names if "@" in text]
        if not versioned:  # most: torch's hundred thousand
            return frozenset(names)
        out = set(names).difference(versioned)
        for text in versioned:
            name, _, version = text.partition("@")
            out.add(f"{name}@{version.lstrip('@')}")
            if version.startswith("@"):
                out.add(name)
        return frozenset(out)

    @cached_property
    def undefined(self) -> frozenset[str]:
        """Names that must be found at load time, `name` or `name@VERSION`; weak ones are not among them."""
        return frozenset(unpack(self.raw.get("undefined")))

    def moved_to(self, path: str) -> SharedObject:
        """Return the same file at another path; what was decoded once is shared."""
        known: dict[str, SharedObject] = self.__dict__.setdefault("_moved", {})
        if path not in known:
            other = SharedObject(path, self.raw)
            other.__dict__.update(defines=self.defines, undefined=self.undefined, verdef=self.verdef)
            known[path] = other
        return known[path]

    def offers(self, symbol: str) -> bool:
        """Tell whether a reference to `symbol` can bind here (an unversioned library answers any version)."""
        if symbol in self.defines:
            return True
        name, at, _version = symbol.partition("@")
        return bool(at) and not self.verdef and name in self.defines


@dataclass(frozen=True, eq=False)
class Dist:
    """An installed distribution as the tree shows it; `key` is its normalised name, `directory` its dist-info."""

    raw: Json

    @cached_property
    def key(self) -> str:
        return str(canonicalize_name(self.name))

    @property
    def name(self) -> str:
        return str(self.raw["name"])

    @property
    def version(self) -> str:
        return str(self.raw.get("version", ""))

    @property
    def directory(self) -> str:
        return str(self.raw.get("dir") or f"{self.name}-{self.version}.dist-info")

    @property
    def shown(self) -> str:
        """Name and version, with the build that the code names where it is more precise (`torch 2.11.0+cu130`)."""
        return f"{self.name} {self.raw.get('build') or self.version}"

    @property
    def requires(self) -> tuple[str, ...]:
        return tuple(self.raw.get("requires") or ())

    @cached_property
    def owns(self) -> frozenset[str]:
        """Paths in its RECORD that are there, relative to site-packages."""
        return frozenset(unpack(self.raw.get("owns")))

    def part(self, taken: Set[str]) -> Part:
        """Return what the rules of replacement look at; what is `taken` belongs to one before it."""
        return Part(self.key, self.shown, frozenset(import_packages(sorted(self.owns - taken))), objects(self.owns))

    def sample(self, kind: str) -> tuple[int, tuple[str, ...]]:
        """Return the number of files and examples for `missing` or `resized`."""
        value = self.raw.get(kind) or {}
        return int(value.get("count", 0)), tuple(value.get("examples", ()))


@dataclass(frozen=True, eq=False)
class Tree:
    """A site-packages: its ELF files by path relative to `root`, its distributions, and torch's preload list."""

    root: str
    objects: Mapping[str, SharedObject]
    dists: tuple[Dist, ...]
    torch: Json = field(default_factory=dict)
    raw: Json = field(default_factory=dict)

    @cached_property
    def owners(self) -> Mapping[str, tuple[Dist, ...]]:
        """Distributions by the ELF path that they own."""
        out: dict[str, tuple[Dist, ...]] = {}
        for dist in self.dists:
            for path in dist.owns & self.objects.keys():
                out[path] = (*out.get(path, ()), dist)
        return out

    def owner(self, path: str) -> Dist | None:
        found = self.owners.get(path)
        return found[0] if found else None

    def indexes(self, path: str) -> tuple[int, ...]:
        """Return the positions in `dists` of the owners of an ELF path; (-1,) for nobody."""
        return tuple(self._positions[dist] for dist in self.owners[path]) if path in self.owners else (-1,)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Its distributions as the rules of replacement see them."""
        taken: set[str] = set()
        out = []
        for dist in self.dists:
            out.append(dist.part(taken))
            taken |= dist.owns
        return tuple(out)

    @cached_property
    def _positions(self) -> Mapping[Dist, int]:
        return {dist: position for position, dist in enumerate(self.dists)}

    def dist(self, key: str) -> Dist | None:
        return next((dist for dist in self.dists if dist.key == key), None)

    @property
    def torch_version(self) -> str | None:
        return self.torch.get("version")

    @property
    def cuda(self) -> str | None:
        """The CUDA version that torch's own code names (`13.0`), None for a CPU build or no torch."""
        return self.torch.get("cuda")

    @property
    def cuda_major(self) -> int | None:
        return int(self.cuda.split(".")[0]) if self.cuda else None


@dataclass(frozen=True)
class Gpu:
    """One GPU: index, name, compute capability as (major, minor)."""

    index: int
    name: str
    cc: tuple[int, int]

    @property
    def shown(self) -> str:
        return f"GPU {self.index} ({self.name}, sm_{self.cc[0]}{self.cc[1]})"


@dataclass(frozen=True, eq=False)
class HostFacts:
    """What the host offers beside files (see `agent.host_facts.host`); `raw` keeps all of it."""

    raw: Json

    def get(self, *keys: str) -> Any:
        """Return a nested fact, or None when any step is missing."""
        value: Any = self.raw
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    @property
    def python_tag(self) -> str | None:
        tag: str | None = self.get("python", "tag")
        return tag

    @property
    def machine(self) -> str | None:
        machine: str | None = self.get("machine")
        return machine

    @property
    def env(self) -> Mapping[str, str]:
        return self.get("env") or {}

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        out: list[Gpu] = []
        for row in self.get("gpus", "list") or ():
            cc = re.fullmatch(r"(\d+)\.(\d+)", str(row.get("cc")))
            if cc:  # an old nvidia-smi answers `[N/A]`
                name = str(row.get("name", "GPU"))
                out.append(Gpu(int(row.get("index", len(out))), name, (int(cc.group(1)), int(cc.group(2)))))
        return tuple(out)


@dataclass(frozen=True, eq=False)
class System:
    """The libraries outside the tree: LD_LIBRARY_PATH in order, ld.so.cache by soname, facts by absolute path."""

    search: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    interpreter: str | None = None
    cache: Mapping[str, str] = field(default_factory=dict)
    objects: Mapping[str, SharedObject] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Site:
    """One environment on one host: the tree, the host, the system's libraries."""

    name: str
    tree: Tree
    host: HostFacts
    system: System


def load(facts: Json, name: str) -> Site:
    """Read the agent's facts; `name` is what evidence calls this side (`ct129`, `snapshot 3f9a1c2`)."""
    tree, system = facts.get("tree") or {}, facts.get("system") or {}
    root = tree.get("root", "/site-packages")
    objects = {path: SharedObject(f"{root}/{path}", raw) for path, raw in sorted((tree.get("files") or {}).items())}
    build = (tree.get("torch") or {}).get("version") or ""
    dists = tuple(
        Dist({**raw, "build": build} if raw["name"] == "torch" and build.startswith(f"{raw.get('version')}+") else raw)
        for raw in tree.get("dists") or ()
    )
    outside = {path: SharedObject(path, raw) for path, raw in (system.get("files") or {}).items()}
    return Site(
        name,
        Tree(root, objects, dists, tree.get("torch") or {}, tree),
        HostFacts(facts.get("host") or {}),
        System(
            tuple(system.get("search") or ()),
            tuple(system.get("preload") or ()),
            system.get("interpreter"),
            system.get("cache") or {},
            outside,
        ),
    )


def wanted(sites: Iterable[Site]) -> tuple[str, ...]:
    """Return every soname that these trees need: what to ask a target's agent to look up (`collect(sonames=...)`)."""
    return tuple(sorted({soname for site in sites for item in site.tree.objects.values() for soname in item.needed}))
