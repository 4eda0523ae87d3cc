"""What a host says of itself, against what the interpreter and the kernel say."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ddtree_deploy.agent import facts
from ddtree_deploy.agent.failure import Failure

from .conftest import Place


def test_the_facts_of_an_interpreter_are_those_that_it_has_itself(place: Place) -> None:
    known = facts.python_facts(place.python)
    assert known["version"] == platform.python_version()
    assert known["implementation"] == sys.implementation.name
    assert known["cache_tag"] == sys.implementation.cache_tag
    assert known["ext_suffix"] == sysconfig.get_config_var("EXT_SUFFIX")
    assert known["machine"] == platform.machine()
    assert known["libc"] == " ".join(platform.libc_ver())
    assert known["executable"] == os.path.realpath(place.python)
    assert str(place.venv / known["purelib"]) == str(place.live)
    assert (known["debug"], known["free_threaded"], known["abiflags"]) == (False, False, sys.abiflags)


def test_a_venv_of_debians_python_keeps_packages_in_site_packages() -> None:
    if not os.path.exists("/usr/bin/python3"):
        pytest.skip("needs root and /usr/bin/python3")
    assert facts.python_facts("/usr/bin/python3")["purelib"].endswith("/site-packages")


def test_an_interpreter_that_does_not_run_says_why(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to("/no/such/python3.12")
    with pytest.raises(Failure, match=r"it is a link to `/no/such/python3\.12`, which is gone"):
        facts.python_facts(str(tmp_path / "gone"))
    with pytest.raises(Failure, match="there is no such file"):
        facts.python_facts(str(tmp_path / "nothing"))
    (tmp_path / "text").write_text("")
    with pytest.raises(Failure, match="Permission denied"):
        facts.python_facts(str(tmp_path / "text"))
    (tmp_path / "shim").write_text("#!/bin/sh\necho 'shim: version 3.12 is not installed' >&2\nexit 127\n")
    (tmp_path / "shim").chmod(0o755)
    with pytest.raises(Failure, match=r"shim: version 3\.12 is not installed"):
        facts.python_facts(str(tmp_path / "shim"))
    (tmp_path / "talks").write_text("#!/bin/sh\necho hello\n")
    (tmp_path / "talks").chmod(0o755)
    with pytest.raises(Failure, match="its answer is not ours"):
        facts.python_facts(str(tmp_path / "talks"))


def test_host_facts_are_the_same_twice(place: Place) -> None:
    known = facts.host_facts(str(place.venv))
    assert known == facts.host_facts(str(place.venv))
    assert known["kernel"] == os.uname().release
    assert known["glibc"] == platform.libc_ver()[1]


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        'test "$1" = --query-gpu=name,compute_cap,memory.total,driver_version || exit 2\n'
        "echo 'NVIDIA RTX PRO 6000 Blackwell, 12.0, 97887, 580.95.05'\n"
        "echo 'NVIDIA RTX PRO 6000 Blackwell, 12.0, [N/A], 580.95.05'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    known = facts.host_facts("")
    assert known["driver"] == "580.95.05"
    assert known["gpus"] == [
        {"name": "NVIDIA RTX PRO 6000 Blackwell", "compute_capability": "12.0", "memory_mib": 97887},
        {"name": "NVIDIA RTX PRO 6000 Blackwell", "compute_capability": "12.0", "memory_mib": 0},
    ]


def test_nvcc_is_the_one_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvcc"
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.5, V11.5.119'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert facts.host_facts("")["nvcc"] == {"path": str(tool), "release": "11.5"}
    monkeypatch.setenv("PATH", "/nowhere")
    assert facts.host_facts("")["nvcc"] is None


def test_the_space_of_a_path_that_is_not_there_yet_is_its_parents(tmp_path: Path) -> None:
    here = facts.space(str(tmp_path))
    assert here["free_bytes"] > 0
    assert here["free_inodes"] > 0
    assert facts.space(str(tmp_path / "not" / "yet"))["mount"] == here["mount"]
    assert not here["read_only"]


def _may_mount() -> bool:
    return (
        os.geteuid() == 0
        and subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not _may_mount(), reason="needs root and mount namespaces")
def test_the_nearest_mount_holds_and_its_options_are_read(tmp_path: Path) -> None:
    """In a mount namespace of its own: a small noexec tmpfs on a path with a space, and another over the first."""
    point = tmp_path / "a point"
    point.mkdir()
    code = (
        f"import sys; sys.path.insert(0, {str(Path(facts.__file__).parents[2])!r})\n"
        "from ddtree_deploy.agent import facts, venvs\nimport json\n"
        f"print(json.dumps([facts.space({str(point / 'below')!r}), venvs.inspect({str(tmp_path)!r})['nested_mounts']]))"
    )
    script = (
        f"mount -t tmpfs -o size=1m,nr_inodes=50,noexec tmpfs '{point}' && mkdir '{point}/below' && "
        f'exec {sys.executable} -I -S -c "$1"'
    )
    done = subprocess.run(["unshare", "-m", "sh", "-c", script, "sh", code], check=True, capture_output=True, text=True)
    space, nested = json.loads(done.stdout)
    assert space["mount"] == str(point)
    assert space["fs"] == "tmpfs"
    assert space["noexec"]
    assert not space["nfs"]
    assert space["free_bytes"] <= 1 << 20
    assert space["free_inodes"] < 50
    assert nested == [str(point)]
