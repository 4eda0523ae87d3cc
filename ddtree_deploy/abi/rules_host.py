"""K11-K16: byte code, file system, transfer, processes in use, environment, JIT caches."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_deploy.abi import cuda
from ddtree_deploy.abi.case import BLOCK, NOTE, WARN, Case, Evidence
from ddtree_deploy.abi.model import Site, Tree

NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "fuse.sshfs", "lustre", "gpfs", "9p", "glusterfs")
SHOWN = 3  # of the processes that use a tree, so many are named
JIT_PACKAGES = ("flashinfer-python", "deep-gemm", "sgl-deep-gemm")


def bytecode(_case: Case) -> Iterator[Evidence]:
    """Byte code never travels (K11)."""
    yield Evidence("K11", NOTE, "__pycache__", "byte code is left out of the snapshot and made anew")


def filesystem(case: Case, needed_bytes: int = 0) -> Iterator[Evidence]:
    """Check room, mount options, owner and hard links where the tree would be (K12)."""
    host = case.target.host
    free = host.get("disk", "free_bytes")
    if free is not None and needed_bytes and free < needed_bytes:
        yield Evidence(
            "K12",
            BLOCK,
            "space",
            f"{case.target.name} has {free >> 20} MiB free, the new generation takes {needed_bytes >> 20} MiB",
        )
    for name in ("site", "tmp", "home"):
        mount = host.get("mounts", name) or {}
        if "noexec" in mount.get("options", ()):
            use = {
                "site": "shared objects can not be loaded",
                "tmp": "Inductor and Triton can not load what they compile",
            }
            level = BLOCK if name == "site" else WARN
            text = f"`{mount['point']}` is mounted noexec: {use.get(name, 'JIT caches there can not be loaded')}"
            yield Evidence("K12", level, mount["point"], text)
        if mount.get("fs") in NETWORK:
            text = f"`{mount['point']}` is {mount['fs']}: several ranks that compile into it get stale file handles"
            yield Evidence("K12", WARN, mount["point"], text, "give the server a local cache root")
    mode = host.get("owner", "mode")
    if mode and not int(mode, 8) & 0o005:
        yield Evidence("K12", WARN, "mode", f"site-packages has mode {mode}: only its owner can import from it")
    links = case.target.tree.raw.get("hardlinks") or 0
    if links:
        text = f"{links} shared objects have other hard links (a uv cache, another venv): never write them in place"
        yield Evidence("K12", NOTE, "hard links", text)


def transfer(_case: Case) -> Iterator[Evidence]:
    """The transfer is proved after it happened (K13)."""
    yield Evidence("K13", NOTE, "manifest", "size, sha256, mode and link target of every file are checked on the target")


def in_use(case: Case) -> Iterator[Evidence]:
    """Report processes that have the target's tree loaded (K14)."""
    users = case.target.host.get("users") or ()
    if len(users) > SHOWN:
        text = f"{len(users)} processes have this tree loaded, the first {SHOWN} are named"
        yield Evidence("K14", WARN, "processes", text)
    for user in users[:SHOWN]:
        stale = ", from files that are deleted already" if user.get("deleted") else ""
        text = f"process {user['pid']} ({user['command']}) has this tree loaded{stale}"
        text += "; it keeps its generation until it ends"
        yield Evidence("K14", WARN, str(user["pid"]), text)


def environment(case: Case) -> Iterator[Evidence]:
    """Report variables and loader configuration that let another file win over the tree's (K15)."""
    target, tree = case.target, case.result.tree
    env = target.host.env
    ours = {item.soname or item.name for item in tree.objects.values()}
    for directory in target.system.search:
        hidden = sorted(
            path.rsplit("/", 1)[1]
            for path in target.system.objects
            if path.rsplit("/", 1)[0] == directory and path.rsplit("/", 1)[1] in ours
        )
        if hidden:
            text = f"LD_LIBRARY_PATH has `{directory}`, whose `{hidden[0]}` wins over the tree's for a loader with RUNPATH"
            yield Evidence("K15", WARN, directory, text, "unset LD_LIBRARY_PATH for the service")
    if env.get("LD_PRELOAD"):
        yield Evidence("K15", WARN, "LD_PRELOAD", f"LD_PRELOAD is `{env['LD_PRELOAD']}`")
    for entry, package in target.host.get("shadowing") or ():
        yield Evidence(
            "K15",
            BLOCK,
            entry,
            f"PYTHONPATH has `{entry}`, whose `{package}` is imported instead of the tree's",
            "take it out of PYTHONPATH",
        )
    runtimes = sorted(path for soname, path in target.system.cache.items() if cuda.RUNTIME.match(soname))
    majors = {soname for soname in target.system.cache if cuda.RUNTIME.match(soname)}
    if len(majors) > 1:
        yield Evidence(
            "K15",
            WARN,
            runtimes[0],
            f"ld.so.cache offers {' and '.join(f'`{path}`' for path in runtimes)}: cuDNN refuses both in one process",
        )


def jit(case: Case) -> Iterator[Evidence]:
    """Report JIT caches that belong to another environment, and compilers that a JIT would need (K16)."""
    host, tree = case.target.host, case.result.tree
    changed = tree.torch_version != case.target.tree.torch_version or any(d.key == "triton" for d in case.composition.moved)
    yield from stale(case.target, tree, changed)
    if not any(dist.key in JIT_PACKAGES for dist in tree.dists):
        return
    nvcc = host.get("tools", "nvcc")
    if nvcc is None:
        yield Evidence(
            "K16",
            NOTE,
            "nvcc",
            f"no nvcc on {case.target.name}: kernels that are not precompiled can not be built there",
        )
    else:
        have = cuda.version(nvcc.get("version"))[:2]
        for gpu in host.gpus:
            first = cuda.FIRST_NVCC.get(gpu.cc)
            if first and have and have < first:
                text = f"`{nvcc['path']}` is CUDA {nvcc['version']}, {gpu.shown} needs {first[0]}.{first[1]}"
                yield Evidence("K16", WARN, nvcc["path"], text, "set CUDA_HOME to a toolkit that knows this GPU")
                break
        if have and tree.cuda_major and have[0] != tree.cuda_major:
            text = f"`{nvcc['path']}` is CUDA {nvcc['version']}, torch is CUDA {tree.cuda}"
            text += ": what a JIT builds will need the other runtime"
            yield Evidence("K16", WARN, nvcc["path"], text, "set CUDA_HOME to a toolkit of torch's CUDA")
    for name in ("gcc", "ninja"):
        if host.get("tools") and host.get("tools", name) is None:
            yield Evidence("K16", NOTE, name, f"no {name} on {case.target.name}: a JIT can not build there")


def stale(site: Site, tree: Tree, changed: bool) -> Iterator[Evidence]:
    """Report caches on a host that another CUDA or Triton than `tree`'s filled, or that this change makes old (K16)."""
    major, triton = tree.cuda_major, (tree.raw.get("versions") or {}).get("triton")
    for cache in site.host.get("caches") or ():
        wrong = [
            (row["path"], soname)
            for row in cache.get("objects") or ()
            for soname in row.get("needed") or ()
            if major is not None and cuda.soname_majors(soname) and major not in cuda.soname_majors(soname)
        ]
        foreign = sorted(version for version in cache.get("triton") or () if triton and version != triton)
        mend = "`launch` gives every generation its own cache; remove this one if nothing else uses it"
        if wrong:
            path, soname = wrong[0]
            text = f"`{cache['path']}` holds `{path}`, which needs `{soname}`: built for another CUDA than {major}"
            yield Evidence("K16", WARN, cache["path"], text, mend)
        elif foreign:
            text = f"`{cache['path']}` has kernels of triton {', '.join(foreign)}; here it is {triton}"
            yield Evidence("K16", WARN, cache["path"], text, mend)
        elif changed and cache.get("files"):
            count = cache["files"]
            text = f"`{cache['path']}` has {count} file{'s' * (count > 1)} of the environment before"
            text += ": stale kernels give wrong text, not errors"
            yield Evidence("K16", WARN, cache["path"], text, mend)
        blind = [
            (row["path"], gpu)
            for row in cache.get("objects") or ()
            for gpu in site.host.gpus
            if row.get("archs") and not cuda.coverage(tuple(row["archs"]), gpu.cc)
        ]
        if blind:
            text = f"`{cache['path']}` holds `{blind[0][0]}`, which has no code for {blind[0][1].shown}"
            yield Evidence("K16", WARN, cache["path"], text, mend)
        if "noexec" in (cache.get("mount") or {}).get("options", ()):
            yield Evidence("K12", WARN, cache["path"], f"`{cache['path']}` is on a noexec mount")
