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

from ddtree_deploy.agent import dists, elf, host_facts, torch_preload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

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
) -> Facts:
    """Return `{"schema", "tree", "host", "system"}` for the site-packages at `root`.

    `python` is the venv's interpreter (default: the one that runs this); `env` is laid over this process's environment
    to give the service's; `sonames` are libraries that a snapshot from elsewhere needs, looked up here too; `home` is
    the service user's.
    """
    env = dict(os.environ, **(env or {}))
    home = home or os.path.expanduser("~")
    found = tree(root)
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
    """Pack a list of strings for the wire; short lists stay readable. `abi.model.unpack` reads both."""
    if len(names) < 64:
        return names
    names.sort()
    squeeze = zlib.compressobj(3)
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


def tree(root: str) -> Facts:
    """Return the facts of one site-packages: ELF files by relative path, distributions, torch's preloads."""
    root = os.path.realpath(root)
    sizes, links, objects, hardlinks = _walk(root)
    files: dict[str, Facts] = {}
    largest = sorted(objects, key=lambda path: -sizes[path])
    with ThreadPoolExecutor(READERS) as pool:
        for path, facts in zip(largest, pool.map(lambda path: _object(root, path), largest)):
            if facts["kind"] is not None or _should_be_elf(facts, path):
                files[path] = facts
    linked = {soname for facts in files.values() for soname in facts["needed"]}
    for path, facts in files.items():
        if EXTENSION.search(path) and path.rsplit("/", 1)[-1] not in linked:
            facts["defines"] = []  # nothing links against an extension module; these are megabytes of template names
    found, owners = _distributions(root, sizes)
    shared = sorted(path for path, who in owners.items() if len(who) > 1 and not path.endswith("__init__.py"))
    unowned = sorted(path for path in sizes if path not in owners and ".dist-info/" not in path)
    return {
        "root": root,
        "files": files,
        "dists": found,
        "unowned": {"count": len(unowned), "examples": unowned[:EXAMPLES], "elf": [p for p in unowned if p in files]},
        "shared": {path: owners[path] for path in shared[:EXAMPLES]},
        "torch": dict(dists.torch_version(root), preload=torch_preload.read(root)),
        "versions": _code_versions(root),
        "pth": dists.read_pth(root),
        "outside_links": links,
        "hardlinks": hardlinks,
        "bytes": sum(sizes.values()),
        "count": len(sizes),
    }


def _object(root: str, path: str) -> Facts:
    return _packed(elf.read(os.path.join(root, path), stamp=path.rsplit("/", 1)[-1].startswith(STAMPED)))


def _should_be_elf(facts: Facts, path: str) -> bool:
    """Tell a damaged shared object from a text file that is merely named like one (linker scripts exist)."""
    return (facts["problems"] and facts["problems"][0] != "not an ELF file") or path.endswith((".abi3.so", "-gnu.so"))


def _walk(root: str) -> tuple[dict[str, int], list[list[str]], list[str], int]:
    sizes: dict[str, int] = {}
    links: list[list[str]] = []
    objects: list[str] = []
    hardlinks = 0
    stack = [""]
    while stack:
        prefix = stack.pop()
        try:
            entries = list(os.scandir(os.path.join(root, prefix)))
        except OSError:
            continue
        for entry in entries:
            path = prefix + entry.name
            if entry.is_symlink():
                target = os.path.realpath(entry.path)
                if target.startswith(root + os.sep):
                    if ".so" in entry.name and os.path.isfile(target):
                        sizes[path] = os.stat(target).st_size
                        objects.append(path)
                else:
                    links.append([path, os.readlink(entry.path)])
            elif entry.is_dir():
                if entry.name != "__pycache__":
                    stack.append(path + "/")
            else:
                info = entry.stat()
                sizes[path] = info.st_size
                if entry.name.endswith(".so") or ".so." in entry.name:
                    objects.append(path)
                    hardlinks += info.st_nlink > 1
                elif info.st_mode & stat.S_IXUSR and "." not in entry.name and info.st_size > 4096:
                    objects.append(path)
    return sizes, sorted(links), sorted(objects), hardlinks


def _distributions(root: str, sizes: dict[str, int]) -> tuple[list[Facts], dict[str, list[str]]]:
    """Return the distributions and {path: [dist-info directories]}; RECORD is compared by size only, never by hash."""
    out: list[Facts] = []
    owners: dict[str, list[str]] = {}
    for dist in dists.read_distributions(root):
        recorded = _record_sizes(os.path.join(root, dist["dir"], "RECORD"))
        owns: list[str] = []
        missing: list[str] = []
        resized: list[str] = []
        for path, size in recorded.items():
            if path.startswith("../") or path.endswith(".pyc"):
                continue
            owns.append(path)
            owners.setdefault(path, []).append(dist["dir"])
            if path not in sizes:
                if not path.startswith("bin/"):
                    missing.append(path)
            elif size is not None and sizes[path] != size:
                resized.append(path)
        out.append({
            "name": dist["name"], "version": dist["version"], "dir": dist["dir"], "requires": dist["requires"],
            "editable": dist["editable"], "record": dist["record"] is not None,
            "metadata": os.path.isfile(os.path.join(root, dist["dir"], "METADATA")), "owns": pack(owns),
            "missing": _sample(missing), "resized": _sample(resized),
        })  # fmt: skip
    return out, owners


def _sample(paths: list[str]) -> Facts:
    """Keep shared objects first, then source: they are what a verdict is made of."""
    ordered = sorted(paths, key=lambda path: (".so" not in path, not path.endswith(".py"), path))
    return {"count": len(paths), "examples": ordered[:EXAMPLES]}


def _record_sizes(path: str) -> dict[str, int | None]:
    out: dict[str, int | None] = {}
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            for line in file:
                name, _, rest = line.rstrip("\r\n").rpartition(",")
                name = name.rpartition(",")[0].strip('"')
                if name:
                    out[os.path.normpath(name)] = int(rest) if rest.isdigit() else None
    except OSError:
        pass
    return out


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
    known = host_facts.ld_cache()
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
            (p for d in host_facts.TRUSTED_DIRS for p in [os.path.join(d, soname)] if os.path.isfile(p)), None
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
