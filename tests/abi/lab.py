"""Tiny environments with real shared objects: compiled here, gathered by the real agent, loaded by the real loader."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddtree_deploy import abi
from ddtree_deploy.agent import abi_facts

GCC = shutil.which("gcc")

# The two hosts of the accident, and torch's symbols by which one build differs from the other.
OLD, NEW = "2.9.1+cu128", "2.11.0+cu130"
STREAM = "_ZN3c1013MessageLogger6streamB5cxx11Ev"
CHECKED = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb"
GONE = "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib"
# A package whose import loads the shared object beside it, as an extension module would be.
LOADER = """
import ctypes
import os

import torch

__version__ = "{version}"
ctypes.CDLL(os.path.join(os.path.dirname(__file__), "{name}"), mode=os.RTLD_NOW)
"""

# A torch that preloads like the real one: the same function names, the same order of directories, three libraries.
TORCH_INIT = """
import ctypes
import glob
import os
import sys

from torch.version import cuda


def _get_cuda_dep_paths(path, lib_folder, lib_name):
    found = glob.glob(os.path.join(path, "nvidia", lib_folder, "lib", lib_name))
    major = cuda.split(".")[0]
    found += glob.glob(os.path.join(path, "nvidia", f"cu{major}", "lib", lib_name))
    return found + glob.glob(os.path.join(path, lib_folder, "lib", lib_name))


def _preload_cuda_lib(lib_folder, lib_name, required=True):
    for path in sys.path:
        found = _get_cuda_dep_paths(path, lib_folder, lib_name)
        if found:
            ctypes.CDLL(found[0])
            return
    if required:
        raise ValueError(lib_name)


def _preload_cuda_deps(err=None):
    cuda_libs = [
        ("cublas", "libcublas.so.*[0-9]"),
        ("cuda_nvrtc", "libnvrtc.so.*[0-9]"),
        ("cuda_runtime", "libcudart.so.*[0-9]"),
    ]
    if err is not None and not [name for _, name in cuda_libs if name.split(".")[0] in err.args[0]]:
        raise err
    for lib_folder, lib_name in cuda_libs:
        _preload_cuda_lib(lib_folder, lib_name)
    _preload_cuda_lib("nvtx", "libnvToolsExt.so.*[0-9]", required=False)


def _load_global_deps():
    path = os.path.join(os.path.dirname(__file__), "lib", "libtorch_global_deps.so")
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        try:
            with open("/proc/self/maps") as file:
                if "libcudart.so" not in file.read():
                    raise LookupError
            _preload_cuda_deps()
        except Exception:
            pass
    except OSError as error:
        _preload_cuda_deps(error)
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


_load_global_deps()
ctypes.CDLL(os.path.join(os.path.dirname(__file__), "_C.so"))
"""
LOAD = """
import ctypes, os, sys
sys.path.insert(0, sys.argv[1])
try:
    import torch
except ImportError:
    pass
ctypes.CDLL(os.path.join(sys.argv[1], sys.argv[2]), mode=os.RTLD_NOW)
"""


_BUILT: dict[str, bytes] = {}  # what gcc made of the same source, options and libraries before


class Env:
    """A site-packages under construction. `ld` is its LD_LIBRARY_PATH."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ld: list[Path] = []
        root.mkdir(parents=True, exist_ok=True)

    def so(
        self,
        path: str,
        defines: Sequence[str] = (),
        uses: Sequence[str] = (),
        links: Sequence[Path] = (),
        soname: str | None = None,
        rpath: str = "",
        runpath: str = "",
        versions: str = "",
        asm: str = "",
    ) -> Path:
        """Compile a shared object that defines and calls functions (no arguments); return its path."""
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        work = self.root.parent / "build" / self.root.name / path.replace("/", "_")
        work.mkdir(parents=True, exist_ok=True)
        source = work / "code.c"
        lines = [f'extern int u{i}(void) __asm__("{name}");' for i, name in enumerate(uses)]
        lines += [f'int d{i}(void) __asm__("{name}");\nint d{i}(void) {{ return {i}; }}' for i, name in enumerate(defines)]
        lines += ["int used(void);\nint used(void) { return " + " + ".join(["0", *(f"u{i}()" for i in range(len(uses)))]) + "; }"]
        source.write_text("\n".join([*lines, asm]) + "\n")
        argv = ["gcc", "-shared", "-fPIC", "-O1", "-nostartfiles", "-o", str(place), str(source), "-Wl,--no-as-needed"]
        argv += [f"-Wl,-soname,{soname}"] if soname else []
        argv += [f"-Wl,--disable-new-dtags,-rpath,{rpath}"] if rpath else []
        argv += [f"-Wl,--enable-new-dtags,-rpath,{runpath}"] if runpath else []
        if versions:
            script = work / "map"
            script.write_text(versions)
            argv.append(f"-Wl,--version-script={script}")
        argv += [str(link) for link in links] + ["-Wl,--allow-shlib-undefined"]
        key = repr((lines, asm, versions, soname, rpath, runpath, [link.read_bytes() for link in links]))
        if key not in _BUILT:
            subprocess.run(argv, check=True, capture_output=True, text=True)
            _BUILT[key] = place.read_bytes()
        place.write_bytes(_BUILT[key])
        return place

    def dist(self, name: str, version: str, files: Sequence[str] = (), requires: Sequence[str] = ()) -> None:
        """Write a dist-info whose RECORD names `files` (paths, or directories taken whole)."""
        info = self.root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        meta = [
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
            *(f"Requires-Dist: {item}" for item in requires),
        ]
        (info / "METADATA").write_text("\n".join(meta) + "\n\n")
        rows = []
        for item in files:
            place = self.root / item
            found = sorted(p for p in place.rglob("*") if p.is_file()) if place.is_dir() else [place]
            rows += [f"{p.relative_to(self.root)},,{p.stat().st_size if p.exists() else 1}" for p in found]
        rows += [f"{info.name}/{leaf},," for leaf in ("METADATA", "RECORD")]
        (info / "RECORD").write_text("\n".join(rows) + "\n")

    def cuda(self, major: int, old_layout: bool | None = None) -> None:
        """Install three CUDA libraries of a major, in the directories and under the names that NVIDIA's wheels use."""
        old = major < 13 if old_layout is None else old_layout
        suffix = f"-cu{major}" if major < 13 else ""
        for folder, stem in (("cublas", "libcublas"), ("cuda_nvrtc", "libnvrtc"), ("cuda_runtime", "libcudart")):
            directory = f"nvidia/{folder}/lib" if old else f"nvidia/cu{major}/lib"
            soname = f"{stem}.so.{major}"
            self.so(f"{directory}/{soname}", defines=[f"{stem[3:]}Go"], soname=soname, runpath="$ORIGIN")
            self.dist(f"nvidia-{folder.replace('_', '-')}{suffix}", f"{major}.0.1", [f"{directory}/{soname}"])

    def torch(self, version: str, exports: Sequence[str] = ("_ZN3c105ErrorEv",)) -> None:
        """Install a small torch for the CUDA in its local version (`2.11.0+cu130`)."""
        release, _, local = version.partition("+cu")
        major, minor = int(local[:2]), local[2:]
        dirs = ["cublas", "cuda_nvrtc", "cuda_runtime"] if major < 13 else [f"cu{major}"]
        rpath = ":".join([*(f"$ORIGIN/../../nvidia/{d}/lib" for d in dirs), "$ORIGIN"])
        runtime = next(self.root.glob(f"nvidia/*/lib/libcudart.so.{major}"))
        self.so("torch/lib/libc10.so", defines=exports, soname="libc10.so", rpath=rpath)
        self.so("torch/lib/libtorch_global_deps.so", soname="libtorch_global_deps.so", links=[runtime], rpath=rpath)
        core = [self.root / "torch/lib/libc10.so"]
        self.so("torch/lib/libtorch.so", soname="libtorch.so", links=[*core, runtime], rpath=rpath)
        self.so(
            "torch/_C.so",
            links=[*core, self.root / "torch/lib/libtorch.so"],
            rpath=rpath.replace("$ORIGIN/../../", "$ORIGIN/../") + ":$ORIGIN/lib",
        )
        (self.root / "torch/version.py").write_text(f"__version__ = '{version}'\ncuda = '{major}.{minor}'\n")
        (self.root / "torch/__init__.py").write_text(TORCH_INIT)
        self.dist("torch", release, ["torch"])

    def extension(self, name: str, dist: str, version: str, file: str, uses: Sequence[str], links: Sequence[Path]) -> None:
        """Install a package with one shared object that its import loads."""
        self.so(f"{name}/{file}", uses=uses, links=links)
        (self.root / name / "__init__.py").write_text(LOADER.format(name=file, version=version))
        self.dist(dist, version, [name])

    def cuda12_host(self) -> None:
        """Make the target of the accident: CUDA 12, an old kernel, an extension that nobody will touch, an old sglang."""
        self.cuda(12)
        self.torch(OLD, exports=["_ZN3c105ErrorEv", GONE])
        libs = [self.root / "torch/lib/libc10.so", next(self.root.glob("nvidia/*/lib/libnvrtc.so.12"))]
        self.extension("sgl_kernel", "sgl-kernel", "0.3.21", "common_ops.abi3.so", [GONE, "nvrtcGo"], libs)
        self.extension("deep_gemm", "deep-gemm", "1.0", "ops.so", ["nvrtcGo"], libs[1:])
        self.sglang("0.5.9", "torch==2.9.1", "sgl-kernel==0.3.21")

    def cuda13_host(self, deep_gemm: bool = True) -> None:
        """Make its source: CUDA 13, with or without an extension of its own for what the target has."""
        self.cuda(13)
        self.torch(NEW, exports=["_ZN3c105ErrorEv", STREAM, CHECKED])
        libs = [self.root / "torch/lib/libc10.so", next(self.root.glob("nvidia/*/lib/libnvrtc.so.13"))]
        self.extension("sgl_kernel", "sglang-kernel", "0.4.2", "common_ops.abi3.so", [STREAM, CHECKED, "nvrtcGo"], libs)
        if deep_gemm:
            self.extension("deep_gemm", "deep-gemm", "2.0", "ops.so", ["nvrtcGo"], libs[1:])
        self.sglang("0.5.11", "torch==2.11.0", "sglang-kernel==0.4.2")

    def sglang(self, version: str, *requires: str) -> None:
        (self.root / "sglang").mkdir()
        (self.root / "sglang/__init__.py").write_text(f"import sgl_kernel\n\n__version__ = '{version}'\n")
        self.dist("sglang", version, ["sglang"], requires)

    def lay_over(self, other: Env, parts: Sequence[str] = ("torch", "nvidia", "sgl_kernel")) -> None:
        """Do what the team did by hand: copy directories of another environment over this one's, `cp -r`."""
        for part in parts:
            shutil.copytree(other.root / part, self.root / part, dirs_exist_ok=True)

    def site(self, name: str, others: Sequence[Env] = (), env: Mapping[str, str] | None = None) -> abi.Site:
        """Gather the facts with the agent's code, through JSON as over the wire."""
        wanted = abi.wanted([other.site("other") for other in others])
        facts = abi_facts.collect(str(self.root), sys.executable, self._env(env), wanted)
        return abi.load(json.loads(json.dumps(facts)), name)

    def _env(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": ":".join(str(path) for path in self.ld), "PATH": "/nowhere", **(env or {})}

    def loads(self, path: str) -> str:
        """Really load a file after `import torch`, in a process of its own; return `ok` or the loader's words."""
        argv = [sys.executable, "-I", "-S", "-B", "-c", LOAD, str(self.root), path]
        done = subprocess.run(argv, env=self._env(), capture_output=True, text=True, timeout=60, check=False)
        if done.returncode < 0:
            return f"signal {-done.returncode}"
        return "ok" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]

    def overlay(self, other: Env, verdict: abi.Verdict) -> None:
        """Do what a push would: remove what goes, copy what moves, by RECORD."""
        gone = {(name, version) for name, version, _why in verdict.removed}
        for dist in self.site("now").tree.dists:
            if (dist.name, dist.version) in gone:
                for path in dist.owns:
                    (self.root / path).unlink(missing_ok=True)
                shutil.rmtree(self.root / dist.directory)
        for dist in other.site("moved").tree.dists:
            if dist.key in verdict.moved:
                for path in sorted(dist.owns):
                    (self.root / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(other.root / path, self.root / path)
