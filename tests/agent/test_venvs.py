"""What a directory is as a venv, and a venv made with an interpreter that is found."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from ddtree_deploy.agent import facts, venvs
from ddtree_deploy.agent.failure import Failure

from .conftest import Place

MINOR = ".".join(map(str, sys.version_info[:2]))
BASE = getattr(sys, "_base_executable", sys.executable)


def test_an_ordinary_venv(place: Place) -> None:
    shutil.rmtree(place.venv / ".ddtree")
    seen = venvs.inspect(str(place.venv))
    assert seen["exists"]
    assert seen["is_venv"]
    assert not seen["conda"]
    assert seen["python"] == place.python
    assert seen["dangling"] == ""
    assert seen["site"] == f"lib/python{MINOR}/site-packages"
    assert seen["lib64"] == "link"
    assert seen["generation"] is None
    assert seen["home"] == os.path.dirname(BASE)
    assert seen["nested_mounts"] == []


def test_nothing_there(tmp_path: Path) -> None:
    seen = venvs.inspect(str(tmp_path / "none"))
    assert (seen["exists"], seen["is_venv"], seen["python"], seen["site"]) == (False, False, "", "")


def test_the_generation_that_is_live_is_read_from_the_link(place: Place) -> None:
    place.live.rmdir()
    place.live.symlink_to("../../.ddtree/generations/1/site-packages")
    assert venvs.inspect(str(place.venv))["generation"] == 1
    place.live.unlink()
    place.live.symlink_to("/somewhere/else")
    assert venvs.inspect(str(place.venv))["generation"] is None


def test_an_interpreter_that_is_gone_is_named(place: Place, tmp_path: Path) -> None:
    """A venv of uv's that was copied to a host without uv's Python (its link dangles)."""
    python = place.venv / "bin" / "python"
    python.unlink()
    python.symlink_to("python-uv")
    (place.venv / "bin" / "python-uv").symlink_to(tmp_path / "uv" / "cpython-3.12.3" / "bin" / "python3.12")
    seen = venvs.inspect(str(place.venv))
    assert seen["python"] == str(python)
    assert seen["dangling"] == str(tmp_path / "uv" / "cpython-3.12.3" / "bin" / "python3.12")
    (place.venv / "bin" / "python-uv").unlink()
    (place.venv / "bin" / "python-uv").symlink_to("python")
    assert venvs.inspect(str(place.venv))["dangling"] != ""


def test_of_several_site_packages_the_one_of_the_version_is_taken(place: Place) -> None:
    (place.venv / "lib" / "python3.8" / "site-packages").mkdir(parents=True)
    assert venvs.inspect(str(place.venv))["site"] == f"lib/python{MINOR}/site-packages"
    (place.venv / "pyvenv.cfg").write_text("home = /usr/bin\n")
    seen = venvs.inspect(str(place.venv))
    assert seen["site"] == ""
    assert len(seen["sites"]) == 2


def test_a_conda_environment_and_one_with_system_packages(place: Place) -> None:
    (place.venv / "conda-meta").mkdir()
    config = place.venv / "pyvenv.cfg"
    config.write_text(config.read_text().replace("= false", "= true"))
    seen = venvs.inspect(str(place.venv))
    assert seen["conda"]
    assert seen["system_site"]


def test_a_venv_is_made_with_the_interpreter_that_is_found(tmp_path: Path) -> None:
    making = venvs.create(str(tmp_path / "deep" / "venv"), MINOR, [BASE])
    known = making.python
    assert known["version"].startswith(MINOR + ".")
    seen = venvs.inspect(str(tmp_path / "deep" / "venv"))
    assert seen["is_venv"] and not seen["exists"]
    with pytest.raises(Failure, match="is being made by another run"):
        venvs.create(str(tmp_path / "deep" / "venv"), MINOR, [BASE])
    making.keep()
    assert venvs.inspect(str(tmp_path / "deep" / "venv"))["exists"]
    assert seen["site"] == known["purelib"]
    assert os.listdir(tmp_path / "deep" / "venv" / known["purelib"]) == []


def test_an_empty_directory_may_become_a_venv_and_a_full_one_may_not(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    venvs.create(str(tmp_path / "venv"), MINOR, [BASE]).remove()
    assert list((tmp_path / "venv").iterdir()) == []
    venvs.create(str(tmp_path / "venv"), MINOR, [BASE]).keep()
    with pytest.raises(Failure, match="is there already"):
        venvs.create(str(tmp_path / "venv"), MINOR, [BASE])
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(Failure, match="is there already"):
        venvs.create(str(tmp_path / "link"), MINOR, [BASE])


def test_interpreters_are_found_where_people_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter of a minor version that only pyenv, uv, or conda has; a shim that does not run is passed over."""
    monkeypatch.setenv("PATH", f"{tmp_path}/shims:/nowhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    shim = tmp_path / "shims" / f"python{MINOR}"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    real = facts.python_facts(BASE)["executable"]
    for place in (
        f".pyenv/versions/{MINOR}.1/bin",
        f".local/share/uv/python/cpython-{MINOR}.1-linux/bin",
        "miniforge3/envs/a/bin",
    ):
        directory = tmp_path / place
        directory.mkdir(parents=True)
        # A script, not a link: an interpreter that is reached by a link to another place is that other place.
        script = directory / f"python{MINOR}"
        script.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
        script.chmod(0o755)
        assert str(script) in list(venvs.interpreters(MINOR))
        script_found = venvs.find(MINOR)
        assert script_found is not None
        script.unlink()


def test_no_interpreter_of_that_version_is_a_failure_that_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"the host has no CPython 3\.2 to make a venv of"):
        venvs.create(str(tmp_path / "venv"), "3.2", [BASE])
    assert not (tmp_path / "venv").exists()


def test_a_venv_that_can_not_be_made_is_taken_away_again(tmp_path: Path) -> None:
    """An interpreter that runs, and whose venv module fails half way."""
    broken = tmp_path / "python"
    broken.write_text(
        f'#!/bin/sh\nif [ "$3" = venv ]; then mkdir -p "$5/bin"; echo "it broke" >&2; exit 1; fi\nexec {BASE} "$@"\n'
    )
    broken.chmod(0o755)
    with pytest.raises(Failure, match="could not make the venv") as failure:
        venvs.create(str(tmp_path / "venv"), MINOR, [str(broken)])
    assert failure.value.causes == ["it broke"]
    assert not (tmp_path / "venv").exists()
    (tmp_path / "venv").mkdir()
    with pytest.raises(Failure):
        venvs.create(str(tmp_path / "venv"), MINOR, [str(broken)])
    assert os.listdir(tmp_path / "venv") == []
