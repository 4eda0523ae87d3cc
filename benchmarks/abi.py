"""How fast the ABI oracle is, on a tree of your own: `python benchmarks/abi.py SITE_PACKAGES [--cold]`.

Every measurement runs in a process of its own and reports wall and CPU seconds and peak resident memory; the load of the
machine is printed first, since only the CPU seconds mean something on a busy one. With `--cold` the tree's pages are put out of
the page cache before each (posix_fadvise, on this tree only; names and inodes stay cached). `ratio` is side by side in this run:
the same file read by pyelftools.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
MEASURE = """
import json, resource, sys, time
sys.path.insert(0, {repo!r})
{before}
start, busy = time.perf_counter(), time.process_time()
{body}
times = [time.perf_counter() - start, time.process_time() - busy]
print(json.dumps([*times, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, result]))
"""
WALK = """
from ddtree_deploy.agent import walk
entries = walk.walk({tree!r})
"""
GATHER = """
from ddtree_deploy.agent import abi_facts
facts = abi_facts.collect({tree!r}, entries=entries)
with open({out!r}, "w") as file:
    json.dump(facts, file)
result = [len(facts["tree"]["files"]), facts["tree"]["bytes"] / 1e9]
"""
CLOSE = """
from ddtree_deploy import abi
with open({out!r}) as file:
    site = abi.load(json.load(file), "here")
known = abi.closure(site)
result = [sum(len(item.undefined) for item in site.tree.objects.values()), len(known.misses)]
"""
ARCHS = """
import os
from ddtree_deploy.agent import fatbin, image
result = 0
for top, _, names in os.walk({tree!r}):
    for name in names:
        path = os.path.join(top, name)
        if ".so" in name and os.path.getsize(path) > 1 << 20:
            with open(path, "rb") as file:
                archs, _problems = fatbin.architectures(image.Image(file.fileno(), os.path.getsize(path)))
                result += bool(archs)
"""
OURS = """
from ddtree_deploy.agent import elf
result = len(elf.read({file!r})["defines"])
"""
THEIRS = """
from elftools.elf.elffile import ELFFile
with open({file!r}, "rb") as handle:
    image = ELFFile(handle)
    tags = list(image.get_section_by_name(".dynamic").iter_tags())
    symbols = image.get_section_by_name(".dynsym").iter_symbols()
    result = sum(1 for symbol in symbols if symbol.entry.st_shndx != "SHN_UNDEF" and symbol.name)
"""


def forget(tree: Path) -> None:
    """Put the content of every file of a tree out of the page cache; nobody else's."""
    for top, _names, files in os.walk(tree):
        for name in files:
            fd = os.open(os.path.join(top, name), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(body: str, cold: bool, before: str = "entries = None", **names: str) -> tuple[float, float, float, object]:
    """Run `body` in a fresh interpreter, `before` off the clock; return wall seconds, CPU seconds, peak MiB, and its `result`."""
    if cold:
        forget(Path(names["tree"]))
    code = MEASURE.format(repo=str(REPO), before=before.format(**names), body=body.format(**names))
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=True)
    wall, busy, peak, result = json.loads(done.stdout)
    return wall, busy, peak, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--cold", action="store_true", help="put the tree out of the page cache before every measurement")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/ddtree-abi-bench.json"))
    options = parser.parse_args()
    tree, out = str(options.tree.resolve()), str(options.scratch)
    print(f"load {', '.join(f'{load:.1f}' for load in os.getloadavg())} on {os.cpu_count()} CPUs")
    total = spent = 0.0
    for name, body, cold, unit in (
        ("gather facts", GATHER, options.cold, "[ELF files, GB]"),
        ("closure", CLOSE, False, "[symbols checked, unresolved]"),
        ("GPU architectures", ARCHS, options.cold, "files with GPU code"),
    ):
        wall, busy, peak, result = measure(body, cold, tree=tree, out=out)
        total, spent = (total + wall, spent + busy) if body is not ARCHS else (total, spent)
        print(f"{name:<18} {wall:6.2f} s wall {busy:6.2f} s CPU {peak:5.0f} MiB  {result} {unit}")
    print(f"{'facts and closure':<18} {total:6.2f} s wall {spent:6.2f} s CPU, {options.scratch.stat().st_size / 1e6:.1f} MB of JSON")
    wall, busy, peak, result = measure(GATHER, options.cold, WALK, tree=tree, out=out)
    print(f"{'facts, in a push':<18} {wall:6.2f} s wall {busy:6.2f} s CPU {peak:5.0f} MiB  the tree was walked already")
    library = options.tree / "torch/lib/libtorch_cuda.so"
    if library.exists():
        ours = min(measure(OURS, False, file=str(library))[1] for _ in range(3))
        theirs = min(measure(THEIRS, False, file=str(library))[1] for _ in range(3))
        print(f"{library.name}: {ours:.3f} s CPU, pyelftools {theirs:.3f} s, ratio {ours / theirs:.3f}")
    options.scratch.unlink()


if __name__ == "__main__":
    main()
