"""The proofs on real trees: what compiles, what loads, and what each way to fail looks like."""

from __future__ import annotations

import hashlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree_deploy.agent import probe, prove, walk
from ddtree_deploy.agent.failure import Failure
from ddtree_deploy.agent.main import Session

from .conftest import Place, make_place

Build = Callable[..., Path]
AS_ROOT = os.geteuid() == 0 and os.path.exists("/usr/bin/python3")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


# --- syntax


def write_sources(root: Path, **sources: str | bytes) -> list[str]:
    for name, text in sources.items():
        (root / f"{name}.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    return [f"{name}.py" for name in sources]


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


# --- imports


def prove_imports(session: Session, place: Place, *modules: str, **options: Any) -> list[dict[str, Any]]:
    options.setdefault("timeout", 30.0)
    return prove.imports(
        session, place.python, str(place.root), str(place.live), str(place.venv), list(modules), **options
    )


def test_the_ways_an_import_ends(session: Session, place: Place, build: Build) -> None:
    build(place.root / "segfault.so", "void *PyInit_segfault(void) { *(volatile int *)0 = 1; return 0; }")
    (place.root / "namespace" / "part").mkdir(parents=True)
    (place.root / "namespace" / "part" / "__init__.py").write_text("")
    write_sources(
        place.root,
        good="value = 1\n",
        garbage="import os, sys\nprint('{\"ok\": false}' * 1000)\nos.write(1, b'\\0\\xff')\nsys.stderr.write('no')\n",
        leaves="import os\nos._exit(0)\n",
        quits="import sys\nsys.exit(3)\n",
        raises="def inner():\n    raise RuntimeError('first line\\nsecond line')\n\ninner()\n",
        stops="raise KeyboardInterrupt\n",
        forks="import os\nos.fork()\n",
        closes="import os\nos.closerange(0, 3)\n",
        aborts="import os\nos.abort()\n",
    )
    modules = [
        "segfault",
        "namespace.part",
        "namespace",
        "good",
        "garbage",
        "leaves",
        "quits",
        "raises",
        "stops",
        "forks",
        "closes",
        "aborts",
        "nowhere",
    ]
    proofs = {proof["module"]: proof for proof in prove_imports(session, place, *modules)}

    assert list(proofs) == modules
    assert {name for name, proof in proofs.items() if proof["ok"]} == {
        "namespace.part",
        "namespace",
        "good",
        "garbage",
        "forks",
        "closes",
    }
    assert proofs["segfault"]["signal"] == "SIGSEGV"
    assert "segfault" in proofs["segfault"]["error"].lower() or "SIGSEGV" in proofs["segfault"]["error"]
    assert "Segmentation fault" in proofs["segfault"]["traceback"]
    assert proofs["aborts"]["signal"] == "SIGABRT"
    assert proofs["leaves"]["error"] == "the process ended with status 0 before the import was done"
    assert proofs["quits"]["error"] == "the import called sys.exit(3)"
    assert proofs["raises"]["error"] == "RuntimeError: first line"
    assert "in inner" in proofs["raises"]["traceback"]
    assert proofs["raises"]["traceback"].splitlines()[1].strip().startswith(f'File "{place.root}/raises.py"')
    assert proofs["stops"]["error"].startswith("KeyboardInterrupt")
    assert proofs["nowhere"]["error"] == "ModuleNotFoundError: No module named 'nowhere'"
    assert all(proof["foreign_libraries"] == [] for proof in proofs.values())
    assert set(proofs["good"]) == {"module", "ok", "seconds", "error", "traceback", "signal", "foreign_libraries"}


def test_an_import_that_hangs_is_stopped_with_its_children_and_its_stack_shown(session: Session, place: Place) -> None:
    write_sources(
        place.root,
        hang="import subprocess, time\n"
        f"child = subprocess.Popen(['sleep', '300'])\nopen({str(place.venv / 'pid')!r}, 'w').write(str(child.pid))\n"
        "def waiting_for_ever():\n    time.sleep(300)\n\nwaiting_for_ever()\n",
    )
    (proof,) = prove_imports(session, place, "hang", timeout=1.5)
    assert not proof["ok"]
    assert proof["error"] == "no answer within 1.5 s"
    assert proof["signal"] == ""
    assert "waiting_for_ever" in proof["traceback"]
    assert wait_until(lambda: not alive(int((place.venv / "pid").read_text())))


def test_what_an_import_leaves_running_does_not_hold_up_the_proof(session: Session, place: Place) -> None:
    write_sources(
        place.root,
        daemon="import subprocess\nchild = subprocess.Popen(['sleep', '300'], close_fds=False)\n"
        f"open({str(place.venv / 'pid')!r}, 'w').write(str(child.pid))\n",
    )
    (proof,) = prove_imports(session, place, "daemon", timeout=60.0)
    assert proof["ok"]
    assert proof["seconds"] < 30
    assert wait_until(lambda: not alive(int((place.venv / "pid").read_text())))


def test_a_core_file_is_not_left_behind(session: Session, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sources(place.root, core="import os, resource\nassert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)\n")
    assert prove_imports(session, place, "core")[0]["ok"]


def test_the_staged_tree_stands_in_for_the_live_one(session: Session, place: Place) -> None:
    (place.live / "only_live.py").write_text("")
    (place.live / "both.py").write_text("which = 'live'\n")
    (place.root / "both.py").write_text("which = 'staged'\n")
    (place.root / "by_pth").mkdir()
    (place.root / "by_pth" / "reached.py").write_text("")
    (place.root / "paths.pth").write_text("by_pth\nimport os; os.environ['PTH_CODE'] = 'ran'\n")
    write_sources(
        place.root,
        looks="import os, sys, site, sysconfig, both, reached\n"
        "assert both.which == 'staged', both.which\n"
        f"assert sys.prefix == sys.exec_prefix == {str(place.venv)!r}, sys.prefix\n"
        "assert os.environ['PTH_CODE'] == 'ran'\n"
        f"assert {str(place.root)!r} in sys.path and {str(place.live)!r} not in sys.path, sys.path\n"
        "assert '' not in sys.path and os.getcwd() == '/'\n"
        "assert os.environ['EXTRA'] == 'given' and 'DDTREE_HOME' not in os.environ\n"
        "exit, quit, help\n"
        "import io\nassert os.read(0, 1) == b''\n",
    )
    looks, only = prove_imports(session, place, "looks", "only_live", env={"EXTRA": "given"})
    assert looks["ok"], looks["traceback"]
    assert only["error"] == "ModuleNotFoundError: No module named 'only_live'"


def test_the_live_tree_is_proved_the_same_way(session: Session, place: Place) -> None:
    (place.live / "here.py").write_text("")
    proofs = prove.imports(session, place.python, str(place.live), str(place.live), str(place.venv), ["here"])
    assert proofs[0]["ok"]
    assert proofs[0]["foreign_libraries"] == []


def test_staged_proofs_leave_bytecode_and_read_only_ones_leave_nothing(
    session: Session, read_only: Session, place: Place
) -> None:
    write_sources(place.root, mod="x = 1\n")
    assert prove_imports(read_only, place, "mod")[0]["ok"]
    assert [path.name for path in place.root.iterdir()] == ["mod.py"]
    assert prove_imports(session, place, "mod")[0]["ok"]
    assert list((place.root / "__pycache__").glob("mod.*.pyc"))


def test_bytecode_that_can_not_be_written_does_not_fail_the_import(session: Session, place: Place) -> None:
    write_sources(place.root, mod="x = 1\n")
    (place.root / "__pycache__").write_text("a file in the way")
    assert prove_imports(session, place, "mod")[0]["ok"]


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


def test_system_packages_are_there_only_for_a_venv_that_wants_them(session: Session, tmp_path: Path) -> None:
    base = getattr(sys, "_base_executable", sys.executable)
    place = make_place(tmp_path, base)
    probe_text = "import sys\nassert any(p.startswith(sys.base_prefix) and p.endswith('-packages') for p in sys.path)\n"
    write_sources(place.root, wants=probe_text)
    assert not prove_imports(session, place, "wants")[0]["ok"]
    config = place.venv / "pyvenv.cfg"
    config.write_text(config.read_text().replace("= false", "= true"))
    proof = prove_imports(session, place, "wants")[0]
    assert proof["ok"], proof["traceback"]


def test_an_abort_ends_the_imports(session: Session, place: Place) -> None:
    write_sources(
        place.root,
        hang=f"import os, time\nopen({str(place.venv / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)\n",
    )
    threading.Thread(target=lambda: (wait_until((place.venv / "pid").exists), session.abort()), daemon=True).start()
    with pytest.raises(Failure, match="stopped"):
        prove_imports(session, place, "hang", timeout=120.0)
    assert not alive(int((place.venv / "pid").read_text() or "0"))


def test_an_import_does_not_outlive_an_agent_that_is_killed(place: Place) -> None:
    pid_file = place.venv / "pid"
    write_sources(
        place.root, hang=f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)\n"
    )
    arguments = (place.python, str(place.root), str(place.live), str(place.venv))
    code = (
        "import os\nfrom ddtree_deploy.agent import prove\nfrom ddtree_deploy.agent.main import Session\n"
        "null = os.open(os.devnull, os.O_RDWR)\n"
        f"prove.imports(Session(null, null, False, -1), *{arguments!r}, ['hang'])\n"
    )
    agent = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert wait_until(lambda: pid_file.exists() and pid_file.read_text() != "", 30)
        child = int(pid_file.read_text())
        agent.send_signal(signal.SIGKILL)
        assert wait_until(lambda: not alive(child))
    finally:
        agent.kill()
        agent.wait()


@pytest.fixture
def open_place() -> Iterator[Place]:
    """A venv that every user of this machine can reach, of the system's interpreter."""
    base = Path(tempfile.mkdtemp(prefix="ddtree-test-"))
    base.chmod(0o755)
    try:
        yield make_place(base, "/usr/bin/python3")
    finally:
        shutil.rmtree(base)


@pytest.mark.skipif(not AS_ROOT, reason="needs root and /usr/bin/python3")
def test_root_imports_as_the_service_user(session: Session, open_place: Place) -> None:
    nobody = pwd.getpwnam("nobody")
    write_sources(
        open_place.root,
        who="import os\n"
        f"assert (os.getuid(), os.geteuid(), os.getgid()) == ({nobody.pw_uid}, {nobody.pw_uid}, {nobody.pw_gid})\n"
        f"assert 0 not in os.getgroups() and os.environ['HOME'] == {nobody.pw_dir!r}\n",
        private="x = 1\n",
    )
    (open_place.root / "private.py").chmod(0o600)
    who, private = prove_imports(session, open_place, "who", "private", user="nobody")
    assert who["ok"], who["traceback"]
    # The row of the umask: root can import it, and the service can not.
    assert private["error"].startswith("PermissionError")
    assert prove_imports(session, open_place, "private")[0]["ok"]


@pytest.mark.skipif(not AS_ROOT, reason="needs root and /usr/bin/python3")
def test_an_interpreter_that_the_service_user_can_not_reach_is_a_failure(session: Session, open_place: Place) -> None:
    open_place.venv.chmod(0o700)
    with pytest.raises(Failure, match=r"`nobody` can not start the interpreter `.*`: Permission denied"):
        prove_imports(session, open_place, "x", user="nobody")


def test_an_unknown_user_is_a_usage_failure(session: Session, place: Place) -> None:
    with pytest.raises(Failure, match="no user `nosuchuser`"):
        prove_imports(session, place, "x", user="nosuchuser")


# --- hashes


def rows(root: Path) -> dict[str, Any]:
    """Return what an index would have: kind, mode, size, digest, and the stamp (dev, ino, mtime_ns, ctime_ns)."""
    out = {}
    for path, kind, mode, size, *stamp, target, _links in walk.walk(str(root)):
        digest = target if kind == "l" else hashlib.sha256((root / path).read_bytes()).hexdigest()
        out[path] = (kind, mode, size, digest, *stamp)
    return out


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "pkg" / "__pycache__").mkdir(parents=True)
    for name in ("a.py", "b.py", "c.bin"):
        (root / "pkg" / name).write_bytes(name.encode() * 100)
    (root / "pkg" / "__pycache__" / "a.pyc").write_bytes(b"not part of it")
    (root / "link").symlink_to("pkg/a.py")
    return root


def test_an_untouched_tree_is_vouched_for_by_its_stamps(session: Session, tree: Path) -> None:
    expected = rows(tree)
    assert prove.hashes(session, str(tree), expected, stamps=False) == (3, 1, [])
    assert prove.hashes(session, str(tree), expected) == (0, 4, [])


def test_each_difference_is_named(session: Session, tree: Path) -> None:
    expected = rows(tree)
    same_size = bytearray((tree / "pkg" / "a.py").read_bytes())
    same_size[17] ^= 1
    (tree / "pkg" / "a.py").write_bytes(same_size)
    (tree / "pkg" / "b.py").chmod(0o755)
    (tree / "pkg" / "c.bin").unlink()
    (tree / "pkg" / "c.bin").symlink_to("a.py")
    (tree / "link").unlink()
    (tree / "link").symlink_to("pkg/b.py")
    (tree / "extra").write_text("new")
    expected["pkg/gone.py"] = ("f", 0o644, 1, "0" * 64, 0, 0, 0, 0)
    _hashed, _vouched, bad = prove.hashes(session, str(tree), expected)
    assert [line.partition(": ")[0] for line in bad] == [
        "extra",
        "link",
        "pkg/a.py",
        "pkg/b.py",
        "pkg/c.bin",
        "pkg/gone.py",
    ]
    assert bad[2].startswith("pkg/a.py: sha256 ")
    assert bad[3] == "pkg/b.py: mode 755 where 644 is expected"
    assert bad[4] == "pkg/c.bin: a link where a file is expected"


def test_a_stamp_that_lies_is_found_by_a_deep_look(session: Session, tree: Path) -> None:
    """A flipped bit below an unchanged stamp (a bad disk) is what `--deep` is for."""
    before = rows(tree)
    (tree / "pkg" / "c.bin").write_bytes(b"c.biN" * 100)
    expected = {path: (*before[path][:4], *row[4:]) for path, row in rows(tree).items()}
    assert prove.hashes(session, str(tree), expected)[2] == []
    assert len(prove.hashes(session, str(tree), expected, stamps=False)[2]) == 1
