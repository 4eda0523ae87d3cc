"""Gather what decides whether a Python environment loads here: its ELF files, its metadata, the libraries around it.

`collect` answers with plain data (JSON). It imports no torch, writes nothing, and judges nothing: the controller
composes the facts of two hosts into the tree that would result, and judges that (`ddtree_deploy.abi`).
"""

from __future__ import annotations

import ast
import base64
import os
import re
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor

from ddtree_deploy.agent import dists, elf, host_facts, ld_so, torch_preload, walk
from ddtree_deploy.agent.paths import HostilePath, parse_link

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from ddtree_deploy.agent.walk import Entry

    Facts = dict[str, Any]


SCHEMA = 1
EXAMPLES = 40
READERS = 4  # a cold disk answers four readers twice as fast as one; the memory of one stays
EXTENSION = re.compile(r"\.(?:abi3|cpython-\d+[a-z]*(?:-[\w-]+)?)\.so$")
# Libraries of CUDA 12 and of CUDA 13 that share path and soname; only their content tells which they are.
STAMPED = ("libnccl.so.", "libnvshmem_host.so.", "libcusparseLt.so.", "libcudnn_graph.so.")


def collect(
    root: str,
    python: str | None = None,
    env: Mapping[str, str] | None = None,
    sonames: Sequence[str] = (),
    home: str | None = None,
    entries: Sequence[Entry] | None = None,
) -> Facts:
    """Return `{"schema", "tree", "host", "system"}` for the site-packages at `root`.

    `python` is the venv's interpreter (default: the one that runs this); `env` is laid over this process's environment
    to give the service's; `sonames` are libraries that a snapshot from elsewhere needs, looked up here too; `home` is
    the service user's; `entries` is a walk of `root` that was made already.
    """
    env = dict(os.environ, **(env or {}))
    home = home or os.path.expanduser("~")
    found = tree(root, entries)
    host = host_facts.host(root, python, env, home)
    wanted = set(sonames)
    dirs: list[str] = []
    for path, facts in found["files"].items():
        wanted.update(facts["needed"])
        origin = os.path.dirname(os.path.join(found["root"], path))
        dirs += [d for d in expand(facts["rpath"] + facts["runpath"], origin) if not d.startswith(found["root"])]
    return {"schema": SCHEMA, "tree": found, "host": host, "system": system(wanted, host, env, dirs)}


def _packed(facts: Facts) -> Facts:
    for key in ("defines", "undefined", "weak"):
        facts[key] = pack(facts[key])
    return facts


def pack(names: list[str]) -> Any:
    """Pack strings for the wire, best in an order that puts like by like; few stay readable. `abi.model.unpack` reads both."""
    if len(names) < 64:
        return names
    squeeze = zlib.compressobj(1)
    parts = []
    for at in range(0, len(names), 4096):  # in slices: libraries with 30 MB of symbol names exist
        text = "\n".join(names[at : at + 4096]) + ("\n" if at + 4096 < len(names) else "")
        parts.append(squeeze.compress(text.encode("utf-8", "surrogateescape")))
    parts.append(squeeze.flush())
    return {"n": len(names), "z": base64.b64encode(b"".join(parts)).decode("ascii")}


def expand(entries: Iterable[str], origin: str) -> list[str]:
    """Expand `$ORIGIN` and `$LIB` in RPATH entries; return absolute normalised directories (ld.so(8))."""
    out = []
    for entry in entries:
        entry = entry.replace("${ORIGIN}", "$ORIGIN").replace("$ORIGIN", origin)
        entry = entry.replace("${LIB}", "$LIB").replace("$LIB", "lib64")
        if entry.startswith("/"):
            out.append(os.path.normpath(entry))
    return out


def tree(root: str, entries: Sequence[Entry] | None = None) -> Facts:
    """Return the facts of one site-packages: ELF files by relative path, distributions, torch's preloads."""
    root = os.path.realpath(root)
    sizes, links, objects, hardlinks = _sort(root, walk.walk(root) if entries is None else entries)
    files: dict[str, Facts] = {}
    largest = sorted(objects, key=lambda path: -sizes[path])
    with ThreadPoolExecutor(READERS) as pool:
        for path, facts in zip(largest, pool.map(lambda path: _object(root, path), largest)):
            if facts["kind"] is not None or _should_be_elf(facts, path):
                files[path] = facts
    linked = {soname for facts in files.values() for soname in facts["needed"]}
    for path in [path for path in files if _is_extension(path) and path.rsplit("/", 1)[-1] in linked]:
        files[path] = _packed(elf.read(os.path.join(root, path)))
    for path, _target, _found in links:
        if path in files:
            files[path]["outside"] = True
    found, owner, several = _distributions(root, sizes)
    shared = sorted(path for path in several if not path.endswith("__init__.py"))
    unowned = sorted(path for path in sizes if path not in owner and ".dist-info/" not in path)
    return {
        "root": root,
        "files": files,
        "dists": found,
        "unowned": {"count": len(unowned), "examples": unowned[:EXAMPLES], "elf": [p for p in unowned if p in files]},
        "shared": {path: several[path] for path in shared[:EXAMPLES]},
        "torch": dict(dists.torch_version(root), preload=torch_preload.read(root)),
        "versions": _code_versions(root),
        "pth": dists.read_pth(root),
        "outside_links": links,
        "hardlinks": hardlinks,
        "bytes": sum(sizes.values()),
        "count": len(sizes),
    }


def _object(root: str, path: str) -> Facts:
    stamp = path.rsplit("/", 1)[-1].startswith(STAMPED)
    # Nothing links against an extension module, but for a few; their exports are megabytes of template names.
    return _packed(elf.read(os.path.join(root, path), stamp, exports=not _is_extension(path)))


def _is_extension(path: str) -> bool:
    return EXTENSION.search(path) is not None


def _should_be_elf(facts: Facts, path: str) -> bool:
    """Tell a damaged shared object from a text file that is merely named like one (linker scripts exist)."""
    return (facts["problems"] and facts["problems"][0] != "not an ELF file") or path.endswith((".abi3.so", "-gnu.so"))


def _sort(root: str, entries: Sequence[Entry]) -> tuple[dict[str, int], list[list[Any]], list[str], int]:
    """Return sizes by path, links that leave the tree (path, target, does it resolve), ELF candidates, hard-linked ones."""
    sizes: dict[str, int] = {}
    links: list[list[Any]] = []
    objects: list[str] = []
    hardlinks = 0
    for path, kind, mode, size, _dev, _ino, _mtime, _ctime, target, nlink in entries:
        name = path.rpartition("/")[2]
        shared = name.endswith(".so") or ".so." in name
        if kind == "l":
            try:
                size = os.stat(os.path.join(root, path)).st_size
                found = True
            except OSError:
                found = False
            if _leaves(path, target):
                links.append([path, target, found])
            if found:
                sizes[path] = size
        elif kind == "f":
            sizes[path] = size
            hardlinks += shared and nlink > 1
            shared = shared or bool(mode & stat.S_IXUSR and "." not in name and size > 4096)
        if shared and path in sizes:
            objects.append(path)
    return sizes, links, objects, hardlinks


def _leaves(path: str, target: str) -> bool:
    try:
        parse_link(path, target)
    except HostilePath:
        return True
    return False


def _distributions(root: str, sizes: dict[str, int]) -> tuple[list[Facts], dict[str, str], dict[str, list[str]]]:
    """Return the distributions, the first owner by path, all owners of what several name (as dist-info directories).

    RECORD is compared by size only, never by hash.
    """
    out: list[Facts] = []
    owner: dict[str, str] = {}
    shared: dict[str, list[str]] = {}
    for dist in dists.read_distributions(root, records=False):
        directory = dist["dir"]
        owns: list[str] = []
        missing: list[str] = []
        resized: list[str] = []
        for path, size in _record(os.path.join(root, directory, "RECORD")):
            if owner.setdefault(path, directory) != directory:
                shared.setdefault(path, [owner[path]]).append(directory)
            real = sizes.get(path)
            if real is not None:
                owns.append(path)
                if size.isdigit() and int(size) != real:
                    resized.append(path)
            elif not path.startswith("bin/"):
                missing.append(path)
        out.append({
            "name": dist["name"], "version": dist["version"], "dir": directory, "requires": dist["requires"],
            "editable": dist["editable"], "record": dist["record"] is not None,
            "metadata": os.path.isfile(os.path.join(root, directory, "METADATA")), "owns": pack(owns),
            "missing": _sample(missing), "resized": _sample(resized),
        })  # fmt: skip
    return out, owner, shared


def _sample(paths: list[str]) -> Facts:
    """Keep shared objects first, then source: they are what a verdict is made of."""
    ordered = sorted(paths, key=lambda path: (".so" not in path, not path.endswith(".py"), path))
    return {"count": len(paths), "examples": ordered[:EXAMPLES]}


def _record(path: str) -> Iterator[tuple[str, str]]:
    """Yield (path, size as written) of a RECORD; byte code, and what lies outside of site-packages, is left out."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            lines = file.read().split("\n")
    except OSError:
        return
    for line in lines:
        name, _, rest = line.rpartition(",")
        name = name.rpartition(",")[0].strip('"')
        if "./" in name or "//" in name:
            name = os.path.normpath(name)
        if name and not name.endswith(".pyc") and not name.startswith(("../", "/")):
            yield name, rest.rstrip("\r")


def _code_versions(root: str) -> dict[str, str]:
    """Return {package: version} as the code says it (a top-level `__version__ = "..."`), without importing."""
    out = {}
    for package in (
        "torch",
        "triton",
        "sglang",
        "sgl_kernel",
        "vllm",
        "flashinfer",
        "flash_attn",
        "xformers",
        "torchvision",
    ):
        for name in ("version.py", "_version.py", "__init__.py"):
            version = _dunder_version(os.path.join(root, package, name))
            if version:
                out[package] = version
                break
    return out


def _dunder_version(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            module = ast.parse(file.read(1 << 20))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in module.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id in ("__version__", "version"):
            text = getattr(value, "value", None)
            if isinstance(text, str) and text[:1].isdigit():
                return text
    return None


# --- libraries of the system ----------------------------------------------------------------------------------------


def system(wanted: Iterable[str], host: Facts, env: Mapping[str, str], dirs: Iterable[str] = ()) -> Facts:
    """Return the libraries outside the tree that the loader could use for `wanted` sonames, transitively.

    `search` are LD_LIBRARY_PATH's directories; `cache` maps a soname to what ld.so.cache or the trusted directories
    give; `files` holds the facts by absolute path; `interpreter` is the executable whose scope everything else shares.
    """
    search = [os.path.realpath(d) for d in env.get("LD_LIBRARY_PATH", "").split(":") if d and os.path.isdir(d)]
    preloads = [path for path in env.get("LD_PRELOAD", "").replace(":", " ").split() if path]
    interpreter = os.path.realpath(host["python"]["executable"])
    known = ld_so.cache()
    files: dict[str, Facts] = {}
    cache: dict[str, str] = {}
    program = _packed(elf.read(interpreter))
    files[interpreter] = program
    extra = sorted(set(dirs) | set(expand(program["rpath"] + program["runpath"], os.path.dirname(interpreter))))
    todo = list(wanted) + program["needed"] + ["libcuda.so.1", "libnvidia-ml.so.1", "libstdc++.so.6", "libc.so.6"] + preloads
    seen: set[str] = set()
    while todo:
        soname = todo.pop()
        if soname in seen:
            continue
        seen.add(soname)
        candidates = [soname] if "/" in soname else [os.path.join(d, soname) for d in search + extra]
        found = known.get(soname) or next(
            (p for d in ld_so.TRUSTED_DIRS for p in [os.path.join(d, soname)] if os.path.isfile(p)), None
        )
        if found:
            cache[soname] = os.path.realpath(found)
            candidates.append(cache[soname])
        for path in candidates:
            if path not in files and os.path.isfile(path):
                files[path] = facts = _packed(elf.read(path))
                origin = os.path.dirname(os.path.realpath(path))
                extra += [d for d in expand(facts["rpath"] + facts["runpath"], origin) if d not in extra]
                todo += facts["needed"]
    return {"search": search, "preload": preloads, "interpreter": interpreter, "cache": cache, "files": files}
