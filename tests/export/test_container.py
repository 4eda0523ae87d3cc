"""An image with a base, used: its layers unpacked, numpy imported by the base's interpreter inside; by container tools where they are."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from ddtree_deploy.export.oci import ExportOptions, export_oci
from ddtree_deploy.snapshot import take
from ddtree_deploy.store import Store
from tests.export.conftest import make_base, read_image, unpack
from tests.faults.harness import ROOT_ONLY
from tests.fixtures.venvs import BASE_PYTHON, make_venv, site
from tests.fixtures.world import local

pytestmark = [pytest.mark.slow, ROOT_ONLY]

#: umoci unpacks and runc runs where both are installed; the plain way is there always.
WAYS = ["chroot", *(["runc"] if shutil.which("umoci") and shutil.which("runc") else [])]
CODE = "import numpy; print(numpy.__file__, numpy.linalg.norm(numpy.ones(4)))"


def _libraries(path: Path) -> list[Path]:
    """Return the libraries that a binary needs (ldd(1)), its loader among them."""
    told = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
    return [Path(found) for found in re.findall(r"(/\S+) \(0x", told)]


def _base_files() -> dict[str, bytes]:
    """Return this machine's interpreter, its standard library, and what both need: a whole file system, in small."""
    stdlib = Path(sysconfig.get_path("stdlib", vars={"base": os.fspath(BASE_PYTHON.parents[1])}))
    left_out = {"__pycache__", "test", "site-packages", "dist-packages", "idlelib", "lib2to3", "ensurepip", "tkinter", "turtledemo"}
    modules = [path for path in stdlib.rglob("*") if path.suffix in (".py", ".so") and path.is_file() and not left_out & set(path.parts)]
    binaries = [BASE_PYTHON, Path("/bin/sh"), Path("/usr/bin/env")]
    extensions = [path for path in modules if ".so" in path.suffixes]
    numpy = [Path(path.locate()) for path in importlib.metadata.files("numpy") or () if path.name.endswith(".so")]
    needed = {library for path in [*binaries, *extensions, *numpy] for library in _libraries(path) if "site-packages" not in str(library)}
    files = {os.fspath(path).lstrip("/"): path.read_bytes() for path in [*binaries, *modules, *sorted(needed)]}
    return files | {"etc/passwd": b"app:x:0:0::/:/bin/sh\n"}


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layout with `app`: numpy of this environment on a base that has this machine's interpreter."""
    root = tmp_path_factory.mktemp("container")
    venv = make_venv(root / "venv")
    for path in importlib.metadata.files("numpy") or ():
        if ".." not in path.parts:
            target = site(venv) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path.locate(), target)
    store = Store.open(root / "home")
    snapshot = take(local(venv), store, probe=False, allow_drift=True).ref.id
    base = make_base(root / "base", _base_files())
    export_oci(store, snapshot, ExportOptions(root / "img", "app", base=os.fspath(base)))
    return root / "img"


@pytest.mark.parametrize("way", WAYS)
def test_the_set_imports_in_a_container_of_the_image(layout: Path, tmp_path: Path, way: str) -> None:
    python = os.fspath(BASE_PYTHON)
    if way == "chroot":
        read = read_image(layout, "app")
        env = dict(item.split("=", 1) for item in read.config["config"]["Env"])
        argv: list[str] = ["/usr/sbin/chroot", os.fspath(unpack(read, tmp_path / "root")), python, "-c", CODE]
        ran = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    else:
        subprocess.run(["umoci", "unpack", "--image", f"{layout}:app", tmp_path / "bundle"], check=True, capture_output=True)
        config = tmp_path / "bundle/config.json"
        wanted = json.loads(config.read_text())
        assert "PYTHONPATH=/opt/ddtree/site-packages:/app" in wanted["process"]["env"]
        wanted["process"] |= {"args": [python, "-c", CODE], "terminal": False}
        config.write_text(json.dumps(wanted))
        name = f"ddtree-export-{os.getpid()}"
        argv = ["runc", "--root", os.fspath(tmp_path / "runc"), "run", "--bundle", os.fspath(tmp_path / "bundle"), name]
        ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("/opt/ddtree/site-packages/numpy/__init__.py 2.0\n", 0), ran.stderr


def test_skopeo_reads_the_same_digest(layout: Path) -> None:
    entries = json.loads((layout / "index.json").read_text())["manifests"]
    read = read_image(layout, "app")
    assert len(read.tars) == len(read.manifest["layers"]) >= 2
    if shutil.which("skopeo"):
        told = json.loads(subprocess.run(["skopeo", "inspect", f"oci:{layout}:app"], capture_output=True, check=True).stdout)
        assert told["Digest"] == entries[-1]["digest"]
        assert told["Layers"] == [layer["digest"] for layer in read.manifest["layers"]]
