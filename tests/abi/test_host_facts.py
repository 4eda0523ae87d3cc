"""What the agent gathers: from files of known content, from stub tools, and with every Python that it must run on."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_deploy import abi
from ddtree_deploy.agent import abi_facts, host_facts, ld_so, torch_preload
from tests.abi.lab import TORCH_INIT

REPO = Path(__file__).resolve().parents[2]
MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /tmp rw,nosuid,noexec shared:5 - tmpfs tmpfs rw
31 22 0:41 / /home/a\040b rw,relatime - nfs4 server:/home rw
32 31 0:42 / /home/a\040b/fast rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "fs", "noexec"),
    [("/srv/x", "ext4", False), ("/tmp/x/y", "tmpfs", True), ("/home/a b/.triton", "nfs4", False),
     ("/home/a b/fast/x", "xfs", False), ("/tmpfoo", "ext4", False)],
)  # fmt: skip
def test_the_mount_that_holds_a_path(path: str, fs: str, noexec: bool) -> None:
    mount = host_facts.mount_of(path, MOUNTS)
    assert (mount["fs"], "noexec" in mount["options"]) == (fs, noexec)


def stub(directory: Path, name: str, text: str, code: int = 0) -> None:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\ncat <<'EOF'\n{text}\nEOF\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_gpus_from_nvidia_smi_where_nvml_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ld_so, "find", lambda soname: None)
    rows = "0, NVIDIA RTX PRO 6000, 12.0, 97887, 580.95.05\n1, NVIDIA H200, 9.0, 143771, 580.95.05"
    stub(tmp_path / "bin", "nvidia-smi", rows)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    found = host_facts.gpus()
    assert [(gpu["name"], gpu["cc"]) for gpu in found["list"]] == [
        ("NVIDIA RTX PRO 6000", "12.0"),
        ("NVIDIA H200", "9.0"),
    ]
    assert (found["driver"], found["from"]) == ("580.95.05", "nvidia-smi")


def test_a_driver_that_does_not_answer_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ld_so, "find", lambda soname: None)
    stub(tmp_path / "bin", "nvidia-smi", "Failed to initialize NVML: Driver/library version mismatch", 18)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    found = host_facts.gpus()
    assert found["list"] == [] and "version mismatch" in found["error"]


def test_the_nvcc_that_a_jit_would_pick(tmp_path: Path) -> None:
    """CUDA_HOME wins over PATH, as in torch's and FlashInfer's builders."""
    stub(tmp_path / "distro", "nvcc", "Cuda compilation tools, release 11.5, V11.5.119")
    (tmp_path / "toolkit").mkdir()
    stub(tmp_path / "toolkit/bin", "nvcc", "Cuda compilation tools, release 13.0, V13.0.48")
    path = f"{tmp_path / 'distro'}:/usr/bin:/bin"
    assert host_facts.tools({"PATH": path})["nvcc"]["version"] == "11.5"
    assert host_facts.tools({"PATH": path, "CUDA_HOME": str(tmp_path / "toolkit")})["nvcc"]["version"] == "13.0"


def test_caches_of_the_service_user(tmp_path: Path) -> None:
    (tmp_path / ".triton/cache/abc").mkdir(parents=True)
    (tmp_path / ".triton/cache/abc/k.cubin").write_bytes(b"x")
    (tmp_path / "elsewhere/.cache/flashinfer/0.6").mkdir(parents=True)
    (tmp_path / "elsewhere/.cache/flashinfer/0.6/bad.so").write_bytes(b"\x7fELF")
    found = host_facts.caches({"FLASHINFER_WORKSPACE_BASE": str(tmp_path / "elsewhere")}, str(tmp_path))
    by_kind = {row["kind"]: row for row in found}
    assert by_kind["triton"]["files"] == 1
    (broken,) = by_kind["flashinfer"]["objects"]
    assert broken["path"] == "0.6/bad.so" and broken["problems"]


def test_ld_so_cache_is_read_as_ldconfig_prints_it() -> None:
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    if not os.path.exists(ldconfig) or not os.path.exists("/etc/ld.so.cache"):
        pytest.skip("no ldconfig cache on this machine")
    text = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=True).stdout
    printed: dict[str, list[str]] = {}
    for line in text.splitlines()[1:]:
        name, _, target = line.strip().partition(" => ")
        if target and "64" in name and "hwcap" not in name:
            printed.setdefault(name.split(" ")[0], []).append(target)
    ours = ld_so.cache()
    assert ours and set(ours) == set(printed)
    assert all(target in printed[name] for name, target in ours.items())


@pytest.mark.parametrize(
    "content",
    [b"", b"glibc-ld.so.cache1.1", b"glibc-ld.so.cache1.1" + struct.pack("<I", 1 << 31) + b"\xff" * 60],
    ids=["empty", "short", "liar"],
)
def test_a_broken_ld_so_cache_is_empty_or_short(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "cache").write_bytes(content)
    assert isinstance(ld_so.cache(str(tmp_path / "cache")), dict)
    assert ld_so.cache(str(tmp_path / "absent")) == {}


# --- torch's preload list --------------------------------------------------------------------------------------------


def preload_of(tmp_path: Path, text: str) -> dict[str, object] | None:
    (tmp_path / "torch").mkdir(exist_ok=True)
    (tmp_path / "torch/__init__.py").write_text(text)
    return torch_preload.read(str(tmp_path))  # type: ignore[no-any-return]


def test_order_layouts_and_required_are_read(tmp_path: Path) -> None:
    found = preload_of(tmp_path, TORCH_INIT)
    assert found is not None
    assert found["layouts"] == ["nvidia/{folder}/lib", "nvidia/cu{major}/lib", "{folder}/lib"]
    order = [
        ["cublas", "libcublas.so.*[0-9]", True],
        ["cuda_nvrtc", "libnvrtc.so.*[0-9]", True],
        ["cuda_runtime", "libcudart.so.*[0-9]", True],
    ]
    assert found["always"] == found["on_error"] == [*order, ["nvtx", "libnvToolsExt.so.*[0-9]", False]]


def test_a_best_effort_call_makes_every_item_optional(tmp_path: Path) -> None:
    text = TORCH_INIT.replace("def _preload_cuda_deps(err=None):", "def _preload_cuda_deps(err=None, required=True):")
    text = text.replace(
        "_preload_cuda_lib(lib_folder, lib_name)\n    _pre",
        "_preload_cuda_lib(lib_folder, lib_name, required=required)\n    _pre",
    )
    text = text.replace("            _preload_cuda_deps()", "            _preload_cuda_deps(required=False)")
    found = preload_of(tmp_path, text)
    assert found is not None
    assert {item[2] for item in found["always"]} == {False}  # type: ignore[attr-defined]
    assert {item[2] for item in found["on_error"]} == {True, False}  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["", "def broken(:\n", "x = 1\n", TORCH_INIT.replace("_load_global_deps", "_start_up")])
def test_what_is_not_recognised_is_none(tmp_path: Path, text: str) -> None:
    assert preload_of(tmp_path, text) is None


def test_an_unknown_preloader_is_a_warning() -> None:
    site = {
        "tree": {
            "torch": {"version": "3.0.0+cu140", "cuda": "14.0", "preload": None},
            "dists": [{"name": "torch", "version": "3.0.0"}],
        }
    }
    verdict = abi.judge(abi.load(site, "a"), abi.load({}, "b"), ["torch"])
    assert verdict.level("K1") == "warn"


def test_the_torch_of_this_venv_is_recognised() -> None:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent.parent
    found = torch_preload.read(str(root))
    assert found is not None and len(found["on_error"]) >= 10


# --- the Pythons of the targets --------------------------------------------------------------------------------------


def pythons() -> list[str]:
    found = [sys.executable]
    for minor in range(9, 15):
        found += [str(path) for path in sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))]
        found += [path for path in [shutil.which(f"python3.{minor}")] if path and "shims" not in path]
    return list(dict.fromkeys(found))


GATHER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from ddtree_deploy.agent import abi_facts
facts = abi_facts.collect(sys.argv[2])
known = getattr(sys, "stdlib_module_names", None)
foreign = sorted(n for n in sys.modules if n.split(".")[0] not in known) if known else []
print(json.dumps([facts, foreign]))
"""


@pytest.mark.parametrize("python", pythons(), ids=lambda path: path.replace(str(Path.home()), "~"))
def test_facts_are_gathered_with_the_standard_library_alone(python: str, tmp_path: Path) -> None:
    probe = subprocess.run([python, "-c", "import sys; print(sys.version_info >= (3, 9))"], capture_output=True, text=True, check=False)
    if probe.stdout.strip() != "True":
        pytest.skip(f"{python} does not run, or is older than 3.9")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/libm.so").symlink_to(next(p for p in Path("/").glob("*lib*/x86_64-linux-gnu/libm.so.6") if p.exists()))
    shutil.copy(os.path.realpath(sys.executable), tmp_path / "pkg/tool.so")
    argv = [python, "-I", "-S", "-B", "-c", GATHER, str(REPO), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    facts, foreign = json.loads(done.stdout)
    assert [name for name in foreign if not name.startswith(("ddtree_deploy", "__main__"))] == []
    site = abi.load(facts, "here")
    assert site.tree.objects["pkg/tool.so"].kind in ("dyn", "exec")
    assert ["pkg/libm.so", os.readlink(tmp_path / "pkg/libm.so"), True] in site.tree.raw["outside_links"]
    assert site.system.interpreter and site.host.python_tag


def test_what_a_link_out_of_the_tree_is_and_who_owns_it(tmp_path: Path) -> None:
    """One that resolves is there for its owner; one that dangles is missing; one inside the tree is an ordinary file."""
    site, far = tmp_path / "site", tmp_path / "far.py"
    far.write_text("x = 1\n")
    (site / "k").mkdir(parents=True)
    (site / "k/a.py").symlink_to(far)
    (site / "k/b.py").symlink_to(tmp_path / "nowhere")
    (site / "k/c.py").write_text("y = 2\n")
    (site / "k/d.py").symlink_to("c.py")
    (site / "k-1.dist-info").mkdir()
    (site / "k-1.dist-info/METADATA").write_text("Name: k\nVersion: 1\n\n")
    (site / "k-1.dist-info/RECORD").write_text("k/a.py,,6\nk/b.py,,6\nk/c.py,,9\n\"k/./d.py\",,6\n../../bin/k,,1\nk/x.pyc,,\n")
    facts = abi_facts.tree(str(site))
    assert facts["outside_links"] == [["k/a.py", str(far), True], ["k/b.py", str(tmp_path / "nowhere"), False]]
    (dist,) = facts["dists"]
    assert sorted(dist["owns"]) == ["k/a.py", "k/c.py", "k/d.py"]
    assert dist["missing"] == {"count": 1, "examples": ["k/b.py"]} and dist["resized"] == {"count": 1, "examples": ["k/c.py"]}


def test_the_triton_that_filled_a_cache_is_read_from_its_kernels(tmp_path: Path) -> None:
    for name, version in (("A", "3.5.1"), ("B", "3.6.0")):
        (tmp_path / "t" / name).mkdir(parents=True)
        (tmp_path / "t" / name / "add.json").write_text(json.dumps({"hash": name, "triton_version": version}))
        (tmp_path / "t" / name / "__grp__add.json").write_text('{"triton_version": "0"}')
    (found,) = host_facts.caches({"TRITON_CACHE_DIR": str(tmp_path / "t")}, str(tmp_path / "home"))
    assert (found["kind"], found["files"], found["triton"]) == ("triton", 4, ["3.5.1", "3.6.0"])


def test_facts_go_through_json_unchanged() -> None:
    facts = abi_facts.collect(str(REPO / "tests"), env={"PATH": "/nowhere"})
    assert json.loads(json.dumps(facts)) == facts
