"""K1 closure, K3 torch ABI, K6 libc: what the loader would newly miss, who provides it, who took it away."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ddtree_deploy.abi.case import BLOCK, NOTE, WARN, Case, Evidence, plain
from ddtree_deploy.abi.closure import DAMAGED, LIBRARY, SYMBOL, VERSION, Miss
from ddtree_deploy.abi.compose import SOURCE, TARGET
from ddtree_deploy.abi.model import Site

DRIVER = re.compile(r"lib(?:cuda|nvidia-\w+|nvcuvid)\.so")
LIBC = re.compile(r"(?:lib(?:c|m|dl|rt|pthread|util|resolv|stdc\+\+|gcc_s)|ld-linux[-\w]*)\.so")
TORCH_SYMBOL = re.compile(r"_Z\w*?(?:N[VK]*|TV|TI|TS|TVN|TIN)?(?:3c10|2at|5torch|6caffe2)|aoti_torch_|torch_[a-z]")
TORCH_LIBRARY = re.compile(r"lib(?:torch\w*|c10\w*)\.so")
SHIM = re.compile(r"(?:aoti_)?torch_[a-z]")


def check_of(miss: Miss) -> str:
    """Name the check that a miss belongs to."""
    if miss.kind == DAMAGED:
        return "K8"
    if miss.kind == VERSION:
        return "K6" if LIBC.match(miss.item.rpartition(" ")[2]) else "K1"
    if miss.kind == LIBRARY:
        return "K5" if DRIVER.match(miss.item) else "K1"
    return "K5" if re.match(r"cu[A-Z]|nvml[A-Z]", miss.item) else "K3" if TORCH_SYMBOL.match(miss.item) else "K1"


def link(case: Case) -> Iterator[Evidence]:
    """Report every new miss (K1, K3, K5, K6, K8)."""
    yield from missing(case, case.fresh, BLOCK)
    if not case.after.preload_known:
        yield Evidence(
            "K1", WARN, "torch/__init__.py",
            f"torch {case.result.tree.torch_version} preloads CUDA libraries in a way that is not recognised",
            "rely on the import probe: the link closure may be wrong about files without an RPATH",
        )  # fmt: skip


def missing(case: Case, found: Iterable[Miss], level: str) -> Iterator[Evidence]:
    """Say what is missed once per distribution and thing."""
    groups: dict[tuple[str, str, str, str], list[Miss]] = {}
    for miss in found:
        check, dist = check_of(miss), case.composition.dist(miss.by)
        owner = dist.key if dist else miss.by
        item = miss.item if miss.kind != SYMBOL else miss.by  # symbols: one line a file
        groups.setdefault((check, owner, miss.kind, item), []).append(miss)
    for (check, _owner, kind, _item), group in sorted(groups.items()):
        yield _evidence(case, check, kind, group, level)


def _evidence(case: Case, check: str, kind: str, misses: list[Miss], level: str) -> Evidence:
    first = misses[0]
    who = f"`{first.by}` ({_whose(case, first.by)})"
    if kind == DAMAGED:
        mend = "take the snapshot again" if case.from_source(first.by) else "install its distribution again"
        return Evidence(check, level, first.by, f"{who} is {first.item}", mend)
    mend = ""
    if kind == SYMBOL:
        names = [plain(miss.item) for miss in misses]
        shown = ", ".join(f"`{name}`" for name in dict.fromkeys(names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        text = f"{who} needs {shown}"
        what = first.item
        misses = misses[:1]
    else:
        text = f"{who} needs `{first.item}`"
        what = first.item
        if len(misses) > 1:
            text += f", and so {'do' if len(misses) > 2 else 'does'} {len(misses) - 1} more of its files"
    provider = case.provider(first)
    if provider is None:
        there = next((path for path, item in case.result.tree.objects.items() if first.item in (item.soname, item.name)), None)
        text += (
            f"; `{there}` is in the tree, but the loader does not come by there" if kind == LIBRARY and there is not None
            else f"; nothing on {case.target.name} provides it"
        )  # fmt: skip
    else:
        site, item = provider
        text += f"; {_provided(case, site, item.path, kind)}"
        if kind == VERSION and LIBC.match(item.name):
            mend = f"upgrade the system of {case.target.name}, or build the package on one that is as old"
        elif case.owner_of(site, item) is None and kind == LIBRARY:
            mend = f"install the system package that holds `{first.item}` on {case.target.name}"
    return Evidence(check, level, what, text, mend)


def _whose(case: Case, path: str) -> str:
    dist = case.composition.dist(path)
    label = dist.shown if dist else "no distribution"
    return label if case.from_source(path) or not case.composition.moved else f"{label}, not moved"


def _provided(case: Case, site: Site, path: str, kind: str) -> str:
    """Say who provides a thing on the host that the file comes from, and why the result lacks it."""
    inside = path[len(site.tree.root) + 1 :] if path.startswith(site.tree.root + "/") else ""
    dist = site.tree.owner(inside) if inside else None
    label = f"`{inside or path}`" + (f" of {dist.shown}" if dist else "")
    if kind == VERSION:
        return f"{site.name} has it in {label}, {case.target.name}'s is older"
    if site is case.source:
        return f"on {site.name} it comes from {label}"
    gone = next((item for item in case.composition.removed if dist is not None and item.dist is dist), None)
    if gone is not None:
        return f"it comes from {label} now, which goes ({gone.why})"
    return f"it comes from {label} now"


def torch_abi(case: Case) -> Iterator[Evidence]:
    """Say which extensions are bound to one torch (C++ symbols) when torch changes under or around them (K3)."""
    ours, theirs = case.source.tree.torch_version, case.target.tree.torch_version
    after = case.result.tree.torch_version
    if after is None:
        return
    reported = {miss.by for miss in case.fresh}
    for dist in case.result.tree.dists:
        paths = [path for path in dist.owns & case.result.tree.objects.keys() if not path.startswith("torch/")]
        built = ours if any(case.from_source(path) for path in paths) else theirs
        if built is None or _minor(built) == _minor(after):
            continue
        bound = sorted(path for path in paths if path not in reported and kind_of(case.result, path) == "cxx")
        if bound:
            yield Evidence(
                "K3", WARN, dist.key,
                f"{dist.shown} uses torch's C++ symbols (`{bound[0]}`) and ran with torch {built}; "
                f"with {after} it links, but C++ symbols carry no promise",
                "move it together with its torch, or rely on the import probe",
            )  # fmt: skip


def kind_of(site: Site, path: str) -> str:
    """Return `cxx` (C++ symbols of torch), `stable` (its C shim only), or empty for a file that does not use torch."""
    item = site.tree.objects[path]
    if not any(TORCH_LIBRARY.match(name) for name in item.needed):
        return ""
    names = [name for name in item.undefined if TORCH_SYMBOL.match(name)]
    if any(not SHIM.match(name) for name in names):
        return "cxx"
    return "stable" if names else ""


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def baseline_note(case: Case) -> Iterator[Evidence]:
    """Say how much was unresolved before and is therefore accepted (K1)."""
    accepted = case.after.misses - set(case.fresh)
    if accepted:
        ours = sum(case.composition.origin.get(miss.by) == SOURCE for miss in accepted)
        theirs = sum(case.composition.origin.get(miss.by) == TARGET for miss in accepted)
        yield Evidence(
            "K1", NOTE, "baseline",
            f"{len(accepted)} unresolved before as well, and accepted: "
            f"{ours} on {case.source.name}, {theirs} on {case.target.name}",
        )  # fmt: skip
