"""The main job on an embedded default: two hosts, a hand-patched package, a push that is proved, one that is refused, a rollback.

Every command that it shows is run for real, as a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree_deploy.demo import tether
from ddtree_deploy.demo.sshd import free_port
from ddtree_deploy.errors import DeployError, HostUnreachable, UsageProblem

SOURCE_WHEELS = ("jinja2==3.1.6", "markupsafe==3.0.2", "packaging==25.0")
TARGET_WHEELS = ("jinja2==3.1.4", "markupsafe==2.1.5", "iniconfig==2.0.0")
PATCH = '\n\ndef who_patched_this():\n    """Added by hand on ct129, in no repository."""\n    return "ct129"\n'
# py_compile accepts this, an import does not: what the users of scp found out when their server started.
BREAKAGE = "\nfrom markupsafe import a_name_that_is_not_there\n"


class DemoFailed(DeployError):
    """The demo saw something else than it promises."""

    exit_code = 1
    kind = "demo"
    default_mend = "run `ddtree-deploy demo --keep DIR` and look at what is there"


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the demo plays: a directory with two venvs, `ddtree.toml`, and the environment of the commands."""

    root: Path
    env: dict[str, str]

    def site(self, host: str) -> Path:
        return next((self.root / host / "venv/lib").glob("python3.*")) / "site-packages"


def run(say: Callable[[str], None], keep: Path | None = None) -> None:
    """Play the demo, narrating with `say`; with `keep`, leave its files in that directory.

    Raises DemoFailed when a command ends otherwise than promised, UsageProblem when `keep` is not empty.
    """
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UsageProblem(f"`{keep}` is not empty", mend="give a new directory with `--keep`")
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(_tethered(keep.absolute() if keep else None))
        root.mkdir(parents=True, exist_ok=True)
        say("two hosts: venvs of their own, made from real wheels")
        for host, wheels in (("ct129", SOURCE_WHEELS), ("ct200", TARGET_WHEELS)):
            _make_venv(root / host / "venv", wheels)
        stage = Stage(root, stack.enter_context(_reachable(root, say)))
        _play(stage, say)
        if keep:
            say(f"everything is in {root}; go on there with DDTREE_HOME={root}/home")


@contextlib.contextmanager
def _tethered(keep: Path | None) -> Iterator[Path]:
    """Give the directory to play in; nothing that is started meanwhile, and no directory of ours, outlives this process."""
    mark = uuid.uuid4().hex
    argv = [sys.executable, "-m", tether.__name__, mark, *([str(keep)] if keep else [])]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as holder:
        assert holder.stdin and holder.stdout
        os.environ[tether.MARK] = mark
        try:
            yield Path(os.fsdecode(holder.stdout.readline()).rstrip("\n"))
        finally:
            del os.environ[tether.MARK]
            holder.stdin.close()
            holder.wait()  # a second Ctrl-C ends the waiting, not the tether


def _play(stage: Stage, say: Callable[[str], None]) -> None:
    say("on ct129 somebody patched one file by hand, and it works")
    utils = stage.site("ct129") / "jinja2/utils.py"
    utils.write_text(utils.read_text() + PATCH)
    _ddtree(stage, say, "snapshot", "ct129", "--label", "known-good")

    say("what would change on ct200, which has other versions and a package of its own")
    _ddtree(stage, say, "diff", "ct200", "--snapshot", "known-good")

    say("the push: only what is missing is sent, the staged tree is proved there, one rename switches, a fresh connection confirms")
    _ddtree(stage, say, "push", "ct200", "--snapshot", "known-good", "--verify", "-y")
    _expect(stage, "import jinja2.utils as u; print(u.who_patched_this())", "ct129", "the patch arrived")
    _expect(stage, "import iniconfig; print('kept')", "kept", "a package that only ct200 has was kept")

    say("now a change on ct129 that py_compile accepts and an import does not")
    init = stage.site("ct129") / "jinja2/__init__.py"
    init.write_text(init.read_text() + BREAKAGE)
    _ddtree(stage, say, "snapshot", "ct129", "--label", "broken", "--no-probe")
    _ddtree(stage, say, "push", "ct200", "--snapshot", "broken", "-y", fails_with=17)
    _expect(stage, "import jinja2.utils as u; print(u.who_patched_this())", "ct129", "refused: the proved generation is still live")
    _ddtree(stage, say, "status", "ct200")

    say("and back to what ct200 was before any of this")
    _ddtree(stage, say, "rollback", "ct200", "-y")
    _expect(stage, "import jinja2; print(jinja2.__version__)", "3.1.4", "generation 0 is what was found there")
    _ddtree(stage, say, "generations", "ct200")
    say("that was the main job: snapshot, diff, push, proof, refusal, rollback")
    _complete(stage, say)


def _complete(stage: Stage, say: Callable[[str], None]) -> None:
    """End with a completion by the standalone DDTree server and the tiny pair, when the `server` extra is installed."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "fastapi", "uvicorn")):
        say("with the `server` extra installed, this would end with a completion by the DDTree server on a tiny model")
        return
    port = free_port()
    command = [sys.executable, "-m", "ddtree.server", "--tiny", "--port", str(port)]
    say(f"$ {shlex.join(['python', *command[1:]])}")
    with (stage.root / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"}, start_new_session=True)
    try:
        chat = _ask(server, f"http://127.0.0.1:{port}", "Print the 7 times table.")
    finally:
        server.terminate()
        server.wait()
    usage = chat["usage"]
    say(f"a tiny model answers, {usage['ddtree']['acceptance_length']} tokens a round: {chat['choices'][0]['message']['content']!r}")


def _ask(server: subprocess.Popen[bytes], url: str, question: str) -> Any:
    body = {"model": "ddtree-tiny", "messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 180
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)
        except (ConnectionError, urllib.error.URLError):
            time.sleep(0.5)
    raise DemoFailed("the DDTree server did not answer", mend="start it by hand: `python -m ddtree.server --tiny`")


def _make_venv(path: Path, wheels: tuple[str, ...]) -> None:
    _quiet([sys.executable, "-m", "venv", "--without-pip", str(path)], "a venv can not be made")
    pip = [sys.executable, "-m", "pip", "--python", str(path / "bin/python"), "install", "-q", "--no-deps", "--disable-pip-version-check"]
    _quiet([*pip, *wheels], "the demo's wheels can not be installed: is there a network")


def _quiet(argv: list[str], problem: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoFailed(problem, causes=tuple((done.stderr or done.stdout).strip().splitlines()[-5:]))


@contextlib.contextmanager
def _reachable(root: Path, say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """Make `ct129` and `ct200` names of hosts: over a loopback sshd when one can run here, else as local hosts."""
    from ddtree_deploy.demo.sshd import loopback_sshd

    env = {**os.environ, "DDTREE_HOME": str(root / "home"), "COLUMNS": os.environ.get("COLUMNS", "110")}
    with contextlib.ExitStack() as stack:
        try:
            mark = {tether.MARK: os.environ[tether.MARK]}  # for what is started through it
            sshd = stack.enter_context(loopback_sshd(root / "sshd", aliases=("ct129", "ct200"), environment=mark))
            # An sshd that runs may still refuse this user (a locked account, say).
            argv = ["ssh", "-F", str(sshd.client_config), "-o", "BatchMode=yes", "ct129", "true"]
            subprocess.run(argv, check=True, capture_output=True, timeout=20)
            env["DDTREE_SSH_CONFIG"] = str(sshd.client_config)
            transport = ""
            say(f"both are reached over a real sshd on 127.0.0.1, port {sshd.port}")
        except (HostUnreachable, OSError, subprocess.SubprocessError) as error:
            transport = 'transport = "local"\n'
            say(f"no sshd can be used here ({error}); both are reached by the local connector")
        hosts = "".join(f'[hosts.{name}]\n{transport}venv = "{root / name / "venv"}"\n' for name in ("ct129", "ct200"))
        (root / "ddtree.toml").write_text(hosts)
        yield env


def _ddtree(stage: Stage, say: Callable[[str], None], *argv: str, fails_with: int = 0) -> None:
    say(f"$ ddtree-deploy {shlex.join(argv)}")
    done = subprocess.run([sys.executable, "-m", "ddtree_deploy", *argv], cwd=stage.root, env=stage.env, check=False)
    if done.returncode != fails_with:
        raise DemoFailed(f"`{argv[0]}` ended with {done.returncode} where {fails_with} is right")
    if fails_with:
        say(f"exit code {done.returncode}, as it should be")


def _expect(stage: Stage, code: str, answer: str, meaning: str) -> None:
    python = stage.root / "ct200/venv/bin/python"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    if done.stdout.strip() != answer:
        raise DemoFailed(f"not so: {meaning}", causes=tuple((done.stderr or done.stdout).splitlines()[-3:]))
