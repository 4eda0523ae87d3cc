"""Who uses a tree, and which servers run: real processes, looked at through /proc."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_deploy.agent import procs

from .conftest import Place

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that says a line when it is ready, and end it with the test."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.PIPE, **options)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def python_that(code: str) -> list[str]:
    return [sys.executable, "-I", "-c", code + "\nprint('ready', flush=True)\nimport sys; sys.stdin.read()"]


def uses(root: Path, pid: int) -> dict[str, str]:
    return {use["how"]: use["path"] for use in procs.users_of([str(root)])["users"] if use["pid"] == pid}


def test_a_mapped_library_an_open_file_and_a_working_directory_are_uses(
    tmp_path: Path, start: Start, build: Callable[..., Path]
) -> None:
    root = tmp_path / "site"
    (root / "sub").mkdir(parents=True)
    library = build(root / "libx.so", "int x(void) { return 1; }")
    (root / "data").write_text("x")
    process = start(
        python_that(f"import ctypes; keep = ctypes.CDLL({str(library)!r}); f = open({str(root / 'data')!r})"),
        cwd=root / "sub",
    )
    assert uses(root, process.pid) == {"maps": str(library), "fd": str(root / "data"), "cwd": str(root / "sub")}
    (use, *_) = procs.users_of([str(root)])["users"]
    assert use["command"].startswith(sys.executable)
    # The name of a tree is not the beginning of another's.
    assert uses(tmp_path / "sit", process.pid) == {}


def test_who_will_import_pure_python_from_a_tree_uses_it(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "generations" / "3"
    root.mkdir(parents=True)
    code = "print('ready', flush=True)\nimport sys; sys.stdin.read()"
    process = start([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": f"/elsewhere:{root}/site"})
    assert uses(root, process.pid) == {"path": f"{root}/site"}
    assert uses(tmp_path / "generations" / "33", process.pid) == {}


def test_a_file_that_was_replaced_under_a_process_is_still_a_use(
    tmp_path: Path, start: Start, build: Callable[..., Path]
) -> None:
    root = tmp_path / "generations" / "3"
    root.mkdir(parents=True)
    library = build(root / "libx.so", "int x(void) { return 1; }")
    process = start(python_that(f"import ctypes; keep = ctypes.CDLL({str(library)!r})"))
    library.unlink()
    assert uses(root, process.pid) == {"maps": f"{library} (deleted)"}
    assert uses(root.parent, process.pid) == {"maps": f"{library} (deleted)"}


def test_a_tree_is_found_through_a_link_to_it(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "real"
    root.mkdir()
    (tmp_path / "link").symlink_to("real")
    process = start(python_that("pass"), cwd=root)
    assert uses(tmp_path / "link", process.pid) == {"cwd": str(root)}


def test_a_worker_belongs_to_the_farthest_ancestor_that_uses_the_tree(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    worker = "import os, sys; print(os.getppid(), os.getpid(), flush=True); sys.stdin.read()"
    # A shell that uses nothing of the tree stands between them.
    shell = f"cd / && {sys.executable} -I -c 'import os; os.chdir(\"{root}\"); {worker}'; true"
    process = start(python_that(f"import subprocess; subprocess.Popen(['sh', '-c', {shell!r}])"), cwd=root)
    assert process.stdout is not None
    words = process.stdout.readline().split()
    words = words if len(words) == 2 else process.stdout.readline().split()
    between, child = map(int, words)
    roots = {use["pid"]: use["root"] for use in procs.users_of([str(root)])["users"]}
    assert between not in (process.pid, child) and roots == {process.pid: process.pid, child: process.pid}


def test_an_executable_in_the_tree_is_a_use(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    shutil.copy("/bin/cat", root / "tool")
    process = subprocess.Popen([root / "tool"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        end = time.monotonic() + 5
        while "exe" not in uses(root, process.pid) and time.monotonic() < end:
            time.sleep(0.01)
        assert uses(root, process.pid)["exe"] == str(root / "tool")
    finally:
        process.communicate()


def test_this_process_is_not_a_use_of_its_own(tmp_path: Path) -> None:
    with open(tmp_path / "mine", "w"):
        assert uses(tmp_path, os.getpid()) == {}


def _may_make_namespaces() -> bool:
    return (
        os.geteuid() == 0
        and subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not _may_make_namespaces(), reason="needs root and mount namespaces")
def test_a_container_with_a_directory_of_the_same_name_is_no_use(tmp_path: Path, start: Start) -> None:
    root, other = tmp_path / "venv", tmp_path / "other"
    root.mkdir()
    other.mkdir()
    inside = f"cd {root} && echo ready && exec cat"
    contained = start(["unshare", "-m", "sh", "-c", f"mount --bind {other} {root} && {inside}"])
    # A service with a mount namespace of its own (PrivateTmp) sees the same files, and is a use.
    private = start(["unshare", "-m", "sh", "-c", inside])
    assert uses(root, contained.pid) == {}
    assert uses(root, private.pid) == {"cwd": str(root)}


def test_what_may_not_be_looked_at_is_counted(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        assert procs.users_of([str(tmp_path)])["unread"] > 0
        return
    # As nobody, root's processes are closed; `-c` since the checkout may be closed to nobody too.
    code = Path(procs.__file__).read_text() + f"\nprint(users_of([{str(tmp_path)!r}])['unread'])"
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-c", code],
        user="nobody",
        group="nogroup",
        extra_groups=[],
        cwd="/",
        check=True,
        capture_output=True,
    )
    assert int(done.stdout) > 0


# --- secrets


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--api-key", "abc", "--port", "1"], ["--api-key", "***", "--port", "1"]),
        (["--api-key=abc"], ["--api-key=***"]),
        (["--admin-api-key", "abc"], ["--admin-api-key", "***"]),
        (["--hf-token", "abc"], ["--hf-token", "***"]),
        (["--hf_token", "abc"], ["--hf_token", "***"]),
        (["--apiKey", "abc"], ["--apiKey", "***"]),
        (["--ssl-keyfile-password", "abc"], ["--ssl-keyfile-password", "***"]),
        (["--client-secret", "abc"], ["--client-secret", "***"]),
        (["--api-key", "-starts-with-a-dash"], ["--api-key", "***"]),
        (["--api-key", "--port", "1"], ["--api-key", "--port", "1"]),
        (["env", "HF_TOKEN=abc", "OPENAI_API_KEY=abc", "X=1"], ["env", "HF_TOKEN=***", "OPENAI_API_KEY=***", "X=1"]),
        (["--model", "https://user:pw@host/m"], ["--model", "https://***@host/m"]),
        (["--json-args", '{"api_key": "abc", "n": 1}'], ["--json-args", '{"api_key": "***", "n": 1}']),
        (["--header", "Authorization: Bearer abc.def"], ["--header", "Authorization: ***"]),
        (["--extra", "hf_abcdefghijklmnopqrst"], ["--extra", "***"]),
        (["--auth-tokens", "abc"], ["--auth-tokens", "***"]),
    ],
)
def test_secrets_in_a_command_line_are_hidden(argv: list[str], expected: list[str]) -> None:
    assert procs.redact(argv) == expected


# Flags of real launches that look like secrets and are the launch.
HARMLESS = [
    ["--tokenizer-path", "m", "--tokenizer-mode", "auto", "--skip-tokenizer-init"],
    ["--max-total-tokens", "40960", "--max-running-requests", "8", "--speculative-num-draft-tokens", "16"],
    ["--speculative-token-map", "/models/map.pt", "--ssl-keyfile", "/etc/key.pem", "--kv-cache-dtype", "fp8_e5m2"],
    ["--model-path", "meta-llama/Llama-3", "--tp", "8", "--json-model-override-args", '{"a": [1]}'],
    ["python", "-m", "sglang.launch_server", "--host", "0.0.0.0", "--mem-fraction-static=0.85"],
]


@pytest.mark.parametrize("argv", HARMLESS)
def test_what_is_no_secret_stays(argv: list[str]) -> None:
    assert procs.redact(argv) == argv


SECRET = "S3cr3tV4lu3"
FLAGS = st.sampled_from(
    ["--api-key", "--hf-token", "--admin-api-key", "--password", "--db-passwd", "--secret", "--auth_token"]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=12)), FLAGS, st.booleans(), st.lists(st.text(max_size=12)))
def test_the_value_of_a_secret_flag_is_never_left(before: list[str], flag: str, joined: bool, after: list[str]) -> None:
    given_flag = [f"{flag}={SECRET}"] if joined else [flag, SECRET]
    out = procs.redact([*before, *given_flag, *after])
    assert SECRET not in " ".join(out)
    assert len(out) == len(before) + len(given_flag) + len(after)


def test_the_environment_of_a_server_is_an_allow_list() -> None:
    given_env = {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_P2P_DISABLE": "1",
        "SGLANG_USE_X": "1",
        "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
        "PYTHONPATH": "/srv",
        "OMP_NUM_THREADS": "4",
        "SGLANG_API_KEY": "abc",
        "TORCH_HUB_TOKEN": "abc",
        "HF_TOKEN": "abc",
        "AWS_SECRET_ACCESS_KEY": "abc",
        "HOME": "/root",
        "TRITON_PROXY": "http://user:abc@proxy",
    }
    kept = procs.environment(given_env)
    assert set(kept) == {
        "CUDA_VISIBLE_DEVICES",
        "NCCL_P2P_DISABLE",
        "SGLANG_USE_X",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "OMP_NUM_THREADS",
        "TRITON_PROXY",
    }
    assert "abc" not in str(kept)


# --- servers

SERVER = """
import os, sys, time
if "--fork" in sys.argv and os.fork() == 0:
    time.sleep(300)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def with_sglang(place: Place) -> Place:
    package = place.live / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(SERVER)
    script = place.venv / "bin" / "sglang"
    script.write_text(f"#!{place.python}\n{SERVER}")
    script.chmod(0o755)
    return place


def test_running_servers_are_captured_without_their_secrets(with_sglang: Place, start: Start, tmp_path: Path) -> None:
    env = {**os.environ, "NCCL_DEBUG": "WARN", "SGLANG_ADMIN_API_KEY": "sesame", "HF_TOKEN": "sesame"}
    launched = start(
        [with_sglang.python, "-m", "sglang.launch_server", "--model-path", "m", "--api-key", "sesame"],
        env=env,
        cwd=tmp_path,
    )
    served = start([str(with_sglang.venv / "bin" / "sglang"), "serve", "--model-path", "n"])
    start([with_sglang.python, "-c", "print('ready', flush=True); import sys; sys.stdin.read()"])

    found = {server["pid"]: server for server in procs.servers(str(with_sglang.venv))}
    assert set(found) == {launched.pid, served.pid}
    one = found[launched.pid]
    assert one["argv"] == [with_sglang.python, "-m", "sglang.launch_server", "--model-path", "m", "--api-key", "***"]
    assert one["env"]["NCCL_DEBUG"] == "WARN"
    assert one["cwd"] == str(tmp_path)
    assert "sesame" not in str(found)
    assert found[served.pid]["argv"][1:3] == [str(with_sglang.venv / "bin" / "sglang"), "serve"]


def test_a_server_of_another_venv_is_not_ours(with_sglang: Place, start: Start, tmp_path: Path) -> None:
    start([with_sglang.python, "-m", "sglang.launch_server"])
    (tmp_path / "elsewhere").mkdir()
    assert procs.servers(str(tmp_path / "elsewhere")) == []


def test_a_worker_that_was_forked_is_not_a_server_of_its_own(with_sglang: Place, start: Start) -> None:
    process = start([with_sglang.python, "-m", "sglang.launch_server", "--fork"], start_new_session=True)
    try:
        assert [server["pid"] for server in procs.servers(str(with_sglang.venv))] == [process.pid]
    finally:
        os.killpg(process.pid, 9)
