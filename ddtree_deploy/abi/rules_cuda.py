"""K2 one CUDA major per tree, K4 GPU architectures, K5 driver."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddtree_deploy.abi import cuda
from ddtree_deploy.abi.case import BLOCK, NOTE, WARN, Case, Evidence
from ddtree_deploy.abi.model import Gpu, Site


def cuda_major(case: Case) -> Iterator[Evidence]:
    """Report libraries of another CUDA major than torch's; what a host had before as well is a warning (K2)."""
    known = set(mixed(case.source)) & set(_moved_paths(case)) | set(mixed(case.target))
    found = mixed(case.result)
    if not _changed(case):
        found = {path: (WARN if path in known else level, text) for path, (level, text) in found.items()}
    yield from one_a_distribution(case.result, found)
    yield from _two_runtimes(case)


def one_a_distribution(site: Site, found: dict[str, tuple[str, str]]) -> Iterator[Evidence]:
    """Say what `mixed` found once per distribution and level."""
    groups: dict[tuple[str, str], list[str]] = {}
    for path, (level, _text) in sorted(found.items()):
        owner = site.tree.owner(path)
        groups.setdefault((level, owner.key if owner else path), []).append(path)
    for (level, _owner), paths in groups.items():
        more = f"; and {len(paths) - 1} more of its files" if len(paths) > 1 else ""
        mend = "remove what the other CUDA left, or move the whole set"
        yield Evidence("K2", level, paths[0], found[paths[0]][1] + more, mend)


def _moved_paths(case: Case) -> list[str]:
    return [path for path, origin in case.composition.origin.items() if origin == "source"]


def _changed(case: Case) -> bool:
    return case.result.tree.cuda_major != case.target.tree.cuda_major


def mixed(site: Site) -> dict[str, tuple[str, str]]:
    """Return {path: (level, text)} of the libraries in one tree that belong to another CUDA major than its torch."""
    major = site.tree.cuda_major
    out: dict[str, tuple[str, str]] = {}
    if major is None:
        return out
    torch = f"torch {site.tree.torch_version}"
    for path, item in site.tree.objects.items():
        if not path.startswith("nvidia/"):
            continue
        owners = site.tree.owners.get(path, ())
        majors = cuda.soname_majors(item.soname or item.name)
        flavours = {int(match.group(1)) for dist in owners for match in [re.search(r"-cu(\d+)$", dist.key)] if match}
        stamp = cuda.version(item.raw.get("stamp"))
        label = f" of {owners[0].shown}" if owners else ", which no RECORD names,"
        if majors and major not in majors:
            first = major >= 13 and cuda.OLD_LAYOUT.search(path) is not None
            why = ": torch's preloader finds it before its own" if first else ""
            out[path] = (BLOCK if first else WARN, f"`{path}`{label} is CUDA {majors[0]} beside {torch}{why}")
        elif cuda.AMBIGUOUS.match(item.name) and flavours and major not in flavours:
            out[path] = (
                BLOCK,
                f"`{path}`{label} is built for CUDA {min(flavours)}; same name, but {torch} needs CUDA {major}",
            )
        elif len(flavours) > 1:
            who = " and ".join(dist.shown for dist in owners)
            out[path] = (BLOCK, f"`{path}` is owned by {who}: one of them overwrote the other")
        elif cuda.AMBIGUOUS.match(item.name) and stamp and stamp[0] != major and not flavours:
            out[path] = (WARN, f"`{path}`{label} names CUDA {item.raw['stamp']} in its data; {torch} is CUDA {major}")
    return out


def _two_runtimes(case: Case) -> Iterator[Evidence]:
    """Report files whose process would newly hold two CUDA runtimes."""
    before = {path for known in (case.before, case.now) for path in _double(known.libraries)}
    for path, majors in sorted(_double(case.after.libraries).items()):
        if path not in before:
            runtimes = " and ".join(f"`{lib}`" for lib in majors)
            yield Evidence("K2", BLOCK, path, f"a process with `{path}` would hold two CUDA runtimes: {runtimes}")


def _double(libraries: dict[str, tuple[str, ...]] | object) -> dict[str, tuple[str, ...]]:
    assert isinstance(libraries, dict)
    out = {}
    for path, held in libraries.items():
        runtimes = {match.group(1): lib for lib in held for match in [cuda.RUNTIME.match(lib.rsplit("/", 1)[-1])] if match}
        if len(runtimes) > 1:
            out[path] = tuple(sorted(runtimes.values()))
    return out


# --- K4 -------------------------------------------------------------------------------------------------------------


def architectures(case: Case) -> Iterator[Evidence]:
    """Compare the GPU code in every moved distribution with every GPU of the target (K4).

    A distribution with no code at all for a GPU is a block; one of whose files lacks it is a warning, since kernels
    for one architecture only are common; a capability that the source has too proves nothing new.
    """
    proven = {gpu.cc for gpu in case.source.host.gpus}
    seen: set[tuple[int, int]] = set()
    for gpu in case.target.host.gpus:
        if gpu.cc in seen:
            continue
        seen.add(gpu.cc)
        for dist in case.composition.moved:
            files = {path: case.result.tree.objects[path].archs for path in dist.owns & case.result.tree.objects.keys()}
            known = {path: archs for path, archs in files.items() if archs and cuda.listed(path)}
            if known:
                yield from _gaps(case, gpu, dist.shown, dist.key, known, proven=gpu.cc in proven)
    if not case.target.host.gpus:
        reason = case.target.host.get("gpus", "error")
        yield Evidence("K4", NOTE, "gpu", f"no GPU answers on {case.target.name}" + (f": {reason}" if reason else ""))


def _gaps(case: Case, gpu: Gpu, shown: str, key: str, known: dict[str, tuple[str, ...]], proven: bool) -> Iterator[Evidence]:
    ways = {path: cuda.coverage(archs, gpu.cc) for path, archs in known.items()}
    lacking = sorted(path for path, way in ways.items() if not way)
    if len(lacking) == len(ways):
        archs = sorted({arch for path in lacking for arch in known[path]})
        yield Evidence(
            "K4", WARN if proven else BLOCK, key,
            f"{shown} has no code for {gpu.shown}: it holds {' '.join(archs)}",
            "take a build for this GPU",
        )  # fmt: skip
        return
    for path in lacking:
        if not proven:
            yield Evidence("K4", WARN, path, f"`{path}` ({shown}) has no code for {gpu.shown}: {' '.join(known[path])}")
    compiled = sorted(path for path, way in ways.items() if way == "ptx")
    if compiled and not proven:
        driver, torch = driver_version(case.target), cuda.version(case.result.tree.cuda)[:2]
        matched = cuda.MATCHED_DRIVER.get((torch[0], torch[1])) if len(torch) == 2 else None
        old = bool(driver and matched and driver < matched)
        text = f"`{compiled[0]}` ({shown}) runs on {gpu.shown} only by compiling its PTX at first use"
        if old:
            text += f", and driver {_dotted(driver)} is older than the toolkit's ({_dotted(matched or ())})"
        yield Evidence("K4", BLOCK if old else WARN, compiled[0], text)


# --- K5 -------------------------------------------------------------------------------------------------------------


def driver_version(site: Site) -> tuple[int, ...]:
    """Return the driver that answers on the host; empty when none does."""
    host = site.host
    return cuda.version(host.get("gpus", "driver") or host.get("driver", "user") or host.get("driver", "kernel"))


def _dotted(numbers: tuple[int, ...]) -> str:
    """Write a driver version as NVIDIA does: `580.65.06`."""
    return ".".join(f"{number:02d}" if place == 2 else str(number) for place, number in enumerate(numbers))


def driver(case: Case) -> Iterator[Evidence]:
    """Compare the driver with the CUDA of the resulting torch, and its kernel side with its library side (K5)."""
    target, tree = case.target, case.result.tree
    kernel, user = target.host.get("driver", "kernel"), target.host.get("driver", "user")
    if kernel and user and kernel != user:
        yield Evidence(
            "K5", BLOCK, "driver",
            f"the kernel module on {target.name} is {kernel}, its `libcuda.so` is {user}: no GPU works like that",
            "install the container's driver libraries in the kernel module's version, or reboot after the upgrade",
        )  # fmt: skip
    have, needs = driver_version(target), cuda.version(tree.cuda)[:2]
    if len(needs) < 2:
        return
    torch = f"torch {tree.torch_version}"
    minimum, matched = cuda.MINIMUM_DRIVER.get(needs[0]), cuda.MATCHED_DRIVER.get((needs[0], needs[1]))
    if not have:
        yield Evidence("K5", NOTE, "driver", f"no driver answers on {target.name}; {torch} needs {_dotted(minimum or ())} or later")
    elif minimum and have < minimum:
        yield Evidence(
            "K5", BLOCK, "driver",
            f"{torch} needs driver >= {_dotted(minimum)}, {target.name} has {_dotted(have)}",
            f"upgrade the driver, or take an environment for CUDA {needs[0] - 1}",
        )  # fmt: skip
    elif matched and have < matched:
        yield Evidence(
            "K5", WARN, "driver",
            f"driver {_dotted(have)} is older than CUDA {_dotted(needs)}'s own ({_dotted(matched)}): "
            "it runs, PTX and new features may not",
        )  # fmt: skip
    libcuda = target.host.get("driver", "libcuda") or ""
    if "/compat/" in libcuda:
        consumer = [gpu for gpu in target.host.gpus if cuda.CONSUMER.search(gpu.name)]
        yield Evidence(
            "K5", BLOCK if consumer else WARN, libcuda,
            f"`{libcuda}` is the forward-compatibility driver library"
            + (f", which {consumer[0].shown} does not support" if consumer else ""),
            "take its directory out of LD_LIBRARY_PATH and ld.so.conf",
        )  # fmt: skip
