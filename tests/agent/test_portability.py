"""The agent runs on what a host has: any Python from 3.9 on, nothing but the standard library, a zip in memory."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ddtree_deploy.agent
from ddtree_deploy.agent import frames
from ddtree_deploy.boot import agent_zip

AGENT = Path(ddtree_deploy.agent.__file__).parent
SOURCES = sorted(AGENT.glob("*.py"))
#: Sent to a host at the start of each command: a second over a line of 1 Mbit/s.
LARGEST = 128 << 10
#: With what newer Pythons have and the agent does without elsewhere: compression (3.14).
STDLIB = sys.stdlib_module_names | {"compression"}


def interpreters() -> list[str]:
    """Return every CPython from 3.9 on that is installed here, by version; this one is always among them."""
    candidates = [sys.executable, "/usr/bin/python3"]
    candidates += [found for minor in range(9, 16) if (found := shutil.which(f"python3.{minor}"))]
    candidates += [str(path) for path in Path(os.path.expanduser("~/.pyenv/versions")).glob("3.*/bin/python3")]
    found: dict[tuple[int, ...], str] = {}
    for path in candidates:
        try:
            done = subprocess.run(
                [path, "-I", "-S", "-c", "import sys; print(*sys.version_info[:3])"],
                capture_output=True,
                text=True,
                check=True,
                timeout=30,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        version = tuple(int(part) for part in done.stdout.split())
        if version >= (3, 9):
            found.setdefault(version[:2], path)
    return [found[version] for version in sorted(found)]


PYTHONS = interpreters()


def test_the_oldest_supported_python_is_tried_where_it_is_installed() -> None:
    assert sys.executable in PYTHONS or len(PYTHONS) > 1


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_agent_imports_only_the_standard_library_and_itself(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 9))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: a relative import"
            names = [node.module or ""]
        for name in names:
            top = name.split(".")[0]
            allowed = name == "ddtree_deploy.agent" or name.startswith("ddtree_deploy.agent.")
            assert allowed or top in STDLIB, f"{path.name}:{node.lineno}: imports {name}"


@pytest.mark.parametrize("name", ["compile_child.py", "probe_child.py"])
def test_what_runs_in_a_child_imports_nothing_of_ours(name: str) -> None:
    assert "ddtree_deploy" not in (AGENT / name).read_text()


def test_the_agent_is_small() -> None:
    assert len(agent_zip()) <= LARGEST


@pytest.mark.parametrize("python", PYTHONS)
def test_every_source_compiles_without_a_warning(python: str) -> None:
    code = (
        "import sys, warnings\nwarnings.simplefilter('error')\n"
        "for path in sys.argv[1:]:\n    compile(open(path, encoding='utf-8').read(), path, 'exec')\n"
    )
    subprocess.run([python, "-I", "-S", "-c", code, *map(str, SOURCES)], check=True)


@pytest.mark.parametrize("python", PYTHONS)
def test_the_zip_serves_and_proves_under_this_interpreter(python: str, tmp_path: Path) -> None:
    """Run the agent as a host would: from memory, isolated; let it compile and import by this same interpreter."""
    base = tmp_path / "base"
    base.mkdir()
    subprocess.run([python, "-I", "-m", "venv", "--without-pip", str(base / "venv")], check=True)
    (site,) = (base / "venv").glob("lib/python3*/site-packages")
    (site / "good.py").write_text("import json\n")
    (site / "bad.py").write_text("def f(:\n")
    code = """
import os, sys
data = sys.stdin.buffer.read()
fd = os.memfd_create("agent")
os.write(fd, data)
sys.path.insert(0, "/proc/self/fd/%d" % fd)
import json, pkgutil, importlib
import ddtree_deploy.agent
for module in pkgutil.iter_modules(ddtree_deploy.agent.__path__):
    importlib.import_module("ddtree_deploy.agent." + module.name)
from ddtree_deploy.agent import facts, procs, prove, scripts, venvs
from ddtree_deploy.agent.main import Session
venv, site = sys.argv[1:]
python = os.path.join(venv, "bin", "python")
null = os.open(os.devnull, os.O_RDWR)
session = Session(null, null, False, -1)
print(json.dumps({
    "facts": facts.python_facts(python), "inspect": venvs.inspect(venv), "space": facts.space(venv),
    "host": facts.host_facts(venv), "servers": procs.servers(venv), "users": procs.users_of([site])["users"],
    "scripts": scripts.regenerate(site, os.path.join(venv, "bin"), python),
    "syntax": prove.syntax(session, python, site, ["good.py", "bad.py"]),
    "stale": prove.syntax(session, python, site, ["good.py"], write=False),
    "imports": prove.imports(session, python, site, site, venv, ["good", "bad"]),
}))
"""
    done = subprocess.run(
        [python, "-I", "-S", "-W", "error", "-c", code, str(base / "venv"), str(site)],
        input=agent_zip(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    said = json.loads(done.stdout)
    assert said["inspect"]["site"] == said["facts"]["purelib"] == str(site.relative_to(base / "venv"))
    assert said["syntax"][0] == 1
    assert said["syntax"][1][0][0] == "bad.py"
    assert said["stale"] == [1, []]
    assert [proof["ok"] for proof in said["imports"]] == [True, False]
    assert said["imports"][1]["error"].startswith("SyntaxError")
    assert said["scripts"] == {"written": [], "removed": [], "kept": []}


@pytest.mark.parametrize("python", PYTHONS)
def test_the_frames_of_this_interpreter_are_those_of_ours(python: str) -> None:
    header, payload = frames.pack({"a": [1, "ü", None]})
    code = (
        f"import sys; sys.path.insert(0, {str(AGENT.parents[1])!r})\n"
        "from ddtree_deploy.agent import frames\nimport json\n"
        "header, payload = json.loads(sys.argv[1]), bytes.fromhex(sys.argv[2])\n"
        "assert frames.unpack(header, payload) == {'a': [1, '\\u00fc', None]}\n"
    )
    subprocess.run([python, "-I", "-S", "-c", code, json.dumps(header), payload.hex()], check=True)
