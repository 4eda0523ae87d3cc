"""Try the ABI oracle on real wheels: what it predicts from facts alone, beside what `dlopen` does on the composed tree.

`make oracle` runs this. It downloads about 14 GB of wheels, unpacks each once, and composes trees by hard links. Every
cell asks: the distribution moved into a tree with that torch; does each of its shared objects load after `import
torch`? One process a file (a fork of one that has imported torch), RTLD_NOW, a stub `libcuda.so.1` in LD_LIBRARY_PATH.
See docs/oracle.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from ddtree_deploy import abi
from ddtree_deploy.abi.closure import importable
from ddtree_deploy.agent import abi_facts

REPO = Path(__file__).resolve().parent.parent
TORCHES = ("2.14.1", "2.11.0", "2.9.1")
KERNELS = ("sgl-kernel==0.3.21", "sglang-kernel==0.4.2.post2", "sglang-kernel==0.4.10")
OTHERS = (
    "sgl-deep-gemm==0.1.0", "torchvision==0.24.1", "torchvision==0.26.0", "torchvision==0.29.1", "torchao==0.17.0",
    "xformers==0.0.35", "torchaudio==2.9.1", "torchaudio==2.11.0", "vllm==0.21.0", "vllm==0.33.0",
)  # fmt: skip
PURE = (
    "typing_extensions",
    "filelock",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "fsspec",
    "numpy",
    "setuptools",
)
PLATFORMS = (
    "manylinux1", "manylinux2010", "manylinux2014", "manylinux_2_17", "manylinux_2_18", "manylinux_2_24",
    "manylinux_2_25",
    "manylinux_2_27", "manylinux_2_28", "manylinux_2_31", "manylinux_2_34", "manylinux_2_35", "linux",
)  # fmt: skip
FOLLOWED = re.compile(r"nvidia-|cuda-|triton$")
PROBE = Path(__file__).with_name("oracle_probe.py")


@dataclass(frozen=True)
class Cell:
    """One verdict beside the truth. `files` maps a path to (predicted loads, really loads, what happened)."""

    tree: str
    dist: str
    files: dict[str, tuple[bool, bool, str]]
    reasons: dict[str, str]

    @property
    def predicted(self) -> bool:
        return all(row[0] for row in self.files.values())

    @property
    def real(self) -> bool:
        return all(row[1] for row in self.files.values())

    @property
    def wrong(self) -> list[str]:
        return [path for path, row in self.files.items() if row[0] != row[1]]


class Bench:
    """The directories of a run: `dists/NAME-VERSION`, `tree/`, `stub/`."""

    def __init__(self, root: Path, python: str) -> None:
        self.root, self.python = root, python
        self.dists, self.tree, self.stub = root / "dists", root / "tree", root / "stub"
        self.probe: subprocess.Popen[str] | None = None
        self.gathered: dict[str, dict[str, object]] = {}
        self.env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.stub),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    # --- wheels ------------------------------------------------------------------------------------------------

    def fetch(self, requirement: str) -> Path:
        """Download one wheel without its dependencies, unpack it, delete it; return its directory."""
        mark = self.root / "wheels.json"
        known: dict[str, str] = json.loads(mark.read_text()) if mark.exists() else {}
        if requirement in known:
            return self.dists / known[requirement]
        with tempfile.TemporaryDirectory(dir=self.root) as scratch:
            argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", scratch]
            argv += [
                "--python-version",
                "3.12",
                "--implementation",
                "cp",
                "--abi",
                "cp312",
                "--abi",
                "abi3",
                "--abi",
                "none",
            ]
            argv += [arg for name in PLATFORMS for arg in ("--platform", f"{name}_x86_64")]
            subprocess.run([*argv, requirement], check=True)
            wheel = next(Path(scratch).glob("*.whl"))
            name = "-".join(wheel.name.split("-")[:2])
            shutil.rmtree(self.dists / name, ignore_errors=True)
            subprocess.run(["unzip", "-q", "-o", str(wheel), "-d", str(self.dists / name)], check=True)
        for data in (self.dists / name).glob("*.data/*lib"):
            subprocess.run(["cp", "-alf", f"{data}/.", str(self.dists / name)], check=True)
        for archive in (self.dists / name).rglob("*.a"):
            archive.unlink()  # static libraries: gigabytes that no loader looks at
        mark.write_text(json.dumps({**known, requirement: name}, indent=0))
        print(f"have {name}", flush=True)
        return self.dists / name

    def with_closure(self, requirement: str) -> list[Path]:
        """Fetch torch and the CUDA libraries and Triton that its metadata pins."""
        first = self.fetch(requirement)
        out, todo = [first], list(_requirements(first, frozenset()))
        while todo:
            wanted = todo.pop(0)
            directory = self.fetch(f"{wanted.name}{wanted.specifier}")
            if directory not in out:
                out.append(directory)
            todo += _requirements(directory, frozenset(wanted.extras)) if wanted.extras else []
        return out

    # --- trees -------------------------------------------------------------------------------------------------

    def compose(self, dists: Iterable[Path]) -> Path:
        """Make the tree of these distributions by hard links."""
        self.close()
        shutil.rmtree(self.tree, ignore_errors=True)
        self.tree.mkdir(parents=True)
        for dist in dists:
            subprocess.run(["cp", "-alf", f"{dist}/.", str(self.tree)], check=True)
        return self.tree

    def dist_facts(self, requirement: str) -> dict[str, object]:
        """Return the facts of one unpacked distribution, gathered once."""
        if requirement not in self.gathered:
            self.gathered[requirement] = self.facts(self.fetch(requirement))
        return self.gathered[requirement]

    def facts(self, root: Path, sonames: Iterable[str] = ()) -> dict[str, object]:
        env = {"LD_LIBRARY_PATH": str(self.stub)}
        return abi_facts.collect(str(root), self.python, env, tuple(sonames), str(self.root))  # type: ignore[no-any-return]

    def build_stub(self) -> None:
        """Build a `libcuda.so.1` with every `cu*` function that a file here refers to; each returns 100."""
        names: set[str] = set()
        for dist in sorted(self.dists.iterdir()):
            for raw in abi_facts.tree(str(dist))["files"].values():
                if "libcuda.so.1" in raw["needed"]:
                    names.update(n for n in abi.model.unpack(raw["undefined"]) if re.fullmatch(r"cu[A-Z]\w*", n))
        self.stub.mkdir(exist_ok=True)
        source = self.stub / "cuda.c"
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in sorted(names)))
        argv = [
            "gcc",
            "-shared",
            "-fPIC",
            "-o",
            str(self.stub / "libcuda.so.1"),
            str(source),
            "-Wl,-soname,libcuda.so.1",
        ]
        subprocess.run(argv, check=True)
        print(f"stub libcuda.so.1 with {len(names)} functions", flush=True)

    def truth(self, root: Path, paths: list[str]) -> dict[str, str]:
        """Load each path in a process of its own after `import torch`; return `ok`, its message, or a signal.

        One probe serves a tree: it has imported torch once and forks for every file.
        """
        if self.probe is None:
            argv = [self.python, "-I", "-B", str(PROBE), str(root)]
            self.probe = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self.env, text=True
            )
        assert self.probe.stdin is not None and self.probe.stdout is not None
        print(json.dumps(paths), file=self.probe.stdin, flush=True)
        out: dict[str, str] = {}
        while len(out) < len(paths):
            path, happened = json.loads(self.probe.stdout.readline())
            out[path] = happened
        return out

    def close(self) -> None:
        """End the probe of the tree before."""
        if self.probe is not None:
            assert self.probe.stdin is not None
            self.probe.stdin.close()
            self.probe.wait()
            self.probe = None


def _requirements(dist: Path, extras: frozenset[str]) -> Iterator[Requirement]:
    text = next(dist.glob("*.dist-info/METADATA")).read_text(encoding="utf-8").split("\n\n")[0]
    environment = {
        "python_version": "3.12",
        "platform_system": "Linux",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    for line in text.splitlines():
        if line.startswith("Requires-Dist:"):
            wanted = Requirement(line.partition(":")[2].strip())
            asked = extras or {""}
            if FOLLOWED.match(wanted.name) and (
                wanted.marker is None or any(wanted.marker.evaluate({**environment, "extra": extra}) for extra in asked)
            ):
                yield wanted


# --- the cells ------------------------------------------------------------------------------------------------------


def matrix(bench: Bench, torch: str, dists: Iterable[str]) -> Iterator[Cell]:
    """Predict and try every distribution moved into a clean tree of one torch."""
    base = bench.with_closure(f"torch=={torch}") + [bench.fetch(name) for name in PURE]
    sources = {name: abi.load(bench.dist_facts(name), name) for name in dists}
    root = bench.compose(base)
    target = abi.load(bench.facts(root, abi.wanted(sources.values())), f"torch {torch}")
    for part in ("torch", "triton", "nvidia"):
        yield _cell(
            bench,
            f"torch {torch}",
            f"its {part}",
            target,
            [p for p in target.tree.objects if p.startswith(f"{part}/")],
            root,
        )
    for name, source in sources.items():
        composition = abi.compose(source, target, {dist.key for dist in source.tree.dists})
        added = _lay(bench.fetch(name), root)
        paths = [path for path, origin in composition.origin.items() if origin == "source"]
        yield _cell(bench, f"torch {torch}", name.replace("==", " "), composition.result, paths, root)
        for path in added:
            path.unlink()


def _lay(dist: Path, root: Path) -> list[Path]:
    """Hard-link a distribution over a tree; return what to take out again."""
    added = []
    for path in sorted(dist.rglob("*")):
        place = root / path.relative_to(dist)
        if path.is_dir() and not path.is_symlink():
            place.mkdir(exist_ok=True)
        elif not place.exists():
            os.link(path, place, follow_symlinks=False)
            added.append(place)
    return added


def _cell(bench: Bench, tree: str, dist: str, site: abi.Site, paths: Iterable[str], root: Path) -> Cell:
    """Predict and try one cell; a cell that an interrupted run has tried already is taken from its notes."""
    notes = bench.root / "cells.json"
    done: dict[str, list[dict[str, object]]] = json.loads(notes.read_text()) if notes.exists() else {}
    key = f"{tree}|{dist}"
    if key in done:
        tried, reasons = done[key]
        return Cell(tree, dist, {path: tuple(row) for path, row in tried.items()}, reasons)  # type: ignore[misc,arg-type]
    known = abi.closure(site)
    names = [p for p in paths if importable(p, site.tree.objects[p], "cp312")]
    really = bench.truth(root, names)
    files, reasons = {}, {}
    for path in names:
        # Death in a constructor came after everything was bound: the link held.
        happened = really.get(path, "not tried")
        files[path] = (known.loads(path), happened == "ok" or happened.startswith("signal"), happened)
        missed = (*known.torch, *known.files.get(path, ()))
        if missed:
            reasons[path] = f"{missed[0].item}" + (f" (+{len(missed) - 1})" if len(missed) > 1 else "")
    cell = Cell(tree, dist, files, reasons)
    notes.write_text(json.dumps({**done, key: [files, reasons]}))
    print(
        f"{tree:<44} {dist:<28} {cell.predicted!s:<6} {cell.real!s:<6} {len(files):>3} files, wrong: {cell.wrong}",
        flush=True,
    )
    return cell


def hosts(bench: Bench) -> tuple[list[Path], list[Path], list[Path]]:
    """Return the distributions of the two hosts of the story, CUDA 12 and CUDA 13, and what both have."""
    old = [*bench.with_closure("torch==2.9.1"), bench.fetch("sgl-kernel==0.3.21"), bench.fetch("sglang==0.5.9")]
    new = [
        *bench.with_closure("torch==2.11.0"),
        bench.fetch("sglang-kernel==0.4.2.post2"),
        bench.fetch("sglang==0.5.11"),
    ]
    return old, new, [bench.fetch(name) for name in PURE]


def story(bench: Bench) -> tuple[list[Cell], list[str]]:
    """Ask before the accident: sglang alone, torch without its kernels, then push the set that is named and load it."""
    old, new, pure = hosts(bench)
    source = abi.load(bench.facts(bench.compose(pure + new)), "ct129")
    root = bench.compose(pure + old)
    target = abi.load(bench.facts(root, abi.wanted([source])), "ct200")
    text = []
    nvidia = [dist.key for dist in source.tree.dists if dist.key.startswith("nvidia-")]
    for title, asked in (("sglang", ["sglang"]), ("torch,triton,nvidia*", ["torch", "triton", *nvidia])):
        verdict = abi.judge(source, target, asked)
        text += ["", f"`diff ct200 --only {title}`", "", "```", *abi.lines(verdict), "```"]
    first = abi.judge(source, target, ["sglang"]).solution
    assert first is not None
    verdict = abi.judge(source, target, first.names)
    text += ["", "The set that it names, judged in turn:", "", "```", *abi.lines(verdict), "```"]
    gone = {(name, version) for name, version, _why in verdict.removed}
    for dist in target.tree.dists:
        for path in dist.owns if (dist.name, dist.version) in gone else ():
            (root / path).unlink(missing_ok=True)
    for directory in new:
        if abi.load({"tree": abi_facts.tree(str(directory))}, "").tree.dists[0].key in verdict.moved:
            _lay(directory, root)
    bench.close()
    after = abi.load(bench.facts(root), "ct200")
    groups = {top: [p for p in after.tree.objects if p.startswith(f"{top}/")] for top in ("torch", "sgl_kernel", "lib")}
    cells = [_cell(bench, "cu12 tree + smallest set", top, after, paths, root) for top, paths in groups.items() if paths]
    return cells, text


def accident(bench: Bench, text: list[str]) -> Iterator[Cell]:
    """Replay the story: parts of a cu130 tree laid over a cu128 tree, by copying over, and after rm -rf.

    What is said of each tree as it stands is added to `text`.
    """
    old, new, pure = hosts(bench)
    parts = ("torch", "triton", "nvidia", "sgl_kernel")
    for name in ("clean", "merged", "replaced"):
        root = bench.compose(pure + (new if name == "clean" else old))
        if name != "clean":
            for part in parts:
                if name == "replaced":
                    shutil.rmtree(root / part)
                for dist in new:
                    if (dist / part).is_dir():
                        (root / part).mkdir(exist_ok=True)
                        subprocess.run(["cp", "-alf", f"{dist / part}/.", str(root / part)], check=True)
        site = abi.load(bench.facts(root), name)
        groups: dict[str, list[str]] = {}
        for path in site.tree.objects:
            top = path.split("/")[0]
            if top in ("torch", "sgl_kernel", "deep_gemm", "lib") or path.startswith("_mscclpp"):
                groups.setdefault({"lib": "mscclpp"}.get(top, top.split(".")[0]), []).append(path)
        for group, paths in sorted(groups.items()):
            yield _cell(bench, f"{name} tree", group, site, paths, root)
        verdict = abi.inspect(site)
        text += ["", f"`doctor` on the {name} tree:", "", "```"]
        text += [f"{item.check} {item.text}" for item in verdict.blocks] or ["nothing that blocks"]
        text += ["```"]


# --- the report -----------------------------------------------------------------------------------------------------


def report(cells: list[Cell], text: list[str], bench: Bench) -> str:
    """Return docs/oracle.md."""
    cells = [cell for cell in cells if cell.files]
    wheels = json.loads((bench.root / "wheels.json").read_text())
    too_kind = [c for c in cells if any(c.files[p][0] and not c.files[p][1] for p in c.files)]
    too_strict = [c for c in cells if any(not c.files[p][0] and c.files[p][1] for p in c.files)]
    files = sum(len(c.files) for c in cells)
    wrong = sum(len(c.wrong) for c in cells)
    word = {True: "loads", False: "breaks"}
    rows = []
    for c in cells:
        first = next(iter(c.reasons), None)
        why = f"`{first}`: `{c.reasons[first]}`" if first else ""
        ok = sum(row[1] for row in c.files.values())
        agree = len(c.files) - len(c.wrong)
        rows.append(
            f"| {c.tree} | {c.dist} | {word[c.predicted]} | {word[c.real]} | {ok}/{len(c.files)} | {agree}/{len(c.files)} | {why} |"
        )
    odd = [f"* {c.tree}, {c.dist}, `{p}`: said {word[c.files[p][0]]}, {c.files[p][2]}" for c in cells for p in c.wrong]
    died = sorted({f"* {c.tree}, {c.dist}, `{p}`: {row[2]}" for c in cells for p, row in c.files.items() if row[2].startswith("signal")})
    gcc = subprocess.run(["gcc", "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    python = subprocess.run([bench.python, "-V"], capture_output=True, text=True, check=True).stdout.strip()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    parts = [
        "# The oracle beside the loader",
        "",
        f"Run on {date}: {python}, glibc {platform.libc_ver()[1]}, gcc {gcc}, Linux {platform.machine()}, no GPU.",
        "",
        "What is compared: for every cell the distribution is moved, on paper, into a tree with that torch",
        "(`abi.compose` on facts gathered from each separately), and the closure says for each shared object whether",
        "it loads. Then the tree is composed on disk and each file is loaded: `import torch`, then `dlopen` with",
        "RTLD_NOW, one process a file, and a stub `libcuda.so.1` that exports every `cu*` function in use. The three",
        "trees of the accident are read from disk as they are. A cell loads when all of its files do; files for other",
        "interpreters and executables are left out. A file that dies in a constructor was bound by then;",
        "these are listed. Here the closure is judged by itself; `diff` counts only what the source does not miss as well",
        "(MPI and InfiniBand plugins of `nvidia`, modules that need another one loaded first).",
        "",
        f"**{len(cells)} cells, {files} files: {len(too_kind)} cells where the oracle says that a file loads and it does not,",
        f"{len(too_strict)} cells the other way; {files - wrong} of {files} files agree.**",
        "",
        "| tree | distribution | oracle | dlopen | files that load | agree | the oracle's first reason |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "## Disagreements",
        "",
        *(odd or ["None."]),
        "",
        "## Bound, then died in a constructor",
        "",
        *(died or ["None."]),
        "",
        "## The accident, asked beforehand",
        "",
        "ct129 has torch 2.11.0+cu130, sglang-kernel 0.4.2.post2 and sglang 0.5.11; ct200 has torch 2.9.1+cu128,",
        "sgl-kernel 0.3.21 and sglang 0.5.9. The cells `cu12 tree + smallest set` above are what loads after the push.",
        "`python scripts/oracle_story.py` replays the same through the command line, push included, on venvs of these wheels, and",
        "`tests/abi/test_story.py` with tiny shared objects wherever the tests run.",
        *text,
        "",
        "## Repeat it",
        "",
        "`make oracle` (or `python scripts/oracle.py --root DIR --python python3.12 --report FILE`): 20 GB in DIR,",
        "which is deleted afterwards unless `--keep` is given. It needs gcc, unzip, pip and a Python 3.12. Versions:",
        "",
        *sorted(f"* `{name}`" for name in set(wheels.values())),
        "",
    ]
    return "\n".join(parts)


def python312() -> str | None:
    """Return a Python 3.12 that runs: from PATH (a pyenv shim may not), else the newest of ~/.pyenv."""
    found = [shutil.which("python3.12"), *sorted(map(str, Path.home().glob(".pyenv/versions/3.12.*/bin/python")))[::-1]]
    for python in filter(None, found):
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()) / "ddtree-oracle")
    parser.add_argument("--python", default=python312(), help="a Python 3.12, for the wheels are cp312")
    parser.add_argument("--report", type=Path, default=REPO / "docs" / "oracle.md")
    parser.add_argument("--keep", action="store_true", help="keep the unpacked wheels for the next run")
    options = parser.parse_args()
    if options.python is None:
        parser.error("there is no Python 3.12 here: name one with --python")
    bench = Bench(options.root, options.python)
    bench.dists.mkdir(parents=True, exist_ok=True)
    for name in (*KERNELS, *OTHERS, *PURE):
        bench.fetch(name)
    for torch in TORCHES:
        bench.with_closure(f"torch=={torch}")
    bench.build_stub()
    cells, text = story(bench)
    cells += accident(bench, text)
    cells += [cell for torch in TORCHES for cell in matrix(bench, torch, (*KERNELS, *OTHERS))]
    options.report.write_text(report(cells, text, bench), encoding="utf-8")
    bench.close()
    shutil.rmtree(bench.tree, ignore_errors=True)
    if not options.keep:
        shutil.rmtree(options.root)
    too_kind = sum(row[0] and not row[1] for cell in cells for row in cell.files.values())
    print(f"{len(cells)} cells, {too_kind} files said to load that do not")
    return 1 if too_kind else 0


if __name__ == "__main__":
    sys.exit(main())
