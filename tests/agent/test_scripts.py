"""Console scripts: written for the venv's own interpreter, run for real, and nobody else's file touched."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from ddtree_deploy.agent import scripts

from .conftest import Place


def install(site: Path, name: str, entry_points: str) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{name}.py,,\n../../../bin/data-script,,\n")
    (info / "entry_points.txt").write_text(entry_points)
    (site / f"{name.replace('-', '_')}.py").write_text(
        "import sys\ndef main():\n    print('ran', sys.argv[1:], sys.prefix)\n    return 3\n"
        "class app:\n    run = staticmethod(main)\n"
    )


def run(script: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([script, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.strip()


def test_a_console_script_runs_the_venvs_interpreter(place: Place) -> None:
    install(
        place.live,
        "tool",
        "[console_scripts]\ntool = tool:main\ntool-app = tool:app.run [extra]\n[other]\nx = tool:main\n",
    )
    made = scripts.regenerate(str(place.live), str(place.venv / "bin"), place.python)
    assert made == {"written": ["tool", "tool-app"], "removed": [], "kept": []}
    for name in ("tool", "tool-app"):
        script = place.venv / "bin" / name
        assert run(script, "a b", "c") == (3, f"ran ['a b', 'c'] {place.venv}")
        assert script.stat().st_mode & 0o777 == 0o755
    # A second time there is nothing to do.
    assert scripts.regenerate(str(place.live), str(place.venv / "bin"), place.python)["written"] == []


@pytest.mark.parametrize("name", ["with a space", "x" * 140, 'a "quote", a $dollar and a `tick`'])
def test_a_path_that_no_shebang_can_hold_works_through_sh(tmp_path: Path, place: Place, name: str) -> None:
    moved = tmp_path / name / "venv"
    moved.parent.mkdir()
    place.venv.rename(moved)
    (site,) = moved.glob("lib/python3*/site-packages")
    install(site, "tool", "[console_scripts]\ntool = tool:main\n")
    python = str(moved / "bin" / "python")
    scripts.regenerate(str(site), str(moved / "bin"), python)
    assert (moved / "bin" / "tool").read_text().startswith("#!/bin/sh\n")
    assert run(moved / "bin" / "tool", "a b") == (3, f"ran ['a b'] {moved}")
    assert scripts.regenerate(str(site), str(moved / "bin"), python)["written"] == []


PIP_STYLE = """#!{python}
# -*- coding: utf-8 -*-
import re
import sys
from tool import main
if __name__ == '__main__':
    sys.argv[0] = re.sub(r'(-script\\.pyw|\\.exe)?$', '', sys.argv[0])
    sys.exit(main())
"""


def test_an_installers_script_stays_while_it_does_the_same(place: Place) -> None:
    install(place.live, "tool", "[console_scripts]\ntool = tool:main\n")
    script = place.venv / "bin" / "tool"
    script.write_text(PIP_STYLE.format(python=place.python))
    assert scripts.regenerate(str(place.live), str(place.venv / "bin"), place.python)["written"] == []

    # One that came with the source host's interpreter, or that calls another function, is made anew.
    for text in (
        PIP_STYLE.format(python="/src/venv/bin/python"),
        PIP_STYLE.format(python=place.python).replace("main", "old"),
    ):
        script.write_text(text)
        assert scripts.regenerate(str(place.live), str(place.venv / "bin"), place.python)["written"] == ["tool"]
        script.chmod(0o755)
        assert run(script) == (3, f"ran [] {place.venv}")


def test_only_our_scripts_and_former_ones_go(place: Place) -> None:
    install(place.live, "tool", "[console_scripts]\ntool = tool:main\n")
    bin_dir = place.venv / "bin"
    scripts.regenerate(str(place.live), str(bin_dir), place.python)
    (bin_dir / "by-pip").write_text(PIP_STYLE.format(python=place.python))
    (bin_dir / "by-pip-elsewhere").write_text(PIP_STYLE.format(python=place.python))
    (bin_dir / "by-hand").write_text("#!/bin/sh\nexec python -m something\n")
    (bin_dir / "data-script").write_text("#!/bin/sh\n")
    before = set(os.listdir(bin_dir))

    # The next generation has no `tool`: what was its console script goes, the rest stays.
    made = scripts.regenerate(
        str(place.root), str(bin_dir), place.python, former=["tool", "by-pip", "by-hand", "python"]
    )
    assert made == {"written": [], "removed": ["by-pip", "tool"], "kept": []}
    assert set(os.listdir(bin_dir)) == before - {"by-pip", "tool"}


def test_what_somebody_wrote_by_hand_is_kept(place: Place) -> None:
    install(place.live, "tool", "[console_scripts]\ntool = tool:main\n")
    script = place.venv / "bin" / "tool"
    script.write_text('#!/bin/sh\nulimit -n 100000\nexec real-tool "$@"\n')
    assert scripts.regenerate(str(place.live), str(place.venv / "bin"), place.python) == {
        "written": [],
        "removed": [],
        "kept": ["tool"],
    }
    assert "ulimit" in script.read_text()


def test_a_link_in_the_place_of_a_script_is_not_written_through(place: Place, tmp_path: Path) -> None:
    install(place.live, "tool", "[console_scripts]\ntool = tool:main\n")
    outside = tmp_path / "outside"
    outside.write_text("precious")
    (place.venv / "bin" / "tool").symlink_to(outside)
    scripts.regenerate(str(place.live), str(place.venv / "bin"), place.python)
    assert outside.read_text() == "precious"


def test_hostile_and_reserved_names_are_not_written(place: Place, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in (place.venv / "bin").iterdir()}
    install(
        place.live,
        "evil",
        "[console_scripts]\n../../escaped = evil:main\n/abs = evil:main\n.hidden = evil:main\npython = evil:main\n"
        "python3.12 = evil:main\nactivate = evil:main\nActivate.ps1 = evil:main\n"
        "bad1 = evil\nbad2 = evil:main();import os\nbad3 = evil;x:main\nbad4 = 'evil:main'\na b = evil:main\n",
    )
    assert scripts.regenerate(str(place.live), str(place.venv / "bin"), place.python)["written"] == []
    assert {path.name: path.read_bytes() for path in (place.venv / "bin").iterdir()} == before
    assert not (tmp_path / "escaped").exists()
