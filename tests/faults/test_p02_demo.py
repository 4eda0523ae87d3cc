"""P2 and P22 for `demo`: however it is ended, nothing of it runs on or stays on the disk, and the next one goes."""

from __future__ import annotations

import base64
import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest

from ddtree_deploy.agent.serving.supervisor import offspring
from ddtree_deploy.demo.story import SOURCE_WHEELS, TARGET_WHEELS
from tests.faults.harness import EVERYTHING, report
from tests.fixtures.until import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

#: At which line, by which signal; the last one is at the end of the main job, so that it shows a whole run after killed ones.
POINTS = (("both are reached", signal.SIGKILL),)
MORE = (
    ("two hosts", signal.SIGKILL), ("two hosts", signal.SIGINT), ("$ ddtree-deploy snapshot", signal.SIGTERM),
    ("$ ddtree-deploy push", signal.SIGKILL), ("$ ddtree-deploy push", signal.SIGINT), ("$ ddtree-deploy rollback", signal.SIGHUP),
    ("that was the main job", signal.SIGKILL),
)  # fmt: skip
WHOLE = ("that was the main job", signal.SIGINT)
CODE = {
    "jinja2": {"jinja2/__init__.py": "__version__ = '{version}'\nimport markupsafe\n", "jinja2/utils.py": "\n"},
    "markupsafe": {"markupsafe/__init__.py": "\n"},
    "packaging": {"packaging/__init__.py": "\n"},
    "iniconfig": {"iniconfig/__init__.py": "\n"},
}


def make_wheel(directory: Path, name: str, version: str) -> None:
    """Write a wheel with the few lines of a package that the demo looks at: this test needs no index."""
    info = f"{name}-{version}.dist-info"
    files = {path: text.replace("{version}", version) for path, text in CODE[name].items()}
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def naming(directory: Path) -> list[str]:
    """Return the processes that have a directory in their command line or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                said = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:
                continue
            if any(os.fsencode(directory) in text for text in said):
                found.append(f"{entry.name}: {said[0].replace(bytes(1), b' ').decode('utf-8', 'replace')}")
    return found


def ended(processes: set[tuple[int, str]]) -> bool:
    return not any(_born(pid) == born for pid, born in processes)


def _born(pid: int) -> str:
    """Return when a process began, in ticks: a number may be given again (proc(5)); nothing for one that is over."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def test_a_demo_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    wheels, temporary = tmp_path / "wheels", tmp_path / "temporary"
    wheels.mkdir()
    temporary.mkdir()
    for requirement in {*SOURCE_WHEELS, *TARGET_WHEELS}:
        make_wheel(wheels, *requirement.split("=="))
    env = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"}
    chosen = [*POINTS, *(MORE if EVERYTHING else ()), WHOLE]
    for line, number in chosen:
        demo = subprocess.Popen(
            [sys.executable, "-m", "ddtree_deploy", "demo"], env=env, cwd=tmp_path, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            assert demo.stdout
            said = []
            for text in demo.stdout:
                said.append(text)
                if text.startswith(line):
                    break
            assert said[-1:] and said[-1].startswith(line), "".join(said)
            started = {(pid, born) for pid in offspring(demo.pid) if (born := _born(pid))}
            assert started and list(temporary.iterdir())
            demo.send_signal(number)
            demo.stdout.read()
            assert demo.wait(120) in (-number, 128 + number)
            until(lambda: not naming(temporary), f"{line}, {number.name}: what it started ends")
            until(partial(ended, started), f"{line}, {number.name}: its sshd ends")
            assert list(temporary.iterdir()) == [], f"{line}, {number.name}"
        finally:
            demo.kill()
            demo.communicate()
    report("P2 demo ended", signals=len(chosen))
