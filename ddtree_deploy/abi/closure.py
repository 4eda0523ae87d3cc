"""Replay the dynamic loader: interpreter, `import torch` with its preloads in order, then each file in a process of
its own.

The rules are glibc's (ld.so(8), dlopen(3)): a name already loaded wins; else the RPATH of the loader chain where the
loader has no RUNPATH, LD_LIBRARY_PATH, RUNPATH, ld.so.cache; a strong undefined symbol must be in the global scope or
in the file's own closure (Python binds RTLD_NOW); every version that a file needs of a library must be defined by it.
"""

from __future__ import annotations

import fnmatch
import os.path
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ddtree_deploy.abi.model import SharedObject, Site

LIBRARY, SYMBOL, VERSION, DAMAGED = "library", "symbol", "version", "damaged"
GLOBAL_DEPS = "torch/lib/libtorch_global_deps.so"
# Symbols that would come from a library which is itself missing are not told twice.
FAMILIES = (
    (re.compile(r"cu[A-Z]"), "libcuda.so"),
    (re.compile(r"nvml"), "libnvidia-ml.so"),
    (re.compile(r"nvrtc"), "libnvrtc.so"),
    (re.compile(r"_*nvJitLink"), "libnvJitLink.so"),
    (re.compile(r"cublasLt"), "libcublasLt.so"),
    (re.compile(r"cublas"), "libcublas.so"),
    (re.compile(r"(?:__)?cuda[A-Z]"), "libcudart.so"),
    (re.compile(r"p?nccl"), "libnccl.so"),
    (re.compile(r"cudnn"), "libcudnn"),
    (re.compile(r"cufft"), "libcufft.so"),
    (re.compile(r"curand"), "libcurand.so"),
    (re.compile(r"cusparseLt"), "libcusparseLt.so"),
    (re.compile(r"cusparse"), "libcusparse.so"),
    (re.compile(r"cusolver"), "libcusolver.so"),
    (re.compile(r"cufile|cuFile"), "libcufile.so"),
    (re.compile(r"cupti"), "libcupti.so"),
    (re.compile(r"numa_"), "libnuma.so"),
)
EXTENSION = re.compile(r"\.cpython-(\d+)([a-z]*)(?:-[\w-]+)?\.so$")


@dataclass(frozen=True, slots=True, order=True)
class Miss:
    """Something that the loader would not find: `by` (path relative to the tree, or absolute) needs `item`.

    `kind` is `library` (a soname), `symbol`, `version` (`GLIBC_2.38 of libc.so.6`), or `damaged` (the file itself).
    """

    by: str
    kind: str
    item: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """One dlopen: what it brought in beyond what was there, and what was not found."""

    scope: tuple[SharedObject, ...]
    new: tuple[SharedObject, ...]
    misses: tuple[Miss, ...]


@dataclass(frozen=True)
class Closure:
    """The outcome for a whole tree.

    `torch` is what `import torch` could not find (empty also without torch); `files` maps every file that a process may
    load to its misses; `libraries` to the paths that its process would hold (torch's included).
    """

    torch: tuple[Miss, ...]
    files: Mapping[str, tuple[Miss, ...]]
    libraries: Mapping[str, tuple[str, ...]]
    torch_libraries: tuple[str, ...] = ()
    preload_known: bool = True
    process: Process | None = field(default=None, compare=False, repr=False)

    @cached_property
    def misses(self) -> frozenset[Miss]:
        return frozenset(self.torch).union(*self.files.values())

    def loads(self, path: str) -> bool:
        """Tell whether dlopen of this file after `import torch` would succeed."""
        return not self.torch and not self.files.get(path)


class Process:
    """What one process holds: names that are taken, objects in load order, the global scope, who depends on whom."""

    def __init__(self, site: Site) -> None:
        self.site = site
        root = site.tree.root
        self.at: dict[str, SharedObject] = {item.path: item for item in site.tree.objects.values()} | dict(site.system.objects)
        self.root = root + "/"
        self.names: dict[str, SharedObject] = {}
        self.deps: dict[str, tuple[SharedObject, ...]] = {}
        self.chains: dict[str, tuple[SharedObject, ...]] = {}
        self.globals: list[SharedObject] = []
        self.program: SharedObject | None = self.at.get(site.system.interpreter or "")

    def fork(self) -> Process:
        """Return a process that starts with what this one holds."""
        child = object.__new__(Process)
        child.__dict__.update(self.__dict__)
        child.names, child.deps = dict(self.names), dict(self.deps)
        child.chains, child.globals = dict(self.chains), list(self.globals)
        return child

    def relative(self, path: str) -> str:
        return path[len(self.root) :] if path.startswith(self.root) else path

    # --- finding a library -------------------------------------------------------------------------------------

    def find(self, soname: str, chain: tuple[SharedObject, ...]) -> SharedObject | None:
        """Return the file that the loader would open for `soname`, needed by chain[0], which chain[1] loaded."""
        if "/" in soname:
            return self.at.get(soname)
        for directory in self._directories(chain):
            found = self.at.get(f"{directory}/{soname}")
            if found is not None and self._fits(found):
                return found
        return self.at.get(self.site.system.cache.get(soname, ""))

    def _directories(self, chain: tuple[SharedObject, ...]) -> Iterator[str]:
        if not chain:  # LD_PRELOAD by name, and no facts of the interpreter
            yield from self.site.system.search
            return
        if not chain[0].raw.get("runpath"):
            everyone = chain if self.program is None or self.program in chain else (*chain, self.program)
            for item in everyone:
                if not item.raw.get("runpath"):
                    yield from expand(item.raw.get("rpath") or (), item.path)
        yield from self.site.system.search
        yield from expand(chain[0].raw.get("runpath") or (), chain[0].path)

    def _fits(self, item: SharedObject) -> bool:
        machine = self.site.host.machine
        return item.machine is None or machine is None or item.machine == machine

    # --- loading -----------------------------------------------------------------------------------------------

    def dlopen(self, item: SharedObject, everywhere: bool = False) -> Loaded:
        """Load `item` and what it needs into this process; with `everywhere`, RTLD_GLOBAL."""
        held = self.names.get(item.soname or item.name)
        if held is not None and (held is item or held.path == item.path):
            scope = tuple(self._reach(held))
            self._export(scope if everywhere else ())
            return Loaded(scope, (), ())
        misses: list[Miss] = []
        new = [item]
        self._hold(item, ())
        for current in new:  # breadth first: the list grows while it is walked
            chain = (current, *self.chains[current.path])
            deps = []
            for soname in current.needed:
                found = self.names.get(soname)
                if found is None:
                    found = self.find(soname, chain)
                    if found is None:
                        misses.append(Miss(self.relative(current.path), LIBRARY, soname))
                        continue
                    known = self.names.get(found.soname or found.name)
                    if known is not None and known.path == found.path:
                        self.names[soname] = known
                    else:
                        self._hold(found, chain, soname)
                        new.append(found)
                deps.append(self.names.get(soname, found))
            self.deps[current.path] = tuple(deps)
        scope = tuple(self._reach(item))
        for current in new:
            misses += self._unbound(current, scope, misses)
        self._export(scope if everywhere else ())
        return Loaded(scope, tuple(new), tuple(misses))

    def _hold(self, item: SharedObject, chain: tuple[SharedObject, ...], asked: str | None = None) -> None:
        for name in (asked, item.soname, item.path, None if item.soname else item.name):
            if name:
                self.names.setdefault(name, item)
        self.chains[item.path] = chain

    def _export(self, scope: tuple[SharedObject, ...]) -> None:
        held = {item.path for item in self.globals}
        self.globals += [item for item in scope if item.path not in held]

    def _reach(self, item: SharedObject) -> list[SharedObject]:
        out, seen = [item], {item.path}
        for current in out:
            for dep in self.deps.get(current.path, ()):
                if dep.path not in seen:
                    seen.add(dep.path)
                    out.append(dep)
        return out

    def _unbound(self, item: SharedObject, scope: tuple[SharedObject, ...], missing: list[Miss]) -> list[Miss]:
        by = self.relative(item.path)
        if item.damaged:
            return [Miss(by, DAMAGED, item.damaged)]
        out = []
        for soname, versions in item.verneed.items():
            provider = self.names.get(soname)
            # Without versions of its own a library answers any; without a version table at all, glibc aborts on it.
            if provider is not None and (provider.verdef or not provider.verneed):
                out += [Miss(by, VERSION, f"{v} of {soname}") for v in versions if v not in provider.verdef]
        absent = {miss.item for miss in missing if miss.kind == LIBRARY}
        badly = {miss.item.split(" ")[0] for miss in out}
        where = (*self.globals, *scope)
        left = item.undefined
        for other in where:
            left = left - other.defines
            if not left:
                return out
        for symbol in sorted(left):
            if any(other.offers(symbol) for other in where):
                continue
            version = symbol.partition("@")[2]
            if version in badly or (version and any(version in item.verneed.get(name, ()) for name in absent)):
                continue
            if not any(family.match(symbol) and name.startswith(stem) for family, stem in FAMILIES for name in absent):
                out.append(Miss(by, SYMBOL, symbol))
        return out


def expand(entries: tuple[str, ...] | list[str], path: str) -> Iterator[str]:
    """Expand `$ORIGIN` in RPATH or RUNPATH entries of the file at `path`."""
    origin = path.rsplit("/", 1)[0]
    for entry in entries:
        text = entry.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)
        if text.startswith("/"):
            yield os.path.normpath(text)


def closure(site: Site) -> Closure:
    """Load every file of the tree as the host would, each in a fork of a process that has imported torch.

    Executables, and extension modules for another interpreter, are left out: no process of this one loads them.
    """
    process = Process(site)
    if process.program is not None:
        process.dlopen(process.program, everywhere=True)
    for name in site.system.preload:
        found = process.find(name, (process.program,) if process.program else ())
        if found is not None:
            process.dlopen(found, everywhere=True)
    torch_misses, known, held = _import_torch(process)
    files, libraries = {}, {}
    for path, item in site.tree.objects.items():
        if importable(path, item, site.host.python_tag):
            loaded = process.fork().dlopen(item)
            own = {miss for miss in loaded.misses if miss not in torch_misses}
            files[path] = tuple(sorted(own))
            libraries[path] = tuple(sorted({process.relative(other.path) for other in loaded.scope}))
    return Closure(torch_misses, files, libraries, held, known, process)


def importable(path: str, item: SharedObject, python_tag: str | None) -> bool:
    """Tell whether a process of this interpreter could load the file at all."""
    if item.kind not in ("dyn", None):
        return False
    match = EXTENSION.search(path)
    return match is None or python_tag is None or python_tag == f"cp{match.group(1)}"


def _import_torch(process: Process) -> tuple[tuple[Miss, ...], bool, tuple[str, ...]]:
    """Replay `import torch`: global dependencies, preloads, `torch/_C`; return misses, is it known, what loaded."""
    tree = process.site.tree
    start = tree.objects.get(GLOBAL_DEPS)
    module = next((item for path, item in tree.objects.items() if re.match(r"torch/_C\..*so$", path)
                   and importable(path, item, process.site.host.python_tag)), None)  # fmt: skip
    plan = tree.torch.get("preload")
    misses: list[Miss] = []
    if start is not None:
        trial = process.fork()
        first = trial.dlopen(start, everywhere=True)
        if not first.misses:
            process.__dict__.update(trial.__dict__)
            if any(item.name.startswith("libcudart.so") for item in first.scope):
                _preload(process, (plan or {}).get("always", ()))
        elif plan and all(miss.kind == LIBRARY for miss in first.misses):
            _preload(process, plan["on_error"])
            misses += process.dlopen(start, everywhere=True).misses
        else:
            process.__dict__.update(trial.__dict__)
            misses += first.misses
    if module is not None:
        misses += process.dlopen(module).misses
    held = tuple(sorted({process.relative(item.path) for item in process.names.values()}))
    return tuple(sorted(set(misses))), bool(plan) or tree.cuda is None, held


def _preload(process: Process, items: tuple[tuple[str, str, bool], ...] | list[tuple[str, str, bool]]) -> None:
    """Load `[folder, glob, required]` items in order; the first required one that fails ends it, as in torch."""
    tree = process.site.tree
    major = str(tree.cuda_major or "")
    for folder, pattern, required in items:
        found = None
        for layout in tree.torch["preload"]["layouts"]:
            directory = f"{tree.root}/" + layout.replace("{folder}", folder).replace("{major}", major)
            names = [p for p in process.at if p.startswith(directory + "/") and fnmatch.fnmatchcase(p, f"{directory}/{pattern}")]
            names = sorted(name for name in names if "/" not in name[len(directory) + 1 :])
            if names:
                found = process.at[names[0]]
                break
        if found is None:
            if required:
                return
            continue
        trial = process.fork()
        if trial.dlopen(found).misses:
            return
        process.__dict__.update(trial.__dict__)
