"""What compiles in a staged tree, which bytecode is taken, and what of it is an error."""

from __future__ import annotations

import os
import subprocess
import threading

import pytest

from ddtree_deploy.agent import prove
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.main import Session

from .conftest import Place, write_sources


def run_in(place: Place, code: str) -> str:
    done = subprocess.run(
        [place.python, "-c", f"import sys; sys.path.insert(0, {str(place.root)!r}); {code}"],
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def test_each_source_that_does_not_compile_is_named_with_its_reason(session: Session, place: Place) -> None:
    paths = write_sources(
        place.root,
        good="x = 1\n",
        broken="def f(:\n",
        second="a = 1\nb = = 2\n",
        latin_with_cookie="# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"),
        latin_without=b"name = '\xe9'\n",
        bom=b"\xef\xbb\xbfx = 1\n",
        null=b"x = 1\0\n",
        unknown_cookie=b"# coding: no-such-codec\n",
        deep="x = " + "(" * 5000 + ")" * 5000 + "\n",
        warns="x = '\\d'\nassert (1, 'always true')\n",
        empty="",
        crlf="if 1:\r\n    x = 2\r\n",
    )
    (place.root / "directory.py").mkdir()
    os.mkfifo(place.root / "fifo.py")
    paths += ["directory.py", "gone.py"]

    compiled, errors = prove.syntax(session, place.python, str(place.root), paths)

    said = dict(errors)
    assert set(said) == {
        "broken.py",
        "second.py",
        "latin_without.py",
        "null.py",
        "unknown_cookie.py",
        "deep.py",
        "directory.py",
        "gone.py",
    }
    assert compiled == len(paths) - len(errors)
    assert said["broken.py"].startswith("line 1: ")
    assert said["second.py"] == "line 2: invalid syntax"
    assert "codec" in said["latin_without.py"] or "encoding" in said["latin_without.py"]
    assert "null byte" in said["null.py"]
    assert "no-such-codec" in said["unknown_cookie.py"]
    assert said["gone.py"].startswith("FileNotFoundError")


def test_the_import_system_takes_the_bytecode_that_was_written(session: Session, place: Place) -> None:
    write_sources(place.root, mod="value = 'old'\n")
    source = place.root / "mod.py"
    assert prove.syntax(session, place.python, str(place.root), ["mod.py"]) == (1, [])
    info = source.stat()

    source.write_text("value = 'new'\n")
    os.utime(source, ns=(info.st_atime_ns, info.st_mtime_ns))

    # Same size and mtime: the interpreter runs the old code, and only a comparison can tell.
    assert run_in(place, "import mod; print(mod.value)") == "old"
    compiled, errors = prove.syntax(session, place.python, str(place.root), ["mod.py"], write=False)
    assert compiled == 0
    assert errors[0][0] == "mod.py"
    assert errors[0][1].startswith("stale bytecode")

    # Writing heals it.
    assert prove.syntax(session, place.python, str(place.root), ["mod.py"]) == (1, [])
    assert prove.syntax(session, place.python, str(place.root), ["mod.py"], write=False) == (1, [])
    assert run_in(place, "import mod; print(mod.value)") == "new"


def test_bytecode_by_py_compile_itself_is_not_called_stale(session: Session, place: Place) -> None:
    text = "def f(a, *, b=frozenset({1, 2, 3})):\n    return [x for x in a if x in {4, 5, 'six'}] or (lambda: b)()\n"
    names = write_sources(place.root, timestamp=text, checked=text, unchecked=text)
    for name in names:
        mode = {"timestamp.py": "TIMESTAMP", "checked.py": "CHECKED_HASH", "unchecked.py": "UNCHECKED_HASH"}[name]
        how = f"invalidation_mode=p.PycInvalidationMode.{mode}"
        run_in(place, f"import py_compile as p; p.compile({str(place.root / name)!r}, {how})")
    assert prove.syntax(session, place.python, str(place.root), names, write=False) == (3, [])
    for name in names:
        (place.root / name).write_text("x = 1\n")
    # An unchecked hash is taken whatever the source says; the other two are compiled anew by an import.
    _, errors = prove.syntax(session, place.python, str(place.root), names, write=False)
    assert [path for path, _ in errors] == ["unchecked.py"]


def test_checking_writes_nothing(read_only: Session, place: Place) -> None:
    names = write_sources(place.root, one="x = 1\n", two="y = (\n")
    prove.syntax(read_only, place.python, str(place.root), names, write=False)
    assert sorted(path.name for path in place.root.iterdir()) == ["one.py", "two.py"]


def test_what_fails_on_the_source_host_too_is_not_an_error(session: Session, place: Place) -> None:
    names = write_sources(place.root, template="{{ name }} = $\n", ours="def f(:\n")
    _, errors = prove.syntax(session, place.python, str(place.root), names, baseline={"template.py"})
    assert [path for path, _ in errors] == ["ours.py"]


def test_many_sources_are_compiled_by_several_processes(session: Session, place: Place) -> None:
    names = write_sources(place.root, **{f"m{k}": f"x = {k}\n" if k % 97 else "x = (\n" for k in range(400)})
    compiled, errors = prove.syntax(session, place.python, str(place.root), names, jobs=3)
    assert [path for path, _ in errors] == sorted(f"m{k}.py" for k in range(0, 400, 97))
    assert compiled == 400 - len(errors)
    assert len(list((place.root / "__pycache__").iterdir())) == compiled


def test_a_source_that_kills_the_compiler_is_named_and_the_rest_is_compiled(session: Session, place: Place) -> None:
    # With 200 KiB of stack a nesting that the parser's own limit admits is a real SIGSEGV.
    small = place.venv / "bin" / "small-stack"
    small.write_text(f'#!/bin/sh\nulimit -s 200\nexec {place.python} "$@"\n')
    small.chmod(0o755)
    names = write_sources(place.root, aa="x = 1\n" * 3000, killer="x = " + "[" * 190 + "]" * 190 + "\n", zz="x = 1\n")
    compiled, errors = prove.syntax(session, str(small), str(place.root), names)
    assert compiled == 2
    assert errors == [("killer.py", "the compiler died of SIGSEGV")]


def test_an_interpreter_that_does_not_run_is_a_failure(session: Session, place: Place) -> None:
    names = write_sources(place.root, one="x = 1\n")
    with pytest.raises(Failure, match="does not start"):
        prove.syntax(session, str(place.venv / "bin" / "nothing"), str(place.root), names)
    with pytest.raises(Failure, match="does not compile"):
        prove.syntax(session, "/bin/false", str(place.root), names)


def test_nothing_to_compile_starts_nothing(session: Session, place: Place) -> None:
    assert prove.syntax(session, "/no/such/python", str(place.root), []) == (0, [])


def test_an_abort_stops_the_compile(session: Session, place: Place) -> None:
    names = write_sources(place.root, **{f"m{k}": "x = [" + "1 + 2," * 20000 + "]\n" for k in range(60)})
    threading.Timer(0.5, session.abort).start()
    with pytest.raises(Failure, match="stopped"):
        prove.syntax(session, place.python, str(place.root), names, jobs=1)
    assert len(list((place.root / "__pycache__").glob("*.pyc"))) < 60
