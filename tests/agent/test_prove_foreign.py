"""Imports that load files of another tree, or one library twice: they work now, and break when that tree goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddtree_deploy.agent import probe
from ddtree_deploy.agent.main import Session

from .conftest import Build, Place, prove_imports, write_sources


def test_libraries_of_another_tree_are_found(session: Session, place: Place, build: Build) -> None:
    """An extension whose RPATH leads into the live site-packages imports well, and breaks when that tree goes."""
    (place.live / "lib").mkdir()
    helper = build(place.live / "lib" / "libhelper.so", "int helper(void) { return 1; }", "-Wl,-soname,libhelper.so")
    (place.root / "strays").mkdir()
    (place.root / "strays" / "__init__.py").write_text(
        "import ctypes, os\nctypes.CDLL(os.path.join(os.path.dirname(__file__), 'ext.so'))\n"
    )
    build(
        place.root / "strays" / "ext.so",
        "int helper(void); int ext(void) { return helper(); }",
        f"-L{place.live}/lib",
        "-lhelper",
        f"-Wl,-rpath,{place.live}/lib",
    )
    (proof,) = prove_imports(session, place, "strays")
    assert not proof["ok"]
    assert proof["error"] == "it loaded files of another tree, or one library twice"
    assert proof["foreign_libraries"] == [str(helper)]


def test_a_library_path_into_the_live_tree_means_the_staged_one(session: Session, place: Place, build: Build) -> None:
    """A service often has LD_LIBRARY_PATH below its own site-packages; before the switch that still is the old tree."""
    for tree, number in ((place.live, 1), (place.root, 2)):
        (tree / "nvidia" / "lib").mkdir(parents=True)
        build(tree / "nvidia" / "lib" / "libnumber.so", f"int number(void) {{ return {number}; }}")
    write_sources(place.root, loads="import ctypes\nassert ctypes.CDLL('libnumber.so').number() == 2\n")
    env = {"LD_LIBRARY_PATH": f"/usr/lib:{place.live}/nvidia/lib", "CUDA_HOME": f"{place.live}/nvidia", "OMP_X": "a:b"}
    (proof,) = prove_imports(session, place, "loads", env=env)
    assert proof["ok"], proof


def test_modules_of_another_tree_are_found(session: Session, place: Place) -> None:
    (place.live / "old.py").write_text("")
    write_sources(place.root, strays=f"import sys\nsys.path.append({str(place.live)!r})\nimport old\n")
    (proof,) = prove_imports(session, place, "strays")
    assert not proof["ok"]
    assert proof["foreign_libraries"] == [str(place.live / "old.py")]


def test_two_cuda_runtimes_in_one_process_are_found(session: Session, place: Place, build: Build) -> None:
    for number in (12, 13):
        directory = place.root / "nvidia" / f"cu{number}" / "lib"
        directory.mkdir(parents=True)
        build(directory / f"libcudart.so.{number}", f"int cudart{number}(void) {{ return {number}; }}")
    write_sources(
        place.root,
        mixed="import ctypes, os\nbase = os.path.dirname(__file__)\n"
        "for n in (12, 13):\n    ctypes.CDLL(os.path.join(base, 'nvidia/cu%d/lib/libcudart.so.%d' % (n, n)))\n",
    )
    (proof,) = prove_imports(session, place, "mixed")
    assert not proof["ok"]
    (line,) = proof["foreign_libraries"]
    assert line.startswith("libcudart twice: ")
    assert "libcudart.so.12" in line
    assert "libcudart.so.13" in line


@pytest.mark.parametrize(("major", "fine"), [(13, True), (12, False)])
def test_the_runtime_of_the_machines_toolkit_may_come_too(
    session: Session, place: Place, build: Build, tmp_path: Path, major: int, fine: bool
) -> None:
    """sgl_kernel loads $CUDA_HOME/lib64/libcudart.so.N by its path, beside the one that torch brought."""
    ours = place.root / "nvidia/cu13/lib/libcudart.so.13"
    theirs = tmp_path / f"cuda/lib64/libcudart.so.{major}"
    for path in (ours, theirs):
        path.parent.mkdir(parents=True)
        build(path, f"int of_{path.parent.name}(void) {{ return 1; }}", f"-Wl,-soname,{path.name}")
    write_sources(place.root, both=f"import ctypes\nfor path in {str(ours)!r}, {str(theirs)!r}:\n    ctypes.CDLL(path)\n")
    (proof,) = prove_imports(session, place, "both")
    assert proof["ok"] is fine
    assert bool(proof["foreign_libraries"]) is not fine


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["/v/.ddtree/generations/2/site-packages/torch/lib/libc10.so"], []),
        (["/v/.ddtree/generations/1/site-packages/torch/lib/libc10.so"], 1),
        (["/v/lib/python3.12/site-packages/torch/lib/libc10.so"], 1),
        (["/w/lib/python3.12/site-packages/torch/lib/libc10.so"], 1),
        (["/usr/lib/python3/dist-packages/yaml/_yaml.so"], 1),
        (["/usr/lib/x86_64-linux-gnu/libstdc++.so.6.0.30", "/usr/lib/python3.12/lib-dynload/_json.so"], []),
        (["/v/.ddtree/generations/1/site-packages/gone.so (deleted)"], 1),
        (["/memfd:libffi (deleted)", "/dev/zero (deleted)"], []),
        (["/usr/local/cuda/lib64/libcudart.so.12.8.90", "/v/.ddtree/generations/2/site-packages/x/libcudart.so.12"], []),
        (["/usr/local/cuda/lib64/libcudart.so.12.8.90", "/v/.ddtree/generations/2/site-packages/x/libcudart.so.13"], 1),
        (["/usr/local/cuda/lib64/libcudnn.so.9", "/v/.ddtree/generations/2/site-packages/x/libcudnn.so.9"], 1),
        (
            [
                "/a/libcudnn.so.9",
                "/a/libcudnn_ops.so.9",
                "/a/libcudnn_graph.so.9",
                "/a/libnccl.so.2",
                "/b/libnccl-net.so",
            ],
            [],
        ),
        (["/a/libnccl.so.2", "/b/libnccl-1a2b3c4d.so.2"], 1),
    ],
)
def test_which_files_are_foreign(files: list[str], expected: list[str] | int) -> None:
    root, live = "/v/.ddtree/generations/2/site-packages", "/v/lib/python3.12/site-packages"
    found = probe.foreign(files, root, live, "/v")
    assert len(found) == (expected if isinstance(expected, int) else 0)
    if files == ["/usr/lib/python3/dist-packages/yaml/_yaml.so"]:
        assert probe.foreign(files, root, live, "/v", allow_system=True) == []
