"""Would the deployed SGLang take DDTREE as a plugin? Asked of the server's own interpreter, before anything is started.

SGLang logs and swallows what a plugin raises, and then serves without it or dies of an unknown algorithm.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile

from ddtree_deploy.agent import children

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

#: It imports SGLang and torch, from a cold disk perhaps.
SECONDS = 300.0


def registration(venv: str, tree: str, env: dict[str, str], seconds: float = SECONDS) -> Json:
    """Return `{registered, route, version, detail, lines}`; `lines` are the last of what was written when it is not there.

    Nothing of the tree is changed: no bytecode is written, and what is compiled goes to a directory that is removed.
    """
    scratch = tempfile.mkdtemp(prefix="ddtree-plugin-")
    full = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    full.update(env, PYTHONPATH=tree, PYTHONDONTWRITEBYTECODE="1", TRITON_CACHE_DIR=scratch, TORCHINDUCTOR_CACHE_DIR=scratch)
    try:
        with open(os.path.join(scratch, "out"), "w+b") as out, open(os.path.join(scratch, "err"), "w+b") as err:
            argv = [os.path.join(venv, "bin", "python"), "-m", "sglang_overlay.plugin"]
            process = subprocess.Popen(
                argv, env=full, cwd=scratch, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                return _absent("no answer within %.0f s" % seconds, err)
            finally:
                children.kill_group(process)
            out.seek(0)
            try:
                said: Json = json.loads((out.read().splitlines() or [b""])[-1])
                return {**said, "registered": said["registered"] is True, "detail": str(said["detail"]), "lines": _last(err)}
            except (ValueError, KeyError, TypeError):
                return _absent("`python -m sglang_overlay.plugin` ended with status %s" % process.returncode, err)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _absent(detail: str, err: Any) -> Json:
    return {"registered": False, "route": "none", "version": "", "detail": detail, "lines": _last(err)}


def _last(err: Any) -> list[str]:
    err.seek(0)
    return [line for line in err.read().decode("utf-8", "replace").splitlines() if line.strip()][-6:]
