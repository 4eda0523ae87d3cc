"""What the trials of the oracle work on: wheels unpacked once, trees composed of them, their facts, and the real loader."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

from ddtree_deploy import abi
from ddtree_deploy.agent import abi_facts

PURE = ("typing_extensions", "filelock", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "numpy", "setuptools")
PARTS = ("torch", "triton", "nvidia", "sgl_kernel")  # what was copied by hand in the accident
PLATFORMS = (
    "manylinux1", "manylinux2010", "manylinux2014", "manylinux_2_17", "manylinux_2_18", "manylinux_2_24", "manylinux_2_25",
    "manylinux_2_27", "manylinux_2_28", "manylinux_2_31", "manylinux_2_34", "manylinux_2_35", "linux",
)  # fmt: skip
FOLLOWED = re.compile(r"nvidia-|cuda-|triton$")
PROBE = Path(__file__).with_name("probe.py")


def command_line(description: str) -> argparse.ArgumentParser:
    """Return a parser of what every run can be told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()) / "ddtree-oracle")
    parser.add_argument("--python", default=python312(), help="a Python 3.12, for the wheels are cp312")
    parser.add_argument("--keep", action="store_true", help="keep the unpacked wheels for the next run")
    return parser


def open_bench(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Bench:
    """Make the directories of a run, or end with a usage error."""
    if options.python is None:
        parser.error("there is no Python 3.12 here: name one with --python")
    bench = Bench(options.root, options.python)
    bench.dists.mkdir(parents=True, exist_ok=True)
    return bench


def python312() -> str | None:
    """Return a Python 3.12 that runs: from PATH (a pyenv shim may not), else the newest of ~/.pyenv."""
    found = [shutil.which("python3.12"), *sorted(map(str, Path.home().glob(".pyenv/versions/3.12.*/bin/python")))[::-1]]
    for python in filter(None, found):
        if subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0:
            return python
    return None


class Bench:
    """The directories of a run: `dists/NAME-VERSION`, `tree/`, `stub/`."""

    def __init__(self, root: Path, python: str) -> None:
        self.root, self.python = root, python
        self.dists, self.tree, self.stub = root / "dists", root / "tree", root / "stub"
        self.probe: subprocess.Popen[str] | None = None
        self.gathered: dict[str, dict[str, object]] = {}
        ours = {"LD_LIBRARY_PATH": str(self.stub), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        self.env = {**os.environ, **ours}

    # --- wheels ------------------------------------------------------------------------------------------------

    def fetch(self, requirement: str) -> Path:
        """Download one wheel without its dependencies, unpack it, delete it; return its directory."""
        mark = self.root / "wheels.json"
        known: dict[str, str] = json.loads(mark.read_text()) if mark.exists() else {}
        if requirement in known:
            return self.dists / known[requirement]
        with tempfile.TemporaryDirectory(dir=self.root) as scratch:
            argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", scratch]
            argv += ["--python-version", "3.12", "--implementation", "cp"]
            argv += [arg for name in ("cp312", "abi3", "none") for arg in ("--abi", name)]
            argv += [arg for name in PLATFORMS for arg in ("--platform", f"{name}_x86_64")]
            subprocess.run([*argv, requirement], check=True)
            wheel = next(Path(scratch).glob("*.whl"))
            name = "-".join(wheel.name.split("-")[:2])
            shutil.rmtree(self.dists / name, ignore_errors=True)
            subprocess.run(["unzip", "-q", "-o", str(wheel), "-d", str(self.dists / name)], check=True)
        for data in (self.dists / name).glob("*.data/*lib"):
            link_over(data, self.dists / name)
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
            link_over(dist, self.tree)
        return self.tree

    def dist_facts(self, requirement: str) -> dict[str, object]:
        """Return the facts of one unpacked distribution, gathered once."""
        if requirement not in self.gathered:
            self.gathered[requirement] = self.facts(self.fetch(requirement))
        return self.gathered[requirement]

    def facts(self, root: Path, sonames: Iterable[str] = ()) -> dict[str, object]:
        """Return what the agent would gather of a tree."""
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
        library = str(self.stub / "libcuda.so.1")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, str(source), "-Wl,-soname,libcuda.so.1"], check=True)
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
    environment = {"python_version": "3.12", "platform_system": "Linux", "sys_platform": "linux", "platform_machine": "x86_64"}
    for line in text.splitlines():
        if line.startswith("Requires-Dist:"):
            wanted = Requirement(line.partition(":")[2].strip())
            asked = extras or {""}
            if FOLLOWED.match(wanted.name) and (
                wanted.marker is None or any(wanted.marker.evaluate({**environment, "extra": extra}) for extra in asked)
            ):
                yield wanted


def link_over(source: Path, target: Path) -> None:
    """Hard-link what a directory holds over another, replacing what is there."""
    subprocess.run(["cp", "-alf", f"{source}/.", str(target)], check=True)


def copy_by_hand(dists: Iterable[Path], part: str, site: Path) -> None:
    """Lay one directory of these distributions over a tree, as `cp -r` did."""
    for dist in dists:
        if (dist / part).is_dir():
            (site / part).mkdir(exist_ok=True)
            link_over(dist / part, site / part)


def lay(dist: Path, root: Path) -> list[Path]:
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


def hosts(bench: Bench) -> tuple[list[Path], list[Path], list[Path]]:
    """Return the distributions of the two hosts of the story, CUDA 12 and CUDA 13, and what both have."""
    old = [*bench.with_closure("torch==2.9.1"), bench.fetch("sgl-kernel==0.3.21"), bench.fetch("sglang==0.5.9")]
    new = [*bench.with_closure("torch==2.11.0"), bench.fetch("sglang-kernel==0.4.2.post2"), bench.fetch("sglang==0.5.11")]
    return old, new, [bench.fetch(name) for name in PURE]
