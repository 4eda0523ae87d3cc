"""How work and memory grow with the size of things: `python benchmarks/scale.py [--files 10000,100000,300000] [--end-to-end 3000,10000]`.

Each measurement runs in a process of its own and reports CPU seconds and peak resident memory; the last columns are the growth of both
against the growth of the input, where 1 is linear. Nothing is compared with a threshold: a step that grows faster than its input shows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent

PRELUDE = """
import gc, json, os, resource, sys, time
gc.set_threshold(100_000, 50, 1000)  # as the command line and the agent do
sys.path.insert(0, {repo!r})
N = {n}
HERE = {here!r}
from hashlib import sha256
def digest(n): return sha256(b"%d" % n).hexdigest()
def path(n): return "pkg%d/sub%d/module_%d.py" % (n % 97, n % 31, n)
def begin():
    global wall, cpu
    wall, cpu = time.perf_counter(), time.process_time()
{setup}
begin()
{body}
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([time.process_time() - cpu, used.ru_maxrss / 1024]))
"""

MANIFEST = """
from ddtree_deploy.models import *
from ddtree_deploy import manifest, plan
python = PythonFacts(**dict.fromkeys(PythonFacts.__dataclass_fields__, "") | {"version": "3.12.1", "debug": False, "free_threaded": False})
dists = tuple(Distribution("d%d" % n, "1", "d%d-1.dist-info" % n, "", ("pkg%d" % n,), (), ()) for n in range(97))
def files(salt): return tuple(sorted(FileEntry(path(n), "f", 0o644, 10, digest(n * salt), "stock", n % 97) for n in range(N)))
one = Manifest(host="h", venv="/v", python=python, distributions=dists, files=files(1))
"""
ROWS = """
from ddtree_deploy.agent import frames, stage, walk, layout, prove
rows = sorted([path(n), "f", 0o644, 10, digest(n)] for n in range(N))
"""
SCAN = """
from ddtree_deploy import origins
scan = {"distributions": [{"dir": "d%d-1.dist-info" % k, "name": "d%d" % k, "version": "1", "requires": [], "installer": "pip",
        "record": [[path(n), digest(n)] for n in range(k, N, 97)], "editable": None, "direct_url": None, "scripts": []} for k in range(97)],
        "pth": [], "torch": {}, "files": [[path(n), "f", 420, 10, 1, n, 5, 5, "", None] for n in range(N)]}
digests = {path(n): digest(n) for n in range(N)}
"""
TREE = """
from ddtree_deploy.agent import walk, layout, stage, durable, prove
from ddtree_deploy.agent.sources import gather
root = os.path.join(HERE, "venv-%d" % N, "lib/python3.11/site-packages")
found = layout.Layout(os.path.join(HERE, "venv-%d" % N), "lib/python3.11/site-packages")
class Quiet:
    def aborted(self): return False
    def progress(self, *_): pass
"""
MAKE = """
for n in range(N):
    at = os.path.join(root, path(n))
    if n < 97 * 31:
        os.makedirs(os.path.dirname(at), exist_ok=True)
    with open(at, "wb") as file:
        file.write(b"%d" % n)
"""
STORE = """
from pathlib import Path
from ddtree_deploy import upkeep
from ddtree_deploy.store import Store
home = Path(HERE, "store-%d" % N)
store = Store.open(home)
"""
SNAPSHOTS = """
python = PythonFacts(**dict.fromkeys(PythonFacts.__dataclass_fields__, "") | {"debug": False, "free_threaded": False})
from ddtree_deploy import manifest as codec
from dataclasses import asdict
objects = [digest(n) for n in range(500)]
for d in objects:
    store.path(d).parent.mkdir(exist_ok=True)
for n, d in enumerate(objects):
    store.path(d).write_bytes(b"%d" % n)
for n in range(N):
    some = range(n % 480, n % 480 + 20)
    files = tuple(sorted(FileEntry(path(k), "f", 0o644, 1, objects[k % 500], "unowned", -1) for k in some))
    m = Manifest(host="h%d" % n, venv="/v", python=python, distributions=(), files=files)
    data = codec.encode(m); name = codec.identity(data)
    (store.snapshots / (name + ".json")).write_bytes(data)
    label, created = "l%d" % n if n % 2 else "", "2026-01-01T00:00:%09d" % n
    ref = dict(id=name, label=label, host=m.host, venv="/v", created=created, files=20, bytes=20, patched=0)
    (store.references / (name + ".json")).write_text(json.dumps(ref))
"""

#: name: (setup, body). Of files.
PURE: dict[str, tuple[str, str]] = {
    "manifest: encode": (MANIFEST, "data = manifest.encode(one)"),
    "manifest: decode": (MANIFEST + "data = manifest.encode(one)", "manifest.decode(data)"),
    "origins: classify": (SCAN, "origins.classify(scan, digests)"),
    "plan: every file replaced": (
        MANIFEST + "base = Inventory('t', '/v', 's', python, 1, 'x', dists, files(3), 1 << 60, 1 << 40)",
        "plan.make('s', one, base)",
    ),
    "plan: every second file below a file of the target": (
        MANIFEST + "odd = tuple(sorted(FileEntry(path(n) if n % 2 else path(n) + '/x', 'f', 0o644, 1, digest(n), 'unowned', -1)"
        " for n in range(N)))\nbase = Inventory('t', '/v', 's', python, 1, 'x', (), odd, 1 << 60, 1 << 40)",
        "plan.make('s', one, base)",
    ),
    "wire: pack and unpack": (ROWS, "head, data = frames.pack(rows)\nframes.unpack(head, data)"),
    "agent: check the wanted rows": (ROWS, "stage.parse_result(rows)"),
    "agent: check rows that all lie behind links": (
        "from ddtree_deploy.agent import stage\nrows = [['l%d' % n, 'l', 0o777, 0, 'x'] for n in range(N // 2)]"
        " + [['l%d/f' % n, 'f', 0o644, 1, digest(n)] for n in range(N // 2)]",
        "try: stage.parse_result(rows)\nexcept Exception: pass",
    ),
}  # fmt: skip
DISK: dict[str, tuple[str, str]] = {
    "disk: make the files (no part of the product)": (TREE, MAKE),
    "agent: walk and fingerprint": (TREE, "entries = walk.walk(root, {})\nwalk.fingerprint(entries)\nwalk.seal(entries)"),
    "agent: hash": (TREE + "paths = [e[0] for e in walk.walk(root)]", "walk.hash_paths(root, paths, lambda: False, lambda *_: None)"),
    "agent: build the tree by links": (
        TREE + "entries = walk.walk(root)\n"
        "vouch = [[e[0], e[4], e[5], e[3], e[6], e[7], digest(int(e[0].split('_')[1][:-3]))] for e in entries]\n"
        "wanted = sorted((v[0], 'f', e[2], e[3], v[6]) for v, e in zip(vouch, entries))\nsources = gather(found, entries, vouch)\n"
        "os.makedirs(found.directory(1))",
        "index, used = stage.build(Quiet(), found, found.tree(1), wanted, sources)\n"
        "index.save(os.path.join(found.directory(1), 'index'), walk.walk(found.tree(1)))",
    ),
    "agent: index, load and look up": (
        TREE + "entries = walk.walk(found.tree(1))",
        "index = layout.Index.load(os.path.join(found.directory(1), 'index'))\nassert all(index.digest(e) for e in entries)",
    ),
}  # fmt: skip
#: Of files; a push to many hosts keeps the plan of each.
TARGETS: dict[str, tuple[str, str]] = {
    "64 targets, every file replaced, a plan of each": (
        MANIFEST, "plans = [plan.make('s', one, Inventory('t%d' % k, '/v', 's', python, 1, 'x', dists, files(3 + k), 1 << 60, 1 << 40))"
        " for k in range(64)]",
    ),
    "64 targets, nothing replaced, a plan of each": (
        MANIFEST, "plans = [plan.make('s', one, Inventory('t%d' % k, '/v', 's', python, 1, 'x', dists, files(1), 1 << 60, 1 << 40))"
        " for k in range(64)]",
    ),
}  # fmt: skip
#: Of snapshots in a store.
STORES: dict[str, tuple[str, str]] = {
    "disk: make the snapshots (no part of the product)": (MANIFEST.replace("one =", "_ = lambda:") + STORE, SNAPSHOTS),
    "store: list": (STORE, "assert len(store.refs()) == N"),
    "store: resolve a label": (STORE, "store.resolve('l1')"),
    "store: verify": (STORE, "assert not upkeep.verify(store).missing"),
    "store: prune, nothing to drop": (STORE, "upkeep.prune(store)"),
    "store: prune, half of it dropped": (STORE, "upkeep.prune(store, 0)"),
}  # fmt: skip
END_TO_END = """
from pathlib import Path
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from ddtree_deploy.push.request import PushOptions
from ddtree_deploy.transfer import push
from ddtree_deploy.hosts.base import Host
from tests.fixtures.venvs import make_venv, package, BASE_PYTHON
base = Path(HERE, "e2e-%d" % N)
store = Store.open(base / "home")
source, target = base / "source", base / "target"
host = lambda at: Host("local", transport="local", venv=str(at), python=str(BASE_PYTHON))
def go(): return push(host(target), store, store.refs()[0].id, PushOptions(verify=False, lock_wait=120.0), approve=lambda plan: True)
"""
ENDS: dict[str, tuple[str, str]] = {
    "disk: make two venvs (no part of the product)": (
        END_TO_END,
        "make_venv(source, package('alpha', '2.0', modules=N))\nmake_venv(target, package('alpha', '1.0', modules=9))",
    ),
    "snapshot, everything new": (END_TO_END, "take(host(source), store, probe=False)"),
    "snapshot, nothing new": (END_TO_END, "take(host(source), store, probe=False)"),
    "push, everything new": (END_TO_END, "go()"),
    "push, nothing new": (END_TO_END, "assert go().already"),
}  # fmt: skip


def measure(setup: str, body: str, n: int, here: Path) -> tuple[float, float]:
    """Return CPU seconds (children of the process included) and peak MiB of one step."""
    code = PRELUDE.replace("{setup}", setup).replace("{body}", body).replace("{n}", str(n))
    code = code.replace("{here!r}", repr(str(here))).replace("{repo!r}", repr(str(REPO)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{body}\n{done.stderr[-2000:]}")
    seconds, memory = json.loads(done.stdout.splitlines()[-1])
    return seconds, memory


def table(title: str, steps: dict[str, tuple[str, str]], sizes: list[int], here: Path) -> None:
    """Measure each step at each size and print a row."""
    print(f"\n| {title} | " + " | ".join(f"{n} | MiB" for n in sizes) + " | growth of CPU / of input | of memory / of input |")
    print("|---" * (2 * len(sizes) + 3) + "|", flush=True)
    for name, (setup, body) in steps.items():
        rows = [measure(setup, body, n, here) for n in sizes]
        growth = sizes[-1] / sizes[0]
        time = rows[-1][0] / max(rows[0][0], 1e-3) / growth
        memory = rows[-1][1] / rows[0][1] / growth
        cells = " | ".join(f"{seconds:.2f} | {mib:.0f}" for seconds, mib in rows)
        print(f"| {name} | {cells} | {time:.2f} | {memory:.2f} |", flush=True)


def sparse(here: Path, size: int) -> None:
    """Hash one sparse file as an agent does."""
    with (here / "sparse").open("wb") as file:
        file.truncate(size)
    seconds, mib = measure(
        "from ddtree_deploy.agent import walk", "walk.hash_paths(HERE, ['sparse'], lambda: False, lambda *_: None)", size, here
    )
    print(f"\none sparse file of {size / 1e9:.0f} GB: hashed in {seconds:.1f} CPU s at a peak of {mib:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(word) for word in text.split(",") if word]  # noqa: E731
    parser.add_argument("--files", type=numbers, default=[10_000, 100_000, 300_000], help="numbers of files for pure steps")
    parser.add_argument("--disk", type=numbers, default=[10_000, 100_000, 300_000], help="numbers of files on a disk")
    parser.add_argument("--targets", type=numbers, default=[1000, 10_000], help="numbers of files of each of 64 targets")
    parser.add_argument("--snapshots", type=numbers, default=[1000, 10_000], help="numbers of snapshots in a store")
    parser.add_argument("--end-to-end", type=numbers, default=[3000, 30_000], help="numbers of files of a whole snapshot and push")
    parser.add_argument("--sparse", type=int, default=20, help="GB of one sparse file")
    parser.add_argument("--at", type=Path, default=None, help="directory for the files")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddtree-scale-", dir=options.at) as name:
        here = Path(name)
        for title, steps, sizes in (
            ("files, CPU s", PURE, options.files), ("files on a disk, CPU s", DISK, options.disk),
            ("files at 64 targets, CPU s", TARGETS, options.targets),
            ("snapshots, CPU s", STORES, options.snapshots), ("whole commands, CPU s of the controller", ENDS, options.end_to_end),
        ):  # fmt: skip
            if sizes:
                table(title, steps, sizes, here)
        if options.sparse:
            sparse(here, options.sparse * 10**9)


if __name__ == "__main__":
    main()
