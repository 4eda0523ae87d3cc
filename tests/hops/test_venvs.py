"""The search that the user did by hand: which environments there are, and which of them can import what a server needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddtree_deploy.agent.main import Session as Agent
from ddtree_deploy.agent.search import environments, find
from ddtree_deploy.errors import UsageProblem
from ddtree_deploy.hosts.base import Host
from ddtree_deploy.venvs import Environment, Import, Search, checks, modules
from tests.fixtures.venvs import Dist, make_venv, package


@pytest.fixture
def agent() -> Iterator[Agent]:
    null = os.open(os.devnull, os.O_RDWR)
    yield Agent(null, null, True, -1)
    os.close(null)


def tried(agent: Agent, venv: Path, module: str, seconds: float = 30.0) -> dict[str, str]:
    return environments._try(agent, str(venv / "bin/python"), module, seconds)


def test_environments_are_found_and_what_lies_inside_them_is_not(tmp_path: Path) -> None:
    make_venv(tmp_path / "work/project/.venv")
    make_venv(tmp_path / "work/project/.venv/inner")
    make_venv(tmp_path / "a/b/c/d/too-deep")
    make_venv(tmp_path / "node_modules/hidden")
    conda = tmp_path / "miniconda3"
    for place in (conda, conda / "envs/serve"):
        (place / "conda-meta").mkdir(parents=True)
        (place / "bin").mkdir()
        (place / "bin/python").symlink_to(sys.executable)
    (tmp_path / "link").symlink_to(tmp_path / "work")
    found = find.search([], [str(tmp_path)], set())
    kinds = {(os.path.relpath(path, tmp_path), kind) for path, kind in found.environments}
    assert kinds == {("work/project/.venv", "venv"), ("miniconda3", "conda"), ("miniconda3/envs/serve", "conda")}
    assert not found.cut


def test_the_configured_one_comes_first_and_once(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_venv(tmp_path / name)
    found = find.search([str(tmp_path / "b"), str(tmp_path / "nothing")], [str(tmp_path)], set())
    assert [os.path.basename(path) for path, _kind in found.environments] == ["b", "a"]


def test_the_search_is_bounded(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"d{number:02}").mkdir()
    make_venv(tmp_path / "zz/venv")
    assert find.search([], [str(tmp_path)], set(), most=20).cut == "20 directories"
    assert find.search([], [str(tmp_path)], set(), seconds=0.0).cut


def test_network_file_systems_are_named_and_not_touched(tmp_path: Path) -> None:
    make_venv(tmp_path / "share/venv")
    found = find.search([], [str(tmp_path)], {str(tmp_path / "share")})
    assert (found.environments, found.skipped) == ([], [str(tmp_path / "share")])


def test_an_import_is_tried_and_its_end_is_told(agent: Agent, tmp_path: Path) -> None:
    files = {
        "broken/__init__.py": "raise ImportError('libnvrtc.so.13: cannot open shared object file')\n",
        "needy/__init__.py": "import not_installed_either\n",
        "dying/__init__.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
        "slow/__init__.py": "import time\ntime.sleep(600)\n",
        "noisy/__init__.py": "__version__ = '7'\nprint('x' * 10000)\nimport atexit\natexit.register(print, 'end')\n",
    }
    venv = make_venv(tmp_path / "venv", package("good", "1.0"), Dist("rest", "1", files))
    assert tried(agent, venv, "good") == {"state": "ok", "version": ""}
    assert tried(agent, venv, "noisy") == {"state": "ok", "version": "7"}
    assert tried(agent, venv, "absent")["state"] == tried(agent, venv, "absent.inner")["state"] == "missing"
    assert tried(agent, venv, "broken")["error"] == "ImportError: libnvrtc.so.13: cannot open shared object file"
    assert tried(agent, venv, "needy") == {"state": "error", "error": "ModuleNotFoundError: No module named 'not_installed_either'"}
    assert tried(agent, venv, "dying") == {"state": "signal", "error": "died of SIGSEGV"}
    assert tried(agent, venv, "slow", 1.0) == {"state": "time-out", "error": "no end after 1 s"}
    assert list(venv.rglob("__pycache__")) == [], "a look writes nothing"


def test_a_module_is_no_path_and_no_option() -> None:
    assert modules("torch, fastapi,torch") == ("torch", "fastapi")
    for text in ("-c", "a;b", "../x", "a..b", "1x"):
        with pytest.raises(UsageProblem):
            modules(text)


def environment(path: str, configured: bool = False, **states: str) -> Environment:
    imports = tuple(Import(name, state) for name, state in states.items())
    return Environment(path, "venv", f"{path}/bin/python", "3.12.1", "/usr/bin/python3.12", "", configured, 3, imports)


def test_doctor_says_which_environment_has_what_the_configured_one_lacks() -> None:
    found = Search((environment("/a", True, fla="ok", fastapi="missing"), environment("/b", fla="ok", fastapi="ok")), (), "")
    rows = list(checks(Host("ct200", venv="/a"), found, ("fla", "fastapi")))
    assert [row.level for row in rows] == ["ok", "block"]
    assert "cannot import fastapi: is not there" in rows[1].text and "/b" in rows[1].mend
    (row,) = checks(Host("ct200"), Search(found.environments[1:], (), ""), ("fla", "fastapi"))
    assert (row.level, row.evidence) == ("ok", ("/b",))
    alone = Search((environment("/a", True, fla="error"),), (), "")
    (row,) = checks(Host("ct200", venv="/a"), alone, ("fla",))
    assert (row.level, "no environment there has all" in row.mend) == ("block", True)
