"""A summary for people: sorted `namespace :: feature :: value` lines, spelled as PEP 825 spells variant properties.

Where a draft names a property (`nvidia :: cuda_version_lower_bound`, `nvidia :: sm_arch`, `abi_dependency :: torch`,
PEP 850) its name is used; the rest is ours. Drafts move: the mapping is here and nowhere else. Tags never decide
anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddtree_deploy.abi import cuda
from ddtree_deploy.abi.model import Site
from ddtree_deploy.abi.rules_link import LIBC, TORCH_LIBRARY, kind_of

#: Of a property with many values (architectures, sonames) so many are shown; `--json` has them all.
SHOWN = 4


@dataclass(frozen=True, slots=True, order=True)
class TagRow:
    """One property with its values on the source, on the target as it is, and in the result; `-` where it is absent."""

    name: str
    source: str
    target: str
    result: str

    @property
    def differs(self) -> bool:
        return len({self.source, self.target, self.result}) > 1

    @property
    def brief(self) -> tuple[str, str, str]:
        """The three values, without what all three share, and of many only the first few."""
        sides = [side.split() for side in (self.source, self.target, self.result)]
        common = set(sides[0]).intersection(*sides[1:])
        own = [[value for value in side if value not in common] for side in sides]
        rest = [len(values) - SHOWN for values in own]
        short = [
            " ".join([*(["…"] if common else []), *values[:SHOWN], *([f"and {more} more"] if more > 0 else [])])
            for values, more in zip(own, rest, strict=True)
        ]
        return short[0], short[1], short[2]


def properties(site: Site) -> dict[str, tuple[str, ...]]:
    """Return the properties of an environment: feature -> sorted values."""
    out: dict[str, set[str]] = {}
    tree = site.tree

    def add(name: str, *values: str | None) -> None:
        out.setdefault(name, set()).update(value for value in values if value)

    if tree.cuda:
        add("nvidia :: cuda_version_lower_bound", tree.cuda)
        add("nvidia :: cuda_version_upper_bound", str(int(tree.cuda.split(".")[0]) + 1))
    if tree.torch_version:
        add("abi_dependency :: torch", ".".join(tree.torch_version.split("+")[0].split(".")[:2]))
        add("ddtree :: torch_build", tree.torch_version)
    add("ddtree :: python", site.host.python_tag)
    core = tree.objects.get("torch/lib/libtorch_cuda.so")
    for arch in (core.archs if core is not None else None) or ():
        kind, _, number = arch.partition("_")
        add("nvidia :: sm_arch", f"{number}_{'real' if kind == 'sm' else 'virtual'}")
    floors: dict[str, list[tuple[int, ...]]] = {}
    provided = {item.soname or item.name for item in tree.objects.values()}
    for path, item in tree.objects.items():
        kind = kind_of(site, path) if any(TORCH_LIBRARY.match(name) for name in item.needed) and not path.startswith("torch/") else ""
        if kind:
            add("ddtree :: torch_abi", kind)
        if path == "torch/lib/libc10.so":
            new = any("7__cxx11" in name or "B5cxx11" in name for name in item.undefined)
            add("ddtree :: cxx11_abi", "on" if new else "off")
        for versions in item.verneed.values():
            for text in versions:
                match = re.match(r"(GLIBC|GLIBCXX|CXXABI)_(\d[\d.]*)$", text)
                if match:
                    floors.setdefault(match.group(1).lower(), []).append(cuda.version(match.group(2)))
        for soname in item.needed:
            if soname not in provided and not LIBC.match(soname) and re.fullmatch(r"[\w.+-]+", soname):
                add("ddtree :: needs_system", soname)
    for name, seen in floors.items():
        add(f"ddtree :: {name}_floor", ".".join(str(n) for n in max(seen)))
    return {name: tuple(sorted(values, key=_natural)) for name, values in out.items() if values}


def _natural(value: str) -> tuple[int, str]:
    """Sort `75_real` before `100_real`, and names by themselves."""
    digits = re.match(r"\d*", value)
    return int(digits.group() or 0) if digits else 0, value


def table(source: Site, target: Site, result: Site) -> tuple[TagRow, ...]:
    """Return the rows of the three environments, those that differ first, then by name."""
    sides = [properties(site) for site in (source, target, result)]
    names = sorted(set().union(*sides))
    rows = [TagRow(name, *(" ".join(side.get(name, ("-",))) for side in sides)) for name in names]
    return tuple(sorted(rows, key=lambda row: (not row.differs, row.name)))


def lines(site: Site) -> tuple[str, ...]:
    """Return one `namespace :: feature :: value` line per value, sorted."""
    return tuple(f"{name} :: {value}" for name, values in sorted(properties(site).items()) for value in values)
