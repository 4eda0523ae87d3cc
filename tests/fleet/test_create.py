"""Venvs that are made for a push to several hosts: what did not begin leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import run
from tests.fixtures.until import until
from tests.fixtures.venvs import Dist, contents, make_venv, site

pytestmark = pytest.mark.slow  # several processes a host


@pytest.fixture
def project(tmp_path: Path, quiet_home: Path) -> Path:
    """A directory whose ddtree.toml knows two hosts without a venv; what the snapshot brings imports unless `broken` is there."""
    kernel = f"import os\nassert not os.path.exists({str(tmp_path / 'broken')!r}), 'no driver here'\n"
    source = make_venv(tmp_path / "source", Dist("kernel", "1.0", {"kernel/__init__.py": kernel}))
    lines = [f'[hosts.{name}]\ntransport = "local"\nvenv = "{tmp_path}/{name}/venv"\n' for name in ("first", "second")]
    (tmp_path / "ddtree.toml").write_text("".join(lines))
    (tmp_path / "second").mkdir()
    taken = run("snapshot", "-q", "local", "--venv", str(source), cwd=tmp_path)
    assert taken.code == 0, taken.err
    return tmp_path


def test_when_the_first_does_not_prove_it_no_other_has_a_venv(project: Path) -> None:
    (project / "broken").touch()
    failed = run("push", "first", "second", "--create", "-y", cwd=project)
    assert failed.code == 17 and "`first`, 1 not touched" in failed.err and "no driver here" in failed.err, failed.err
    until(lambda: list((project / "second").iterdir()) == [], "what was made for the plan is taken away")
    (project / "broken").unlink()
    done = run("push", "first", "second", "--create", "-y", cwd=project)
    assert done.code == 0, done.err
    for name in ("first", "second"):
        assert contents(site(project / name / "venv")) == contents(site(project / "source"))
        assert not (project / name / "venv/.ddtree-unfinished").exists()


def test_a_plan_that_is_refused_leaves_nothing(project: Path) -> None:
    refused = run("push", "second", "--create", "-y", "--only", "nothing-of-that-name", cwd=project)
    assert refused.code == 2, refused.err
    until(lambda: list((project / "second").iterdir()) == [], "what was made for the plan is taken away")
